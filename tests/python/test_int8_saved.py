"""Files of rows in 8 bits, of this version and of the one before."""

import lzma

import numpy as np
import pariskv_core as pk
import pytest
import torch
from oracle_copies import eight_bits
from support import (
    HERE,
    SEARCHES,
    assert_same_bits,
    assert_same_sequence,
    current_device,
    f64,
    filled,
    randn_q,
    randn_step,
    rows_of,
    tensor,
    unchanged,
)
from test_int8_rows import int8_config


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("cut", [None, 1310, 1250, 640, 3])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(search, cut, tmp_path):
    config = int8_config(layers=2, dtype="float16", value_dim=128, **SEARCHES[search])
    f = filled(config, 1300)
    for layer in range(2):
        for _ in range(60):
            f.cache.decode(layer, [f.s], *randn_step(f.rng, 1, config))
    if cut is not None:
        f.cache.truncate([f.s], keep=cut)
    with unchanged(f.cache):
        f.cache.save(f.s, tmp_path / "one")
    other = pk.Cache(config)
    loaded = other.load(tmp_path / "one")
    assert_same_sequence(f.cache, f.s, other, loaded, randn_q(f.rng, 1, config)[0])
    other.save(loaded, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    for layer in range(2):
        for _ in range(120):
            step = randn_step(f.rng, 1, config)
            ours = f.cache.decode(layer, [f.s], *step)
            assert_same_bits(ours, other.decode(layer, [loaded], *step))
    for cache, s in ((f.cache, f.s), (other, loaded)):
        cache.truncate([s], drop=70)
    assert_same_sequence(f.cache, f.s, other, loaded, randn_q(f.rng, 1, config)[0])


def test_files_of_other_rows_are_refused(tmp_path):
    config = int8_config()
    f = filled(config, 300)
    f.cache.save(f.s, tmp_path / "int8")
    plain = filled(config.replace(kv_dtype="auto"), 300)
    plain.cache.save(plain.s, tmp_path / "auto")
    with unchanged(plain.cache), pytest.raises(ValueError, match=r"kv_dtype auto .* got int8"):
        plain.cache.load(tmp_path / "int8")
    with unchanged(f.cache), pytest.raises(ValueError, match=r"kv_dtype int8 .* got auto"):
        f.cache.load(tmp_path / "auto")
    damaged = bytearray((tmp_path / "int8").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with unchanged(f.cache), pytest.raises(ValueError, match="damaged"):
        f.cache.load(tmp_path / "damaged")


def before(tokens: int = 1200) -> tuple[pk.Config, np.ndarray, np.ndarray]:
    """A cache whose file of version 4 is in data/: its settings, and the K and V it was given."""
    config = pk.Config(
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        kv_dtype="int8",
        dense_below=1024,
        segment_tokens=64,
        local=64,
        update=16,
        policy=pk.ParisKV(top_k=16, tail_rows=16),
        device=current_device(),
    )
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((n, 1, 64)).astype(np.float32) for n in (3, 5))
    t = np.arange(tokens)
    return config, k[t % 3], v[t % 5]


def old_file(folder) -> str:
    path = folder / "old"
    path.write_bytes(lzma.decompress((HERE / "data" / "int8_version_4.xz").read_bytes()))
    return path


def test_a_file_of_the_version_before_goes_on_with_a_scale_alone(tmp_path):
    config, k, v = before()
    cache = pk.Cache(config)
    s = cache.load(old_file(tmp_path))
    # The largest number of a row's K or V over 127, as that version rounded it.
    zone = slice(4, 4 + cache.regions(s).retrieval)
    for mine, given in zip(rows_of(cache, s), (k, v), strict=True):
        expected = given.copy()
        expected[zone] = eight_bits(given[zone])
        np.testing.assert_array_equal(f64(mine), expected)
    twin = pk.Cache(config)
    t = twin.add()
    twin.prefill(0, [t], tensor(k, config), tensor(v, config))
    rng = np.random.default_rng(1)
    for _ in range(80):  # rows enter the zone
        step = randn_step(rng, 1, config)
        for c, i in ((cache, s), (twin, t)):
            assert torch.isfinite(c.decode(0, [i], *step)).all()
    ours, theirs = (f64(c.attend(0, [i], step[0])) for c, i in ((cache, s), (twin, t)))
    np.testing.assert_allclose(ours, theirs, atol=0.02)
    added = rows_of(cache, s)[0][zone.stop : 4 + cache.regions(s).retrieval]
    np.testing.assert_array_equal(f64(added), eight_bits(f64(added)))
    cache.save(s, tmp_path / "new")
    again = pk.Cache(config)
    loaded = again.load(tmp_path / "new")
    assert_same_sequence(cache, s, again, loaded, randn_q(rng, 1, config)[0])
    # Once that zone is gone, the next one has a base: K and V as they are stored now.
    kept = [x[:100] for x in rows_of(cache, s)]
    cache.truncate([s], keep=100)
    given = [torch.cat([x, tensor(y[100:], config)]) for x, y in zip(kept, (k, v), strict=True)]
    cache.prefill(0, [s], given[0][100:], given[1][100:])
    twin = pk.Cache(config)
    t = twin.add()
    twin.prefill(0, [t], *given)
    assert_same_sequence(cache, s, twin, t, randn_q(rng, 1, config)[0])

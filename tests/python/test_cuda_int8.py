"""Rows in 8 bits on a GPU: the bytes of the CPU, and outputs within rounding."""

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    assert_same_sequence,
    f64,
    make_config,
    randn_q,
    rows_of,
    settled,
    tensor,
)
from test_cuda_equal import HOSTILE, Both
from test_cuda_graph import assert_same_results, eager, make_steps, twins

pytestmark = pytest.mark.cuda

SHAPES = {
    "64": {},
    "80": {"head_dim": 80, "dtype": "float16"},
    "128": {"head_dim": 128, "dtype": "bfloat16"},
    "192 and 128": {"head_dim": 192, "value_dim": 128, "dtype": "float16"},
    "64 and 256": {"head_dim": 64, "value_dim": 256, "dtype": "bfloat16"},
    "256": {"head_dim": 256},
    "20 heads for one": {"query_heads": 20, "kv_heads": 1, "dtype": "bfloat16"},
    "mean query": {"group_rule": "mean_query", "dtype": "bfloat16"},
}
TAIL = {"block": 64, "tail": "sample", "tail_rows": 64, "segment_tokens": 256}
SEARCHES = {"votes": {"scorer": "votes"}, "sign_norm": {"scorer": "sign_norm"}, "tail": TAIL}


def assert_same_rows(both: Both) -> None:
    """Also of the zone: both round alike."""
    for s in both.sequences:
        for mine, theirs in zip(*both.each(lambda cache, s=s: rows_of(cache, s)), strict=True):
            assert_same_bits(mine.cpu(), theirs.cpu())


def assert_near(outputs: tuple[torch.Tensor, torch.Tensor], most: float = 2e-3) -> None:
    x, y = (f64(out) for out in outputs)
    size = np.sqrt((x**2).mean())
    assert np.sqrt(((x - y) ** 2).mean()) <= most * size + 1e-6


# For a prompt a GPU writes rows out in dtype, which rounds them once more.
WRITTEN_OUT = {"float32": 2e-3, "float16": 2e-3, "bfloat16": 5e-3}


def prompt(both: Both, sequences: list[int], lengths: list[int]):
    """A prompt's next part: what attention makes of it in both caches."""
    config = both.config
    shapes = [
        (config.query_heads, config.head_dim),
        (config.kv_heads, config.head_dim),
        (config.kv_heads, config.value_dim),
    ]
    q, k, v = (both.rng.standard_normal((sum(lengths), *shape)) for shape in shapes)

    def attend(cache: pk.Cache) -> torch.Tensor:
        new = {"k": tensor(k, cache.config), "v": tensor(v, cache.config)}
        return cache.attend(0, sequences, tensor(q, cache.config), lengths=lengths, **new)

    return both.each(attend)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_everything_at_every_shape(shape, search):
    both = Both(kv_dtype="int8", **{**search, **shape})
    for tokens in (1060 if search is TAIL else 228, 1500, 1333, 101):
        both.random(tokens)
    for _ in range(60):  # over a flush
        outputs = both.decode()
    alike = [both.check(s) for s in both.sequences]
    assert_same_rows(both)
    if all(alike):
        assert_near(outputs)
    for _ in range(2):  # the second part comes over rows of the first one
        assert_near(prompt(both, both.sequences[:3], [200, 1, 130]), WRITTEN_OUT[both.config.dtype])
    assert_same_rows(both)
    for s in both.sequences:
        both.check(s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_keys(make, dtype):
    both = Both(kv_dtype="int8", dtype=dtype, local=40)
    with np.errstate(over="ignore"):
        s = both.prefill(make(both.rng, (777, 2, 64)))
        both.check(s, floats=False)
    assert len(set(both.each(lambda cache: cache.stats().unusable_keys))) == 1


@pytest.mark.parametrize("sink", [0, 4, 64, 70])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_cuts_forks_and_growth(search, sink):
    both = Both(kv_dtype="int8", dtype="bfloat16", sink=sink, head_dim=128, **search)
    for tokens in (1200, 1600):
        both.random(tokens)
    forks = both.each(lambda cache: cache.fork(both.sequences[1]))
    both.sequences.append(forks[0])
    for keep in (1550, 1300, 1090, 700, 20):
        both.each(lambda cache, keep=keep: cache.truncate([forks[0]], keep=keep))
        assert_same_rows(both)
        for _ in range(3):
            both.decode()
        assert_near(prompt(both, [forks[0]], [100]), WRITTEN_OUT["bfloat16"])
        for s in both.sequences:
            both.check(s)
    prompt(both, [forks[0]], [1500])
    for _ in range(50):
        outputs = both.decode()
    assert_same_rows(both)
    alike = [both.check(s) for s in both.sequences]
    if all(alike):
        assert_near(outputs)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_sequence_goes_from_one_backend_to_the_other(placement, tmp_path):
    both = Both(kv_dtype="int8", dtype="float16", **TAIL)
    s = both.random(1700)
    both.each(lambda cache: cache.truncate([s], drop=130))
    for cache, name in zip(both.caches, ("cpu", "cuda"), strict=True):
        cache.save(s, tmp_path / name)
    gpu = pk.Cache(both.caches[1].config.replace(placement=placement))
    loaded = gpu.load(tmp_path / "cpu")
    back = both.caches[0].load(tmp_path / "cuda")
    for mine, theirs in zip(rows_of(gpu, loaded), rows_of(both.caches[0], back), strict=True):
        assert_same_bits(mine.cpu(), theirs.cpu())
    settled(gpu)
    assert_same_sequence(
        gpu, loaded, both.caches[1], s, randn_q(np.random.default_rng(1), 1, gpu.config)[0]
    )


@pytest.mark.parametrize("search", [SEARCHES["sign_norm"], TAIL], ids=["sign_norm", "tail"])
def test_a_recorded_step_leaves_the_bits_of_calls(search):
    config = make_config(kv_dtype="int8", dtype="bfloat16", layers=2, head_dim=128, **search)
    graph, sequences, twin, alike = twins(config, [1500, 1100, 60])
    for i, step in enumerate(make_steps(config, 3, 120)):
        if i == 70:
            for cache, ids in ((graph.cache, sequences), (twin, alike)):
                cache.truncate([ids[0]], drop=300)
        assert_same_results(graph.step(sequences, step), eager(twin, alike, step), f"step {i}")


def test_bytes():
    config = make_config(kv_dtype="int8", head_dim=128, dtype="bfloat16", segment_tokens=256)
    cache = pk.Cache(config)
    s = cache.add()
    rng = np.random.default_rng(0)
    for _ in range(8):
        k, v = (tensor(rng.standard_normal((256, 2, 128)), config) for _ in range(2))
        cache.prefill(0, [s], k, v)
    stats = settled(cache)
    whole = 6  # segments: the first has the sink, the last the window
    assert stats.offloaded_bytes == whole * 256 * 2 * 264
    # Of these two, the rows of the zone once more.
    assert stats.row_bytes == stats.offloaded_bytes + 2 * 256 * 2 * (264 + 512)

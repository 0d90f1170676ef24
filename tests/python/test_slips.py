"""Slips that people make: each is answered with a sentence, and nothing is lost in silence."""

from __future__ import annotations

import re

import numpy as np
import pariskv_core as pk
import pytest
from support import assert_same_bits, filled, make_config, randn_kv, randn_q, randn_step, unchanged


@pytest.mark.parametrize("ids", [list, np.array, "batch"])
def test_an_id_of_minus_one_is_no_idle_slot(ids):
    """What a lookup that found nothing leaves: it must not become an output of zeros."""
    f = filled(make_config(), 300)
    step = randn_step(f.rng, 2, f.cache.config)
    lost = [f.s, -1]
    sentence = r"sequences: -1 is not a sequence of this cache.*a slot without a sequence is IDLE"
    with unchanged(f.cache), pytest.raises(ValueError, match=sentence):
        f.cache.decode(0, f.cache.batch(lost) if ids == "batch" else ids(lost), *step)
    assert pk.IDLE not in range(-(1 << 16), 1 << 16)
    assert np.array([f.s, pk.IDLE], np.int32)[1] == pk.IDLE, "ids of 32 bits have it, too"


@pytest.mark.cpu("NumPy's arrays")
@pytest.mark.parametrize("argument", ["q", "k", "v", "out", "sink_bias"])
@pytest.mark.parametrize("hides", [True, False])
def test_a_mask_is_not_ignored(argument, hides):
    """Also one that hides nothing so far: the next one may."""
    config = make_config(layers=1, dtype="float32", device="cpu")
    rng = np.random.default_rng(0)

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {
        "q": rows(1, config.query_heads, config.head_dim),
        "k": rows(1, config.kv_heads, config.head_dim),
        "v": rows(1, config.kv_heads, config.head_dim),
        "out": rows(1, config.query_heads, config.head_dim),
        "sink_bias": rows(config.query_heads),
    }
    cache = pk.Cache(config)
    s = cache.add()
    masked = np.ma.array(arrays[argument], mask=np.full(arrays[argument].shape, hides))
    sentence = rf"\[decode\] {argument}: expected an array without a mask.*{argument}\.filled\(0\)"
    with unchanged(cache), pytest.raises(ValueError, match=sentence):
        cache.decode(0, [s], **{**arrays, argument: masked})
    cache.decode(0, [s], **{**arrays, argument: masked.data})


def test_a_prefix_of_nothing_is_refused_in_words():
    cache = pk.Cache(make_config())
    s = cache.add()
    sentence = rf"\[fork\] tokens: expected a sequence that has tokens, got {s}, which has none in"
    with unchanged(cache), pytest.raises(ValueError, match=sentence):
        cache.fork(s, tokens=1)
    assert cache.length(cache.fork(s)) == 0


@pytest.mark.cpu("the machine's own memory")
def test_reserve_asks_what_the_machine_has():
    cache = pk.Cache(make_config(layers=2))
    before = cache.stats().memory.reserved
    sentence = r"\[reserve\] asked for \d+ bytes ahead, but the system has only \d+ left; reserve"
    with unchanged(cache), pytest.raises(pk.OutOfMemory, match=sentence):
        cache.reserve(20_000 << 23, sequences=20_000)
    assert cache.stats().memory.reserved == before
    cache.reserve(3000)


def test_the_order_of_another_method_is_told():
    """decode has q before k and v; where heads are as many, shapes alone cannot tell."""
    config = make_config(layers=1, query_heads=2, kv_heads=2)
    cache = pk.Cache(config)
    s = cache.add()
    rng = np.random.default_rng(0)
    (k, v), q = randn_kv(rng, 9, config), randn_q(rng, 9, config)
    with unchanged(cache), pytest.raises(TypeError) as raised:
        cache.prefill(0, [s], q, k, v)
    assert str(raised.value) == (
        "[prefill] lengths: expected a list of integers, got an array of 3 dimensions; the order "
        "of arguments is layer, sequences, k, v, lengths, and by name alone q, scale, softcap, "
        "page_rows, stream"
    )
    with (
        unchanged(cache),
        pytest.raises(TypeError, match=r"\[attend\] lengths: .* q, lengths, and"),
    ):
        cache.attend(0, [s], q, k)
    with pytest.raises(TypeError, match=r"\[length\] sequence: expected an integer, got ndarray"):
        cache.length(np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda c: pk.ParisKV(topk=3), "top_k"),
        (lambda c: pk.ParisKV().replace(topk=3), "top_k"),
        (lambda c: pk.ParisKV(tail_row=3), "tail_rows"),
        (lambda c: pk.HardKV(patient=3), "patience"),
        (lambda c: c.config.replace(memory=1), "memory_budget"),
        (lambda c: c.config.replace(polcy=None), "policy"),
        (lambda c: c.config.replace(rowCache=3), "row_cache"),
        (lambda c: c.config.replace(top_k=3), "policy=ParisKV(top_k=...)"),
        (lambda c: c.config.replace(topk=3), "policy=ParisKV(top_k=...)"),
        (lambda c: c.config.replace(block=0), "policy=ParisKV(block=...)"),
        (lambda c: c.prefill(0, [0], 0, 0, lenghts=[1]), "lengths"),
        (lambda c: c.truncate([0], kepe=1), "keep"),
    ],
)
def test_the_nearest_name_is_suggested(call, meant):
    cache = pk.Cache(make_config())
    with pytest.raises(TypeError, match=re.escape(f"; did you mean {meant}? The ")):
        call(cache)


@pytest.mark.parametrize("name", ["window", "x", "", "a_name_that_is_like_none_of_them"])
def test_a_name_that_is_near_none_has_no_suggestion(name):
    with pytest.raises(TypeError, match=r"there is no such field; the fields are top_k"):
        pk.ParisKV(**{name: 3})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: make_config(device="gpu"), 'got "gpu"; did you mean "cuda"?'),
        (lambda: make_config(device="gpu:0"), 'got "gpu:0"; did you mean "cuda"?'),
        (lambda: make_config(device="CPU"), 'got "CPU"; did you mean "cpu"?'),
        (lambda: make_config(placement="hosts"), 'got "hosts"; did you mean "host"?'),
        (lambda: pk.ParisKV(scorer="signnorm"), 'got "signnorm"; did you mean "sign_norm"?'),
        (lambda: pk.HardKV(metric="snap"), 'got "snap"; did you mean "snapkv"?'),
        (lambda: pk.PRKV(digest="average"), 'got "average"'),
    ],
)
def test_the_nearest_word_is_suggested(call, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        call()
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("4GiB", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("800MB", 8 * 10**8),
        ("2 TB", 2 * 10**12),
        ("64KiB", 1 << 16),
        ("1,000,000", 10**6),
        ("512B", 512),
        ("0", 0),
        (5_000_000_000, 5 * 10**9),
        (np.int64(7), 7),
    ],
)
@pytest.mark.parametrize("field", ["memory_budget", "host_budget"])
def test_budgets_are_sizes_in_words(field, given, size):
    config = make_config(**{field: given})
    assert getattr(config, field) == size
    assert f"{field}={size}" in repr(config)


@pytest.mark.parametrize(
    "given", ["", "GB", "four GB", "4 pounds", "-4GB", "4GBGB", "1.2.3GB", "iB", "4e400GB", "nan"]
)
def test_a_size_that_is_none_is_refused(given):
    expected = 'memory_budget: expected bytes, an integer or as "4GB" or "4GiB", got "'
    with pytest.raises(ValueError, match=re.escape(f"[config] {expected}{given}")):
        make_config(memory_budget=given)


@pytest.mark.parametrize("given", [4e9, None, [1]])
def test_a_size_of_another_type_is_refused(given):
    with pytest.raises(TypeError, match=r'memory_budget: expected bytes, an integer or as "4GB", '):
        make_config(memory_budget=given)


def test_what_is_printed_says_what_it_is():
    f = filled(make_config(), 3000)
    text = repr(f.cache)
    assert text.startswith("Cache(sequences=1, layers=") and "dtype='float32'" in text
    why = f.cache.explain(0, f.s, randn_q(f.rng, 1, f.cache.config)[0])
    assert f"selected={why.positions.shape[1]}, " in repr(why)
    assert "details=ParisKVExplanation(scored=" in repr(why)
    shown = [f.cache, why, why.details, f.cache.summaries(0, f.s), f.cache.batch([f.s, pk.IDLE])]
    assert not [text for text in map(repr, shown) if "0x" in text or "object at" in text]
    assert repr(shown[-1]) == f"Batch([{f.s}, IDLE])"
    f.cache.close()
    assert repr(f.cache) == "Cache(closed)"


@pytest.mark.parametrize("policy", [pk.HardKV(most=64), pk.PRKV(budget=256)])
def test_explanations_of_every_policy_print_themselves(policy):
    base = make_config()
    config = pk.Config(
        layers=1, query_heads=4, kv_heads=2, head_dim=64, dtype=base.dtype, device=base.device,
        policy=policy, threads=2,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    cache = pk.Cache(config)
    s = cache.add()
    for layer in range(config.layers):
        cache.prefill(layer, [s], *randn_kv(rng, 2000, config), q=randn_q(rng, 2000, config))
    why = cache.explain(0, s, randn_q(rng, 1, config)[0])
    assert f"details={type(policy).__name__}Explanation(" in repr(why)
    assert "0x" not in repr(why)


def test_ids_may_still_be_idle():
    f = filled(make_config(), 300)
    q, k, v = randn_step(f.rng, 2, f.cache.config)
    twin = f.cache.fork(f.s)
    out = f.cache.decode(0, np.array([f.s, pk.IDLE]), q, k, v)
    assert_same_bits(out[:1], f.cache.decode(0, [twin], q[:1], k[:1], v[:1]))
    assert (out[1] == 0).all()

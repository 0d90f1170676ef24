"""Turns and drafts: ragged truncation, a search that appends nothing, attend that appends."""

import pariskv_core as pk
import pytest
import torch
from support import (
    assert_output_close,
    assert_same_bits,
    assert_same_sequence,
    decode_oracle,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    unchanged,
)

UPDATES = [1, 7, 48]


def several(config: pk.Config, lengths: list[int], rng) -> tuple[pk.Cache, list[int]]:
    cache = pk.Cache(config)
    sequences = [cache.add() for _ in lengths]
    k, v = randn_kv(rng, sum(lengths), config)
    for layer in range(config.layers):
        cache.prefill(layer, sequences, k, v, lengths)
    return cache, sequences


@pytest.mark.parametrize("how", ["drop", "keep"])
def test_a_ragged_truncation_equals_one_by_one(how, device, rng):
    config = make_config(layers=2, device=device)
    lengths, dropped = [300, 90, 5, 200], [120, 0, 5, 33]
    cache, sequences = several(config, lengths, rng)
    twins = [cache.fork(s) for s in sequences]
    kept = [length - drop for length, drop in zip(lengths, dropped, strict=True)]
    cache.truncate(sequences, **{how: dropped if how == "drop" else kept})
    for twin, drop in zip(twins, dropped, strict=True):
        cache.truncate([twin], drop=[drop])
    probe = randn_q(rng, 1, config)[0]
    for s, twin, tokens in zip(sequences, twins, kept, strict=True):
        assert cache.length(s) == cache.length(s, 1) == tokens
        assert_same_sequence(cache, s, cache, twin, probe)


def test_one_number_truncates_every_sequence(rng):
    cache, sequences = several(make_config(), [80, 30], rng)
    cache.truncate(sequences, drop=10)
    assert [cache.length(s) for s in sequences] == [70, 20]
    cache.truncate(sequences, keep=20)
    assert [cache.length(s) for s in sequences] == [20, 20]
    cache.truncate([], drop=3)


def test_keep_evens_out_layers_that_a_failed_step_left_apart(rng):
    config = make_config(layers=2)
    f, twin = filled(config, 200), filled(config, 200)
    f.cache.decode(0, [f.s], *randn_step(rng, 1, config))  # and never in layer 1
    assert f.cache.length(f.s, 0) == 201
    f.cache.truncate([f.s], keep=200)
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, randn_q(rng, 1, config)[0])


def test_one_sequence_that_is_too_short_leaves_all_as_they_were(rng):
    cache, sequences = several(make_config(layers=2), [300, 20], rng)
    with unchanged(cache), pytest.raises(ValueError, match=r"\[truncate\] drop: .*to 20"):
        cache.truncate(sequences, drop=21)


@pytest.mark.parametrize("dense_below", [0, 1000])
def test_a_decode_without_rows_equals_the_one_that_brought_them(dense_below, dtype, device, rng):
    config = make_config(dtype=dtype, dense_below=dense_below, device=device)
    cache, sequences = several(config, [300, 90, 150], rng)
    bias = torch.randn(4, dtype=torch.float32, device=config.device)
    for _ in range(60):  # across a flush
        step = randn_step(rng, 3, config)
        first = cache.decode(0, sequences, *step, sink_bias=bias, return_lse=True)
        searched = cache.stats().searched_tokens
        with torch.no_grad():
            again = cache.decode(0, sequences, step[0], sink_bias=bias, return_lse=True)
        for mine, theirs in zip(again, first, strict=True):
            assert_same_bits(mine, theirs)
        assert cache.stats().searched_tokens - searched == (0 if dense_below else 3)


def test_a_decode_without_rows_changes_nothing_and_is_right(device, rng):
    config = make_config(device=device)
    f, twin = filled(config, 300), filled(config, 300)
    regions = regions_of(f.cache, f.s)
    for _ in range(60):
        q = randn_q(rng, 1, config)
        out, lse = f.cache.decode(0, [f.s], q, return_lse=True)
        expected = decode_oracle(f.cache, f.s, q[0])
        assert_output_close(out[0], expected.out, config.dtype)
        assert lse.shape == (1, 4)
    assert regions_of(f.cache, f.s) == regions
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, q[0])


@pytest.mark.cuda
def test_a_decode_without_rows_can_be_captured(rng):
    config = make_config()
    f, twin = filled(config, 300), filled(config, 300)
    step = randn_step(rng, 1, config)
    for each in (f, twin):
        each.cache.decode(0, [each.s], *step)  # one step runs before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = f.cache.decode(0, [f.s], *step)
        again = f.cache.decode(0, [f.s], step[0])
    for _ in range(60):  # across a flush
        for tensor, new in zip(step, randn_step(rng, 1, config), strict=True):
            tensor.copy_(new)
        f.cache.advance([f.s])
        graph.replay()
        assert_same_bits(again, first)
        assert_same_bits(first, twin.cache.decode(0, [twin.s], *step))
    assert f.cache.length(f.s) == twin.cache.length(twin.s) == 361


def test_a_decode_without_rows_needs_tokens(device, rng):
    config = make_config(layers=2, device=device)
    f = filled(config, 20)
    empty = f.cache.add()
    q = randn_q(rng, 2, config)
    with (
        unchanged(f.cache),
        pytest.raises(ValueError, match=rf"\[decode\] sequences: .*{empty} has none in layer 1"),
    ):
        f.cache.decode(1, [f.s, empty], q)
    with unchanged(f.cache), pytest.raises(TypeError, match=r"\[decode\] k: expected an array"):
        f.cache.decode(0, [f.s], q[:1], v=randn_kv(rng, 1, config)[1])


@pytest.mark.parametrize("update", UPDATES)
def test_attend_appends_as_decode_does(update, dtype, device, rng):
    config = make_config(update=update, dtype=dtype, device=device)
    lengths, more = [0, 40, 300], [130, 1, 60]
    cache, sequences = several(config, lengths, rng)
    twins = [cache.fork(s) for s in sequences]
    k, v = randn_kv(rng, sum(more), config)
    q = randn_q(rng, sum(more), config)
    cache.attend(0, sequences, q, more, k=k, v=v)
    at = 0
    for s, twin, count in zip(sequences, twins, more, strict=True):
        for t in range(at, at + count):
            cache.decode(0, [twin], *(x[t : t + 1] for x in (q, k, v)))
        at += count
        assert_same_sequence(cache, s, cache, twin, q[0])


def test_attend_that_appends_equals_prefill_and_attend(dtype, device, rng):
    config = make_config(dtype=dtype, device=device)
    cache, sequences = several(config, [150, 0, 9], rng)
    twins = [cache.fork(s) for s in sequences]
    more = [33, 70, 0]
    k, v = randn_kv(rng, sum(more), config)
    q = randn_q(rng, sum(more), config)
    one = cache.attend(0, sequences, q, more, k=k, v=v, softcap=20.0, return_lse=True)
    cache.prefill(0, twins, k, v, more)
    two = cache.attend(0, twins, q, more, softcap=20.0, return_lse=True)
    for mine, theirs in zip(one, two, strict=True):
        assert_same_bits(mine, theirs)
    assert [cache.length(s) for s in sequences] == [183, 70, 9]


def test_a_draft_that_is_verified_and_partly_refused_equals_plain_decoding(device, rng):
    config = make_config(device=device)
    f, plain = filled(config, 200), filled(config, 200)
    for _ in range(8):  # 24 tokens stay: within one buffer
        k, v = randn_kv(rng, 5, config)
        q = randn_q(rng, 5, config)
        f.cache.attend(0, [f.s], q, k=k, v=v)
        f.cache.truncate([f.s], drop=2)
        for t in range(3):
            plain.cache.decode(0, [plain.s], *(x[t : t + 1] for x in (q, k, v)))
        step = randn_step(rng, 1, config)
        forks = f.cache.fork(f.s), plain.cache.fork(plain.s)
        assert_same_bits(
            f.cache.decode(0, [forks[0]], *step), plain.cache.decode(0, [forks[1]], *step)
        )
        f.cache.remove(forks[0])
        plain.cache.remove(forks[1])
    assert_same_sequence(f.cache, f.s, plain.cache, plain.s, q[0])


@pytest.mark.cpu("means of blocks are the CPU's alone")
def test_attend_gives_the_policy_its_queries_as_prefill_does(rng):
    config = make_config()
    config = config.replace(policy=config.policy.replace(block=64))
    k, v = randn_kv(rng, 3000, config)
    q = randn_q(rng, 3000, config) * torch.linspace(0.1, 3, 64)
    attended, prefilled, unseen = (pk.Cache(config) for _ in range(3))
    sequences = [cache.add() for cache in (attended, prefilled, unseen)]
    attended.attend(0, sequences[:1], q, k=k, v=v)
    attended.flush()
    prefilled.prefill(0, sequences[1:2], k, v, q=q)
    unseen.prefill(0, sequences[2:], k, v)
    assert_same_sequence(attended, sequences[0], prefilled, sequences[1], q[0])
    weights = [
        c.summaries(0, s).weights for c, s in zip((prefilled, unseen), sequences[1:], strict=True)
    ]
    assert (weights[0] != weights[1]).any()

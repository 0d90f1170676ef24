"""Memory: what is promised, what is refused, and that all of it comes back."""

import gc
import re
import sys

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    SCORERS,
    assert_same_bits,
    assert_same_explanation,
    assert_same_sequence,
    assert_same_summaries,
    config_of,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    regions_of,
    state_of,
    with_changes,
)

SLAB = 1 << 20  # small blocks share pieces of this size
ALIGNMENT = 64  # and every block is rounded up to this
on_the_heap = pytest.mark.cpu("numbers of the CPU's arena; test_cuda_memory.py has the GPU's")


def row_bytes(config: pk.Config, tokens: int) -> int:
    """K and V of one layer, in whole blocks: of a GPU's segments, of 64 tokens on a CPU."""
    block = 64 if config.device == "cpu" else config.segment_tokens
    element = 4 if config.dtype == "float32" else 2
    row = 2 * config.head_dim * element
    return -(-tokens // block) * block * config.kv_heads * row


@on_the_heap
def test_an_idle_cache_holds_nothing():
    stats = pk.Cache(make_config(layers=80)).stats()
    assert stats.memory.live == stats.memory.reserved == stats.memory.peak == 0
    assert stats.row_bytes == stats.summary_bytes == stats.tokens == stats.sequences == 0


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, 4096])
def test_row_bytes_match_the_stored_rows(tokens, dtype, device):
    config = make_config(dtype=dtype, layers=2, head_dim=128, device=device)
    f = filled(config, tokens)
    stats = f.cache.stats()
    assert stats.tokens == 2 * tokens
    assert stats.row_bytes == 2 * row_bytes(config, tokens)


@pytest.mark.parametrize(
    ("head_dim", "limit", "block"),
    [
        *((64, 44, 0), (80, 84, 0), (96, 84, 0), (128, 84, 0), (256, 164, 0)),
        *((64, 44.5, 64), (64, 44, 256), (128, 86, 64), (128, 84, 256), (256, 165, 256)),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_key_summary_is_small(kv_heads, head_dim, limit, block, device):
    # The promise is 84 bytes per key and head at 128; the others scale with rotated dimensions.
    config = make_config(
        kv_heads=kv_heads,
        query_heads=kv_heads,
        head_dim=head_dim,
        block=block,
        sink=0,
        local=0,
        segment_tokens=1024,
        device=device,
    )
    f = filled(config, 8192)
    assert f.cache.regions(f.s).retrieval == 8192
    assert 0 < f.cache.stats().summary_bytes <= limit * 8192 * kv_heads


@on_the_heap
@pytest.mark.parametrize("scorer", SCORERS)
def test_the_peak_can_be_computed_in_advance(scorer, device):
    config = config_of(
        layers=2,
        query_heads=8,
        kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        scorer=scorer,
        update=64,
        dense_below=0,
        device=device,
    )
    f = filled(config, 6000)
    for _ in range(130):
        step = randn_step(f.rng, 1, config)
        for layer in range(2):
            f.cache.decode(layer, [f.s], *step)
    stats = f.cache.stats()
    rounded = -(-6130 // 1024) * 1024
    votes = 2 * 2 * 16 * 256 * 4 if scorer == "votes" else 0
    # Counts of keys; then sums of keys, or squares of queries, the balance and the centre.
    state = 2 * 2 * (2 * 8 + (128 * 8 if scorer == "votes" else 128 * (8 + 4 + 4 + 2) + 4))
    means = 0 if scorer == "votes" else 2 * 2 * rounded // 64 * (128 + 4)
    predicted = 2 * row_bytes(config, 6130) + 2 * 2 * rounded * 84 + means + state + votes
    assert stats.flushes == 2 * 2
    assert stats.row_bytes + stats.summary_bytes <= predicted
    # Copies of the tail's rows, in 8 bits: numbers, and a scale for K and V. For each channel of a
    # head a centre and a unit.
    copies = 0 if scorer == "votes" else 2 * 2 * (2048 * 2 * (128 + 4) + 2 * (128 + 128) * 4)
    assert stats.kept_bytes == copies
    counted = stats.row_bytes + stats.summary_bytes + stats.workspace_bytes + copies
    assert counted <= stats.memory.live <= counted + 40 * ALIGNMENT
    # A call that can be stopped works on a copy of its layer's state.
    copy = (state + votes) // 2
    assert stats.memory.peak <= predicted + copies + copy + stats.workspace_bytes + 40 * ALIGNMENT
    # Scratch: a zone's scores and candidates, small beside its summaries.
    assert stats.workspace_bytes < 0.25 * stats.summary_bytes + (1 << 17)
    assert stats.memory.live <= stats.memory.reserved <= stats.memory.live + 4 * SLAB


@on_the_heap
def test_nothing_is_copied_to_grow(device):
    # A store that doubled and copied would hold old and new together at some step.
    config = make_config(segment_tokens=64, device=device)
    cache = pk.Cache(config)
    s = cache.add()
    k, v = randn_kv(np.random.default_rng(0), 64, config)
    cache.prefill(0, [s], k, v)
    for _ in range(200):
        cache.prefill(0, [s], k, v)
        stats = cache.stats()
        # But for the state of a layer, which a call that can be stopped has a copy of.
        assert stats.memory.peak - stats.memory.live < 2048 < stats.row_bytes // 16


@on_the_heap
@pytest.mark.parametrize("scorer", SCORERS)
def test_counters_return_to_where_they_were(scorer, device):
    config = make_config(scorer=scorer, layers=2, device=device)
    f = filled(config, 300)
    step = randn_step(f.rng, 1, config)
    f.cache.decode(0, [f.s], *step)  # scratch has its size now
    before, memory, held_before = state_of(f.cache), f.cache.stats().memory, held(f.cache)
    rng = np.random.default_rng(1)
    for tokens in (1, 63, 64, 65, 200, 299):
        a = f.cache.add()
        k, v = randn_kv(rng, tokens, config)
        for layer in range(2):
            f.cache.prefill(layer, [a], k, v)
        b = f.cache.fork(a)
        f.cache.reorder([a, b], [1, 1])
        f.cache.truncate([a], drop=tokens // 2)
        f.cache.prefill(0, [b], k, v)
        f.cache.flush([a, b])
        f.cache.remove(a)
        f.cache.remove(b)
    after = state_of(f.cache)
    del before["encoded_keys"], after["encoded_keys"]  # counts what was done, not what is held
    assert after == before
    # Scratch went with the sequences that were removed.
    assert abs(held(f.cache) - held_before) < 2 * ALIGNMENT
    assert f.cache.stats().memory.reserved <= memory.reserved
    f.cache.remove(f.s)
    assert_only_scratch_is_left(f.cache)


def held(cache: pk.Cache) -> int:
    """Bytes held besides scratch, whose two blocks are rounded up in `live` alone."""
    stats = cache.stats()
    return stats.memory.live - stats.workspace_bytes


def assert_only_scratch_is_left(cache: pk.Cache) -> None:
    stats = cache.stats()
    assert stats.row_bytes == stats.summary_bytes == stats.tokens == stats.sequences == 0
    assert 0 <= held(cache) < 2 * ALIGNMENT


def test_truncation_gives_segments_back(device):
    f = filled(make_config(device=device), 64 * 10)
    per_segment = f.cache.stats().row_bytes // 10
    f.cache.truncate([f.s], drop=1)
    assert f.cache.stats().row_bytes == 10 * per_segment
    f.cache.truncate([f.s], drop=63)
    assert f.cache.stats().row_bytes == 9 * per_segment
    f.cache.truncate([f.s], drop=64 * 9)
    assert f.cache.stats().row_bytes == 0


# --- Refused allocations -----------------------------------------------------------------------


def script(config: pk.Config):
    """Calls that need memory of every kind: name to what to do with the cache and its handles."""
    rng = np.random.default_rng(0)
    lengths = [1300 if config.policy.block else 700, 40]  # there is a zone
    k, v = randn_kv(rng, sum(lengths), config)
    step, one = randn_step(rng, 2, config), randn_step(rng, 1, config)
    three = [torch.cat(pair) for pair in zip(step, one, strict=True)]
    q = randn_q(rng, 1, config)[0]
    prompt = randn_q(rng, sum(lengths), config)
    return {
        "prefill": lambda c, s: c.prefill(0, s[:2], k, v, lengths, q=prompt),
        "prefill another layer": lambda c, s: c.prefill(1, s[:2], k, v, lengths),
        "decode": lambda c, s: c.decode(0, s[:2], *step),
        "decode again": lambda c, s: c.decode(0, s[:2], *step),
        "decode and flush": lambda c, s: c.decode(0, s[:2], *step),
        "fork": lambda c, s: s.append(c.fork(s[0])),
        "fork once more": lambda c, s: s.append(c.fork(s[0])),  # holds what the others let go
        "write to the fork": lambda c, s: c.prefill(0, [s[2]], k[:30], v[:30]),
        "write to the origin": lambda c, s: c.decode(0, [s[0]], *one),
        "explain": lambda c, s: c.explain(0, s[0], q),
        "reorder": lambda c, s: c.reorder(s[:3], [1, 0, 1]),
        "write to a copy": lambda c, s: c.prefill(1, [s[0]], k[:600], v[:600]),
        "write to the other": lambda c, s: c.prefill(1, [s[2]], k[:600], v[:600]),
        "decode more": lambda c, s: c.decode(1, s[:3], *three),
        "flush": lambda c, s: c.flush(s),
        "prefill for long": lambda c, s: c.prefill(1, s[:3], k[:550], v[:550], [540, 1, 9]),
        "decode widely": lambda c, s: c.decode(1, [s[0]], *one),
    }


class Played:
    """A cache on which the script ran, up to a refusal or to the call named `stop`."""

    def __init__(self, config: pk.Config, stop: str | None = None):
        self.cache = pk.Cache(config)
        self.sequences = [self.cache.add(), self.cache.add()]
        self.results: dict = {}
        self.refused: str | None = None
        for name, call in script(config).items():
            if name == stop:
                return
            self.before, self.held = state_of(self.cache), held(self.cache)
            try:
                self.results[name] = call(self.cache, self.sequences)
            except pk.OutOfMemory as error:
                self.refused, self.error = name, str(error)
                return


def scarce(search: dict) -> pk.Config:
    """Blocks of rows so large beside the budget that each is an allocation of its own."""
    return make_config(
        layers=2,
        **search,
        head_dim=256,
        segment_tokens=512,
        sink=2,
        local=16,
        update=3,
        top_k=4,
    )


MESSAGE = re.compile(r"asked for (\d+) bytes.* only (\d+) of the budget of (\d+)")


@on_the_heap
@pytest.mark.parametrize("search", [{}, {"scorer": "votes"}, {"block": 64}], ids=str)
def test_every_allocation_may_be_refused(search):
    """The budget grows by just what the last refusal lacked: each allocation fails once."""
    config = scarce(search)
    whole = Played(config)
    probe = randn_q(np.random.default_rng(5), 1, config)[0]
    budget, refused = 1, []
    while (played := Played(with_changes(config, memory_budget=budget))).refused:
        refused.append(played.refused)
        assert_left_as_it_was(played, config, probe)
        asked, free, said = map(int, MESSAGE.search(played.error).groups())
        assert said == budget
        assert asked > free >= 0
        budget += asked - free
    # With just enough, all is as without a limit; a byte less is not enough.
    assert played.cache.stats().memory.reserved <= budget
    assert Played(with_changes(config, memory_budget=budget - 1)).refused
    assert_same_results(played.results, whole.results)
    assert_same_without_scratch(played, whole, probe)
    # The sweep went through rows, summaries, statistics, scratch, and copies on write.
    assert len(refused) >= 20
    assert {"prefill", "prefill another layer", "decode", "write to the fork"} <= set(refused)
    assert {"write to the origin", "write to a copy", "prefill for long"} <= set(refused)


def assert_left_as_it_was(played: Played, config: pk.Config, q: torch.Tensor) -> None:
    cache = played.cache
    assert state_of(cache) == played.before
    assert abs(held(cache) - played.held) < 2 * ALIGNMENT
    assert_same_without_scratch(played, Played(config, stop=played.refused), q)
    for s in played.sequences:
        cache.remove(s)
    assert_only_scratch_is_left(cache)


def assert_same_without_scratch(a: Played, b: Played, q: torch.Tensor) -> None:
    """What can be compared by calls that need no memory, of which the budget may leave none."""
    for s, t in zip(a.sequences, b.sequences, strict=True):
        for layer in range(a.cache.config.layers):
            assert regions_of(a.cache, s, layer) == regions_of(b.cache, t, layer)
            assert_same_summaries(a.cache.summaries(layer, s), b.cache.summaries(layer, t))
            if a.cache.length(s, layer):
                assert_same_bits(
                    a.cache.attend(layer, [s], q[None]), b.cache.attend(layer, [t], q[None])
                )


def assert_same_results(results: dict, expected: dict) -> None:
    assert results.keys() == expected.keys()
    for name, theirs in expected.items():
        if isinstance(theirs, torch.Tensor):
            assert_same_bits(results[name], theirs, name)
        elif isinstance(theirs, pk.Explanation):
            assert_same_explanation(results[name], theirs)


@on_the_heap
def test_the_next_call_works_after_a_refusal():
    config = make_config(memory_budget=8_000_000)
    f, twin = filled(config, 1000), filled(with_changes(config, memory_budget=0), 1000)
    k, v = randn_kv(f.rng, 5000, config)
    other = f.cache.add()
    step = randn_step(f.rng, 1, config)
    assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
    for _ in range(3):
        with pytest.raises(pk.OutOfMemory):
            f.cache.prefill(0, [f.s], k, v)
        with pytest.raises(pk.OutOfMemory):
            f.cache.prefill(0, [other], k, v)
        step = randn_step(f.rng, 1, config)
        assert_same_bits(f.cache.decode(0, [f.s], *step), twin.cache.decode(0, [twin.s], *step))
    assert_same_sequence(f.cache, f.s, twin.cache, twin.s, step[0][0])


@on_the_heap
def test_a_refusal_is_a_memory_error_with_numbers():
    assert issubclass(pk.OutOfMemory, MemoryError)
    cache = pk.Cache(make_config(memory_budget=5_000_000))
    s = cache.add()
    k, v = randn_kv(np.random.default_rng(0), 8192, cache.config)
    with pytest.raises(MemoryError, match=r"asked for \d+ bytes, .*\d+ of the budget of 5000000"):
        cache.prefill(0, [s], k, v)
    assert cache.length(s) == 0
    cache.prefill(0, [s], k[:500], v[:500])
    assert cache.length(s) == 500
    assert cache.stats().memory.budget == 5_000_000


@on_the_heap
def test_removing_a_sequence_makes_room(rng):
    config = make_config(memory_budget=4_000_000)
    cache, full = pk.Cache(config), []
    k, v = randn_kv(rng, 600, config)

    def fill() -> None:
        while True:
            full.append(cache.add())
            cache.prefill(0, [full[-1]], k, v)

    with pytest.raises(pk.OutOfMemory):
        fill()
    cache.remove(full.pop())
    for _ in range(20):
        cache.remove(full.pop(0))
        full.append(cache.add())
        cache.prefill(0, [full[-1]], k, v)
    assert cache.stats().tokens == 600 * len(full)


# --- Going round and round ---------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@on_the_heap
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_forty_thousand_sequences_come_and_go():
    config = make_config(query_heads=1, kv_heads=1, sink=0, local=1, threads=1)
    cache = pk.Cache(config)
    k = torch.ones(2, 1, 64)
    keeper = cache.add()
    cache.prefill(0, [keeper], k, k)
    start = state_of(cache)

    def come_and_go(count: int) -> None:
        for _ in range(count // 10):
            sequences = [cache.add() for _ in range(10)]
            for s in sequences:
                cache.prefill(0, [s], k, k)
            for s in sequences:
                cache.remove(s)

    come_and_go(10_000)  # the allocator and Python find their size
    gc.collect()
    before, reserved = resident_bytes(), cache.stats().memory.reserved
    come_and_go(30_000)
    gc.collect()
    # One leaked block for each would be 500 MB.
    assert resident_bytes() - before < 2 << 20
    after = state_of(cache)
    assert after.pop("encoded_keys") - start.pop("encoded_keys") == 40_000
    assert after == start
    assert cache.stats().memory.reserved == reserved
    assert cache.add() == keeper + 40_001  # a name each, none used twice


@on_the_heap
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_closing_gives_everything_back():
    def once() -> None:
        f = filled(make_config(head_dim=128), 4000)
        f.cache.decode(0, [f.s], *randn_step(f.rng, 1, f.cache.config))
        f.cache.close()

    for _ in range(5):
        once()
    gc.collect()
    before = resident_bytes()
    for _ in range(15):
        once()
    gc.collect()
    # A leaked cache would be 9 MB; fifteen of them cannot hide.
    assert resident_bytes() - before < 32 << 20


@on_the_heap
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_failing_calls_leak_nothing():
    f = filled(make_config(), 100)
    bad, good = torch.ones(1, 5, 64), torch.ones(1, 2, 64)

    def fail(count: int) -> None:
        for _ in range(count):
            with pytest.raises(ValueError, match="expected"):
                f.cache.decode(0, [f.s], bad, good, good)

    fail(2000)
    gc.collect()
    before = resident_bytes()
    fail(20_000)
    gc.collect()
    assert resident_bytes() - before < 2 << 20

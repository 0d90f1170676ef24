"""Rows on their way to host memory: the same bits before, during and after, whatever happens."""

from __future__ import annotations

import time

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    DTYPES,
    Filled,
    assert_same_bits,
    assert_same_sequence,
    filled,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    rows_of,
    settled,
    state_of,
    with_changes,
)

pytestmark = pytest.mark.cuda

LONG = 60_000_000  # cycles of a kernel that only waits: some 30 ms


def segment_bytes(config: pk.Config) -> int:
    element = 4 if config.dtype == "float32" else 2
    return config.segment_tokens * config.kv_heads * 2 * config.head_dim * element


def offloaded_segments(cache: pk.Cache, s: int, layer: int = 0) -> int:
    """Whole segments of the zone: what is to be in host memory in the end."""
    regions, size = cache.regions(s, layer), cache.config.segment_tokens
    end = regions.sink + regions.retrieval
    return max(0, end // size - -(-regions.sink // size))


def pairs(tokens: int, **changes) -> tuple[Filled, Filled]:
    """The same sequence with its rows in host memory, or on their way there, and on the GPU."""
    config = make_config(**changes)
    return filled(config, tokens), filled(with_changes(config, placement="device"), tokens)


def assert_alike(a: Filled, b: Filled, s: int | None = None, t: int | None = None) -> None:
    s, t = a.s if s is None else s, b.s if t is None else t
    q = randn_q(np.random.default_rng(4), 1, a.cache.config)[0]
    assert_same_sequence(a.cache, s, b.cache, t, q)


def held_up(stream: torch.cuda.Stream | None = None, cycles: int = LONG) -> None:
    """Nothing that the stream is given from now on happens for a while."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(cycles)


class Busy:
    """The bus, kept busy from another stream: offloads take their time."""

    def __init__(self, megabytes: int = 512):
        self.near = torch.zeros(megabytes << 20, dtype=torch.uint8, device="cuda")
        self.far = torch.empty(megabytes << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.stream = torch.cuda.Stream()

    def start(self, times: int = 2) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                self.far.copy_(self.near, non_blocking=True)


@pytest.fixture(scope="module")
def busy() -> Busy:
    return Busy()


@pytest.mark.parametrize("sink", [0, 4, 64, 70])
@pytest.mark.parametrize("tokens", [95, 99, 100, 163, 164, 165, 1000])
def test_whole_segments_of_the_zone_go(tokens, sink):
    config = make_config(sink=sink, layers=2)
    f = filled(config, tokens)
    stats = settled(f.cache)
    expected = 2 * offloaded_segments(f.cache, f.s) * segment_bytes(config)
    assert stats.offloaded_bytes == expected
    assert stats.host_memory.live == expected
    assert stats.row_bytes == 2 * -(-tokens // 64) * segment_bytes(config)
    for _ in range(150):  # three flushes: more segments fill
        step = randn_step(f.rng, 1, config)
        for layer in range(2):
            f.cache.decode(layer, [f.s], *step)
    stats = settled(f.cache)
    grown = 2 * offloaded_segments(f.cache, f.s) * segment_bytes(config)
    assert stats.offloaded_bytes == stats.host_memory.live == grown > expected
    f.cache.remove(f.s)
    stats = settled(f.cache)
    assert stats.offloaded_bytes == stats.host_memory.live == 0
    f.cache.trim()
    assert f.cache.stats().host_memory.reserved == 0


def test_with_placement_device_nothing_goes():
    f = filled(make_config(placement="device"), 1000)
    stats = settled(f.cache)
    assert stats.offloaded_bytes == stats.host_memory.live == stats.host_memory.peak == 0
    assert stats.row_bytes > 0


def test_rows_on_the_device_are_freed_once_they_are_away():
    config = make_config(head_dim=128)
    f = filled(config, 64 * 100)
    after = settled(f.cache).memory.live
    twin = filled(with_changes(config, placement="device"), 64 * 100)
    there = settled(twin.cache).memory.live
    gone = offloaded_segments(f.cache, f.s) * segment_bytes(config)
    assert there - after >= 0.95 * gone


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("scorer", ["sign_norm", "votes"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_rows_lie_does_not_show(dtype, scorer, kv_dtype, busy):
    busy.start()
    far, near = pairs(1200, dtype=dtype, scorer=scorer, kv_dtype=kv_dtype, layers=2, head_dim=128)
    rng = np.random.default_rng(0)
    for i in range(130):
        if i in (0, 47, 95):
            busy.start(1)
        if i == 60:
            settled(far.cache)
        q, k, v = randn_step(rng, 1, near.cache.config)
        for layer in range(2):
            mine, theirs = (
                f.cache.decode(layer, [f.s], q, k, v, return_lse=True) for f in (far, near)
            )
            assert_same_bits(mine[0], theirs[0], f"step {i}")
            assert_same_bits(mine[1], theirs[1], f"step {i}")
    assert_alike(far, near)
    settled(far.cache)
    assert_alike(far, near)


def change_fork(f: Filled) -> int:
    fork = f.cache.fork(f.s)
    f.cache.decode(0, [fork], *randn_step(np.random.default_rng(1), 1, f.cache.config))
    return fork


def change_truncate(f: Filled) -> int:
    f.cache.truncate([f.s], drop=400)
    return f.s


def change_truncate_and_write(f: Filled) -> int:
    # The very segments that are being copied are written again.
    f.cache.truncate([f.s], drop=400)
    f.cache.prefill(0, [f.s], *randn_kv(np.random.default_rng(2), 300, f.cache.config))
    return f.s


def change_truncate_a_fork_and_write(f: Filled) -> int:
    fork = f.cache.fork(f.s)
    f.cache.truncate([fork], drop=555)
    f.cache.prefill(0, [fork], *randn_kv(np.random.default_rng(2), 555, f.cache.config))
    return fork


def change_reorder(f: Filled) -> int:
    other = f.cache.add()
    f.cache.prefill(0, [other], *randn_kv(np.random.default_rng(3), 500, f.cache.config))
    f.cache.reorder([f.s, other], [1, 1])
    f.cache.decode(0, [f.s, other], *randn_step(np.random.default_rng(1), 2, f.cache.config))
    return other


def change_remove(f: Filled) -> int:
    # Its blocks must not be handed on while the copy still reads and writes them.
    fork = f.cache.fork(f.s)
    f.cache.truncate([fork], drop=700)
    f.cache.remove(f.s)
    f.s = f.cache.add()
    f.cache.prefill(0, [f.s], *randn_kv(np.random.default_rng(5), 1000, f.cache.config))
    return fork


def change_append(f: Filled) -> int:
    f.cache.prefill(0, [f.s], *randn_kv(np.random.default_rng(6), 333, f.cache.config))
    return f.s


CHANGES = [
    change_fork,
    change_truncate,
    change_truncate_and_write,
    change_truncate_a_fork_and_write,
    change_reorder,
    change_remove,
    change_append,
]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_rows_are_under_way(change, when, kv_dtype, busy):
    config = make_config(head_dim=128, kv_dtype=kv_dtype)
    near = filled(with_changes(config, placement="device"), 1000)
    if when == "before":
        held_up()  # not even the rows are written yet
    elif when == "during":
        busy.start()
    far = filled(config, 1000)
    if when == "after":
        settled(far.cache)
    s, t = change(far), change(near)
    for moment in ("at once", "once arrived"):
        assert_alike(far, near)
        assert_alike(far, near, s, t)
        for _ in range(3):
            step = randn_step(np.random.default_rng(8), 1, config)
            assert_same_bits(
                far.cache.decode(0, [s], *step), near.cache.decode(0, [t], *step), moment
            )
        settled(far.cache)
    settled(far.cache)
    assert state_of(far.cache) == state_of(near.cache)


def test_rows_that_leave_the_zone_again_come_back():
    config = make_config(head_dim=128)
    far, near = pairs(2000, head_dim=128)
    settled(far.cache)
    before = far.cache.stats().offloaded_bytes
    for f in (far, near):
        f.cache.truncate([f.s], drop=1500)
    k, v = randn_kv(np.random.default_rng(2), 40, config)
    for f in (far, near):
        f.cache.prefill(0, [f.s], k, v)
    assert_alike(far, near)
    stats = settled(far.cache)
    assert stats.offloaded_bytes == offloaded_segments(far.cache, far.s) * segment_bytes(config)
    assert stats.offloaded_bytes < before
    assert_alike(far, near)


# --- Races -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["before", "after", "between"])
def test_a_copy_comes_after_earlier_work_of_its_stream(late):
    # If a copy did not wait for the rows, or a fetch for the copy, these would be others' bytes.
    config = make_config(head_dim=128, segment_tokens=256)
    rng = np.random.default_rng(0)
    k, v = randn_kv(rng, 5000, config)
    cache = pk.Cache(config)
    for _ in range(4):  # later rounds get memory that others' rows were in
        s = cache.add()
        if late == "before":
            held_up()
        cache.prefill(0, [s], k[:2500], v[:2500])
        if late == "between":
            held_up()
        cache.prefill(0, [s], k[2500:], v[2500:])
        if late == "after":
            held_up()
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:  # before, while and after they move
            mine = rows_of(cache, s)
            assert_same_bits(mine[0], k)
            assert_same_bits(mine[1], v)
        assert cache.stats().offloaded_bytes > 0
        cache.remove(s)
        k, v = v, k


def test_fetches_are_right_at_every_moment(busy):
    # Values say which token they are of: what a step fetched shows in what it gives.
    config = make_config(head_dim=128, top_k=64, schedule=[(0, 1.0, 1.0)])
    twin = filled(with_changes(config, placement="device"), 3000)
    step = randn_step(np.random.default_rng(1), 1, config)
    expected = twin.cache.decode(0, [twin.s], *step)
    cache = pk.Cache(config)
    for round_ in range(6):
        busy.start(1)
        if round_ % 2:
            held_up()
        s = cache.add()
        cache.prefill(0, [s], twin.k, twin.v)
        for i in range(20):
            assert_same_bits(cache.decode(0, [s], *step), expected, f"step {i}")
            cache.truncate([s], drop=1)
            if i % 5 == 4:
                time.sleep(0.005)
        cache.remove(s)


# --- Time --------------------------------------------------------------------------------------


def test_a_prefill_does_not_wait_for_the_bus():
    config = make_config(
        query_heads=8, kv_heads=8, head_dim=128, dtype="bfloat16", segment_tokens=1024
    )
    tokens = 64 * 1024  # 268 MB of rows: 5 ms on the quickest bus
    k, v = (torch.randn(tokens, 8, 128).bfloat16() for _ in "kv")
    bus = Busy(256)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    bus.start(1)
    bus.stream.synchronize()
    copying = time.perf_counter() - begin
    cache = pk.Cache(config)
    warm = cache.add()
    cache.prefill(0, [warm], k, v)  # memory has been taken by now
    settled(cache)
    cache.remove(warm)
    settled(cache)
    taken = []
    for _ in range(5):
        s = cache.add()
        held_up()
        begin = time.perf_counter()
        cache.prefill(0, [s], k, v)
        taken.append(time.perf_counter() - begin)
        assert not torch.cuda.current_stream().query(), "the call waited for the device"
        settled(cache)
        cache.remove(s)
        settled(cache)
    assert sorted(taken)[2] < copying


@pytest.mark.slow
def test_prefills_beyond_the_limit_of_waiting_offloads():
    config = make_config(
        query_heads=8,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        segment_tokens=1024,
        local=1024,
    )
    cache = pk.Cache(config)
    sequences = [cache.add() for _ in range(4)]
    parts = [torch.randn(2, 4096, 8, 128).bfloat16() for _ in range(7)]
    for i in range(48):  # 4 sequences of 48 parts of 16 MB: 3 GB
        for s in sequences:
            cache.prefill(0, [s], *parts[(i + s) % 7])
    for s in sequences:
        for i in range(0, 48, 5):
            out = (torch.empty_like(parts[0][0]), torch.empty_like(parts[0][0]))
            cache.read(0, s, 4096 * i, 4096 * (i + 1), out=out)
            assert torch.equal(torch.stack(out), parts[(i + s) % 7])
    stats = settled(cache)
    assert stats.offloaded_bytes > 0.95 * stats.row_bytes
    # What was under way at a time bounds what the GPU has ever held.
    assert stats.memory.peak < (5 << 30) // 2 + stats.summary_bytes * 2

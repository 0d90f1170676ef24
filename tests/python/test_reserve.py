"""Cache.reserve: memory that is there before the sequences that use it."""

from __future__ import annotations

import os
import re

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import assert_same_sequence, make_config, randn_kv, randn_q, unchanged

TOKENS = 3000


def filled(cache: pk.Cache, count: int) -> list[int]:
    rng = np.random.default_rng(7)
    sequences = []
    for _ in range(count):
        s = cache.add()
        for layer in range(cache.config.layers):
            cache.prefill(layer, [s], *randn_kv(rng, TOKENS // count, cache.config))
        sequences.append(s)
    return sequences


def held(cache: pk.Cache) -> int:
    stats = cache.stats()
    return stats.memory.reserved + stats.host_memory.reserved


@pytest.mark.parametrize("placement", ["auto", "host", "device"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_rows_find_their_memory_there(placement, kv_dtype, device):
    config = make_config(layers=2, placement=placement, kv_dtype=kv_dtype, device=device)
    reserved, other = pk.Cache(config), pk.Cache(config)
    reserved.reserve(TOKENS, sequences=3)
    before = held(reserved)
    rows = 2 * TOKENS * config.kv_heads * 2 * config.head_dim * (1 if kv_dtype == "int8" else 4)
    assert before >= rows
    mine, theirs = filled(reserved, 3), filled(other, 3)
    q = randn_q(np.random.default_rng(0), 1, config)[0]
    for s, t in zip(mine, theirs, strict=True):
        assert_same_sequence(reserved, s, other, t, q)
    stats = reserved.stats()
    in_place = stats.host_memory if device == "cuda" and placement == "host" else stats.memory
    assert in_place.live <= in_place.reserved
    if device == "cpu" and kv_dtype == "auto":
        # States and scratch come on top, in slabs of 1 MB.
        assert held(reserved) <= before + (3 << 20)


def test_it_stays_until_it_is_trimmed(device):
    cache = pk.Cache(make_config(layers=2, device=device))
    cache.reserve(10 * TOKENS, 3)
    before = held(cache)
    for s in filled(cache, 3):
        cache.remove(s)
    assert held(cache) >= before
    cache.reserve(10 * TOKENS, sequences=3)
    cache.trim()
    assert held(cache) <= before // 8
    cache.reserve(TOKENS)
    cache.close()


@pytest.mark.cpu("numbers of the CPU's arena")
def test_a_second_call_takes_nothing_more():
    cache = pk.Cache(make_config(layers=2))
    cache.reserve(TOKENS, 3)
    before = held(cache)
    assert before > 0
    cache.reserve(TOKENS, 3)
    cache.reserve(TOKENS // 2, 3)
    assert held(cache) == before
    cache.reserve(2 * TOKENS, 3)
    assert held(cache) > before


@pytest.mark.cpu("pages that a process has, as Linux counts them")
@pytest.mark.parametrize("threads", [1, 4])
def test_its_pages_are_in_memory(threads):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    cache = pk.Cache(make_config(layers=4, head_dim=128, threads=threads))
    before = resident()
    cache.reserve(20_000)
    assert resident() - before >= 0.95 * held(cache)
    assert held(cache) >= 20_000 * 4 * 2 * 2 * 128 * 4


def test_a_budget_without_room_for_it_refuses(device):
    config = make_config(layers=2, placement="device", memory_budget=20 << 20, device=device)
    cache = pk.Cache(config)
    sentence = r"\[reserve\] asked for \d+ bytes.* ahead, but only \d+ of the budget of 20971520"
    with unchanged(cache), pytest.raises(pk.OutOfMemory, match=sentence):
        cache.reserve(100_000)
    assert cache.stats().memory.reserved <= 20 << 20
    cache.reserve(1000)
    filled(cache, 3)


@pytest.mark.cuda
def test_a_host_budget_without_room_for_it_takes_nothing():
    cache = pk.Cache(make_config(layers=2, host_budget=8 << 20))
    before = held(cache)
    with pytest.raises(pk.OutOfMemory, match=r"bytes of pinned host memory ahead"):
        cache.reserve(100_000)
    assert held(cache) == before


@pytest.mark.cuda
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_host_memory_by_itself(background, kv_dtype):
    """It counts at once, rows that leave find it there, and it stays until it is trimmed."""
    budgets = {"memory_budget": 12 << 20, "host_budget": 64 << 20}
    config = make_config(layers=2, placement="auto", kv_dtype=kv_dtype, **budgets)
    cache, other = pk.Cache(config), pk.Cache(config)
    cache.reserve_host(40 << 20, background=background)
    before = cache.stats().host_memory.reserved
    assert 39 << 20 <= before <= 42 << 20
    cache.reserve_host(bytes=40 << 20, background=background)
    assert cache.stats().host_memory.reserved == before
    mine, theirs = filled(cache, 2), filled(other, 2)
    q = randn_q(np.random.default_rng(0), 1, config)[0]
    for s, t in zip(mine, theirs, strict=True):
        assert_same_sequence(cache, s, other, t, q)
    with pytest.raises(pk.OutOfMemory, match=r"\[reserve\] asked for \d+ bytes of pinned host"):
        cache.reserve_host(80 << 20, background=background)
    for s in mine:
        cache.remove(s)
    assert cache.stats().host_memory.reserved >= before
    cache.trim()
    assert cache.stats().host_memory.reserved == 0
    cache.reserve_host(60 << 20, background=True)
    cache.close()  # with most of it to come


@pytest.mark.cuda
def test_the_memory_of_a_gpu_by_itself():
    """It is mapped at once, serves blocks of any size, and stays until it is trimmed."""

    def free():
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    config = make_config(layers=2, placement="auto", memory_budget=512 << 20)
    cache, other = pk.Cache(config), pk.Cache(config)
    taken, returned = [], []
    for _ in range(4):  # other processes take and return memory too, but not in each of these times
        before = free()
        cache.reserve_device(256 << 20)
        taken.append(before - free())
        before = free()
        cache.trim()
        returned.append(free() - before)
    for some in (taken, returned):
        assert sorted(some)[1] < 280 << 20 and sorted(some)[2] > 200 << 20, (taken, returned)
    cache.reserve_device(256 << 20)
    mine, theirs = filled(cache, 2), filled(other, 2)
    q = randn_q(np.random.default_rng(0), 1, config)[0]
    for s, t in zip(mine, theirs, strict=True):
        assert_same_sequence(cache, s, other, t, q)
    for s in mine:
        cache.remove(s)
    with unchanged(cache), pytest.raises(pk.OutOfMemory, match="but the budget is 536870912"):
        cache.reserve_device(513 << 20)
    cache.close()  # with most of it ready


@pytest.mark.cpu("of a cache on a CPU")
def test_a_cpu_has_no_memory_of_a_gpu():
    cache = pk.Cache(make_config())
    with (
        unchanged(cache),
        pytest.raises(ValueError, match=r"\[reserve_device\] expected a cache on"),
    ):
        cache.reserve_device(1)
    with pytest.raises(ValueError, match=r"\[reserve_device\] bytes: expected 1 or more, got 0"):
        cache.reserve_device(0)


def test_host_memory_is_refused_where_no_row_goes(device):
    cache = pk.Cache(make_config(placement="device", device=device))
    text = r"\[reserve_host\] expected a cache with rows in host memory beside a device: on a GPU, "
    with unchanged(cache), pytest.raises(ValueError, match=text):
        cache.reserve_host(1 << 20)


@pytest.mark.cuda
def test_no_bytes_are_refused():
    cache = pk.Cache(make_config())
    text = r"\[reserve_host\] bytes: expected 1 or more, got 0"
    with pytest.raises(ValueError, match=text):
        cache.reserve_host(0)


@pytest.mark.parametrize(
    ("tokens", "sequences", "text"),
    [
        (0, 1, "tokens: expected 1 to 8388608, as many as 1 sequences can have, got 0"),
        (-5, 2, "tokens: expected 1 to 16777216"),
        (1 << 40, 1, "tokens: expected 1 to 8388608"),
        (10, 0, "sequences: expected 1 to 65536, got 0"),
        (10, 65537, "sequences: expected 1 to 65536, got 65537"),
    ],
)
def test_other_numbers_are_refused(tokens, sequences, text):
    cache = pk.Cache(make_config())
    with unchanged(cache), pytest.raises(ValueError, match=re.escape("[reserve] " + text)):
        cache.reserve(tokens, sequences)


@pytest.mark.cpu("CUDA does not survive a fork")
def test_a_process_that_forks_goes_on():
    config = make_config(threads=4)
    cache = pk.Cache(config)
    cache.reserve(TOKENS)
    rows = np.ones((TOKENS, config.kv_heads, config.head_dim), np.float32)
    child = os.fork()
    if child == 0:  # torch's own threads are gone here: the engine alone is called
        cache.prefill(0, [cache.add()], rows, rows)
        cache.reserve(2 * TOKENS)
        os._exit(0 if cache.stats().tokens == TOKENS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    filled(cache, 1)

"""Config.footprint and its sums, bytes_per_token and bytes_per_sequence: bounds that hold."""

from __future__ import annotations

import re

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import make_config, randn_kv, randn_q, randn_step, settled

# Short requests, as a server has them: 8 to 2,000 tokens, most of them a few hundred.
MOST = 2048
REQUESTS = 10_000


def config_for(**changes) -> pk.Config:
    fields = {"query_heads": 2, "kv_heads": 1, "layers": 2, "dense_below": 8192, "dtype": "float16"}
    settings = {"placement": "auto", "memory_budget": 1 << 30, "block": 64, "local": 256}
    return make_config(**{**fields, **settings, **changes})


class Watched:
    """A cache, and the bound of what its sequences take."""

    def __init__(self, config: pk.Config, most: int, multiple: int) -> None:
        self.cache = pk.Cache(config)
        self.token = config.bytes_per_token(most)
        self.sequence = config.bytes_per_sequence(most, multiple)
        self.multiple = multiple
        self.leave = config.device != "cpu" and config.placement == "host"
        self.empty = self._device(self.cache.stats())
        self.lengths: dict[int, int] = {}
        self.highest = 0  # bound so far, and the workspace
        self.taken, self.bound = 0, 0  # when most was taken

    @staticmethod
    def _device(stats: pk.Stats) -> int:
        return stats.memory.live - stats.workspace_bytes

    def now(self) -> pk.Bytes:
        counted = sum(-(-length // self.multiple) for length in self.lengths.values())
        tokens, sequences = counted * self.multiple, len(self.lengths)
        self.device = tokens * self.token.device + sequences * self.sequence.device
        return tokens * self.token.host + sequences * self.sequence.host

    def check(self, stats: pk.Stats) -> None:
        host = self.now()
        taken = self._device(stats) - self.empty
        assert taken <= self.device, (taken, self.device, self.lengths)
        assert stats.host_memory.live <= host
        self.highest = max(self.highest, self.device + stats.workspace_bytes)
        if not self.leave:  # on their way to host memory they have room in both
            assert stats.memory.peak - self.empty <= self.highest
        if taken > self.taken:
            self.taken, self.bound = taken, self.device


def prompt(cache: pk.Cache, s: int, k: torch.Tensor, v: torch.Tensor, tokens: int) -> None:
    for layer in range(cache.config.layers):
        cache.prefill(layer, [s], k[:tokens], v[:tokens])


@pytest.mark.slow
@pytest.mark.parametrize("counted", ["tokens", "blocks of 16", "segments"])
def test_ten_thousand_short_requests_stay_within_it(counted, device):
    config = config_for(segment_tokens=64, device=device)
    multiple = {"tokens": 1, "blocks of 16": 16, "segments": 64}[counted]
    watched = Watched(config, MOST, multiple)
    cache = watched.cache
    rng = np.random.default_rng(1)
    k, v = randn_kv(rng, MOST, config)
    left: dict[int, int] = {}  # tokens still to be decoded, by sequence
    begun = ended = 0
    while ended < REQUESTS:
        while begun < REQUESTS and len(left) < 48 + begun % 48:
            s = cache.add()
            tokens = int(np.clip(rng.lognormal(6.3, 0.8), 8, MOST - 32))
            prompt(cache, s, k, v, tokens)
            watched.lengths[s], left[s] = tokens, int(rng.integers(1, 33))
            begun += 1
        batch = cache.batch(list(left))
        step = randn_step(rng, len(left), config)
        for layer in range(config.layers):
            cache.decode(layer, batch, *step)
        for s in list(left):
            watched.lengths[s] += 1
            left[s] -= 1
        watched.check(cache.stats())
        for s in [s for s, more in left.items() if more == 0]:
            cache.remove(s)
            del left[s], watched.lengths[s]
            ended += 1
    assert watched.bound <= 1.05 * watched.taken
    last = cache.stats()
    assert last.memory.live - last.workspace_bytes == watched.empty


POLICIES = {
    "whole keys": {},
    "blocks and a tail": {"tail": "own", "tail_rows": 16},
    "8 bits": {"tail": "own", "tail_rows": 16, "kv_dtype": "int8"},
    "votes": {"scorer": "votes"},
    "HardKV": {"policy": pk.HardKV(most=64)},
    "HardKV, dropped": {"policy": pk.HardKV(most=64, placement="dropped")},
    "PRKV": {"policy": pk.PRKV(budget=64, page=16)},
    "PRKV, kept rows alone": {"policy": pk.PRKV(budget=64, page=16, static_share=1.0)},
}


def mixed_config(name: str, placement: str) -> pk.Config:
    fields = dict(POLICIES[name])
    policy = fields.pop("policy", None)
    blocks = {"block": 64 if "blocks" in name or "8 bits" in name else 0}
    config = config_for(placement=placement, dense_below=300, **{**blocks, **fields, "local": 40})
    return config if policy is None else config.replace(policy=policy)


def live_through(config: pk.Config, most: int, rounds: int, seed: int) -> Watched:
    """Sequences that grow, fork, are cut and go, whatever their lengths."""
    watched = Watched(config, most, config.segment_tokens)
    cache, lengths = watched.cache, watched.lengths
    rng = np.random.default_rng(seed)
    k, v = randn_kv(rng, most, config)
    q = randn_q(rng, most, config)
    gpu = config.device != "cpu"
    for _ in range(rounds):
        deed = rng.choice(["begin", "step", "step", "step", "fork", "prefix", "cut", "end"])
        some = int(rng.choice(list(lengths))) if lengths else None
        if deed == "begin" or some is None:
            s, tokens = cache.add(), int(rng.integers(1, most - 400))
            # A chunk at a time: rows that are not in 8 bits yet are a call's own.
            for layer in range(config.layers):
                for begin in range(0, tokens, 64):
                    part = slice(begin, min(begin + 64, tokens))
                    cache.prefill(layer, [s], k[part], v[part], q=q[part])
            lengths[s] = tokens
        elif deed == "step":
            batch = [s for s, length in lengths.items() if length < most - 40]
            for _ in range(40 if batch else 0):
                step = randn_step(rng, len(batch), config)
                for layer in range(config.layers):
                    cache.decode(layer, batch, *step)
                for s in batch:
                    lengths[s] += 1
        elif deed == "fork":
            lengths[cache.fork(some)] = lengths[some]
        elif deed == "prefix" and cache.regions(some).dropped == 0:
            tokens = int(rng.integers(1, lengths[some] + 1))
            lengths[cache.fork(some, tokens=tokens)] = tokens
        elif deed == "cut" and cache.regions(some).dropped == 0:
            lengths[some] -= (drop := int(rng.integers(0, lengths[some])))
            cache.truncate([some], drop=drop)
        elif deed == "end":
            cache.remove(some)
            del lengths[some]
        watched.check(settled(cache) if gpu else cache.stats())
    return watched


@pytest.mark.parametrize("placement", ["auto", "host", "device"])
@pytest.mark.parametrize("name", POLICIES)
def test_no_mix_of_sequences_passes_it(name, placement, device):
    if device == "cpu" and placement != "auto":
        pytest.skip("a cache on the CPU has one memory")
    config = mixed_config(name, placement).replace(device=device)
    watched = live_through(config, 3000, 60, seed=3)
    assert watched.taken > 0
    if "dropped" not in name:  # whose prompts take more than what is left of them
        # Short sequences keep all rows on a GPU, and long ones in such a mix few of theirs.
        assert watched.bound < (4 if watched.leave else 3) * watched.taken


def check_by_name(config: pk.Config, stats: pk.Stats, lengths: list[int], empty: int) -> None:
    """What is held for each purpose is within the entries that have it; between calls."""
    counted = sum(-(-n // config.segment_tokens) * config.segment_tokens for n in lengths)
    found = config.footprint(
        longest=MIXED, sequences=len(lengths), tokens=counted, multiple=config.segment_tokens
    )
    far = stats.host_memory.live
    assert far <= found.host + found.either
    rows = sum(found[name] for name in ("rows", "prompt rows", "resident rows", "opening rows"))
    # An arena counts whole cache lines, these statistics bytes: they are fewer.
    assert stats.row_bytes <= rows
    assert stats.summary_bytes <= found["summaries"] + found["state"]
    kept = ("tail copies", "kept rows", "recent queries")
    assert stats.kept_bytes <= sum(found[name] for name in kept)
    held = stats.row_bytes - stats.offloaded_bytes + stats.summary_bytes + stats.kept_bytes
    rest = stats.memory.live - stats.workspace_bytes - empty - held
    lines = 256 * config.layers * (counted // 64 + 16 * len(lengths))
    assert rest <= found["row cache"] + found["tables"] + lines
    assert stats.memory.live - stats.workspace_bytes - empty + far <= (
        found.device + found.host + found.either
    )


MIXED = 3000
# 8 bits: a sequence may have all of its rows as they came until its zone opens. dropped: a prompt.
LOOSE = {"8 bits": 3.5, "HardKV, dropped": 3.5}


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["auto", "host"])
@pytest.mark.parametrize("name", POLICIES)
def test_thousands_of_mixed_requests_stay_within_it(name, placement, device):
    """Prompts in chunks, forks of prefixes, answers, cuts and ends, short beside long."""
    if device == "cpu" and placement != "auto":
        pytest.skip("a cache on the CPU has one memory")
    requests = REQUESTS if name in ("blocks and a tail", "8 bits", "PRKV") else REQUESTS // 5
    config = mixed_config(name, placement).replace(device=device, layers=1, segment_tokens=64)
    watched = Watched(config, MIXED, config.segment_tokens)
    cache, lengths, config = watched.cache, watched.lengths, watched.cache.config
    rng = np.random.default_rng(1)
    k, v = randn_kv(rng, MIXED, config)
    q = randn_q(rng, MIXED, config)
    left: dict[int, int] = {}
    begun = ended = steps = 0
    while ended < requests:
        while begun < requests and len(left) < 16 + begun % 48:
            tokens = int(np.clip(rng.lognormal(5.6, 1.0), 1, MIXED - 40))
            origin = int(rng.choice(list(left))) if left and begun % 4 == 1 else None
            if origin is not None and cache.regions(origin).dropped == 0:
                known = int(rng.integers(1, min(lengths[origin], tokens) + 1))
                s = cache.fork(origin, tokens=known)
            else:
                s, known = cache.add(), 0
            for begin in range(known, tokens, 256):
                part = slice(begin, min(begin + 256, tokens))
                cache.prefill(0, [s], k[part], v[part], q=q[part])
            lengths[s], left[s] = max(tokens, known), int(rng.integers(1, 33))
            begun += 1
        cache.decode(0, cache.batch(list(left)), *randn_step(rng, len(left), config))
        steps += 1
        for s in list(left):
            lengths[s] += 1
            left[s] -= 1
        stats = settled(cache) if device != "cpu" else cache.stats(counted=True)
        watched.check(stats)
        if steps % 8 == 0:
            check_by_name(config, stats, list(lengths.values()), watched.empty)
        for s in [s for s, more in left.items() if more <= 0]:
            if ended % 7 == 0 and cache.regions(s).dropped == 0:
                drop = int(rng.integers(0, lengths[s]))
                cache.truncate([s], drop=drop)
                lengths[s] -= drop
                watched.now()
            cache.remove(s)
            del left[s], lengths[s]
            ended += 1
    if placement == "auto":
        assert watched.bound < LOOSE.get(name, 1.4) * watched.taken


@pytest.mark.cpu("arithmetic: no GPU need be there")
@pytest.mark.parametrize("placement", ["auto", "host", "device"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_two_sums_are_those_of_its_entries(name, placement):
    for device in ("cpu", "cuda:3"):
        config = mixed_config(name, placement).replace(device=device)
        segment = config.segment_tokens
        found = config.footprint(longest=3000, sequences=5, tokens=40 * segment, multiple=segment)
        token = config.bytes_per_token(3000)
        each = config.bytes_per_sequence(3000, segment)
        elsewhere = found.either
        if placement == "auto" and device != "cpu":  # the sums are of rows that stay
            near = config.replace(placement="device")
            found = near.footprint(longest=3000, sequences=5, tokens=40 * segment, multiple=segment)
            assert elsewhere == found["rows"] + found["prompt rows"] > 0
        assert found.device == 40 * segment * token.device + 5 * each.device
        assert found.host == 40 * segment * token.host
        whole = config.footprint(longest=3000, sequences=5)
        parts = ("state", "row cache", "tail copies", "kept rows", "recent queries", "tables")
        one = config.footprint(longest=3000)
        assert all(whole[part] == 5 * one[part] for part in parts)
        assert whole["nothing"] == 0
        assert repr(one.entries[0]).startswith("Entry(name='rows', place=")
        assert repr(one).startswith(f"Footprint(rows={one['rows']}")


@pytest.mark.cpu("about no backend")
def test_loads_that_are_none_are_refused():
    config = config_for()
    for fields, sentence in (
        ({"longest": 0}, "longest: expected 1 to 8388608 tokens, got 0"),
        ({"sequences": -1}, "sequences: expected 0 to"),
        ({"tokens": -1}, "tokens: expected 0 to"),
        ({"tokens": 1 << 41}, "tokens: expected 0 to"),
        ({"sequences": 1 << 20, "longest": 1 << 21}, "sequences: expected 0 to 524288 of so many"),
        ({"multiple": 0}, "multiple: expected 1 to"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"[footprint] {sentence}")):
            config.footprint(**fields)
    assert config.footprint(tokens=None).device == config.footprint().device
    # The most of all does not overflow.
    large = config.replace(layers=80, kv_heads=8, query_heads=8)
    token = large.footprint(sequences=0, tokens=1 << 20)["rows"] >> 20
    assert large.footprint(sequences=0, tokens=1 << 40)["rows"] == token << 40
    most = large.footprint(longest=1 << 20, sequences=1 << 20)
    assert most["rows"] == token << 40
    assert all(entry.bytes > 0 for entry in most.entries)


def test_a_cut_brings_a_window_back_within_it(device):
    config = mixed_config("8 bits", "device").replace(
        device=device, local=2048, update=64, dense_below=0, policy=pk.ParisKV(top_k=16, block=0)
    )
    watched = Watched(config, 10_000, config.segment_tokens)
    s = watched.cache.add()
    k, v = randn_kv(np.random.default_rng(1), 10_000, watched.cache.config)
    for layer in range(config.layers):
        for begin in range(0, 10_000, 64):
            part = slice(begin, min(begin + 64, 10_000))
            watched.cache.prefill(layer, [s], k[part], v[part])
    watched.lengths[s] = 10_000
    watched.check(watched.cache.stats())
    watched.cache.truncate([s], drop=2312)
    watched.lengths[s] -= 2312
    watched.check(watched.cache.stats())


@pytest.mark.cpu("sums of the CPU's blocks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_short_sequences_it_is_what_their_rows_take(dtype):
    config = config_for(layers=5, kv_heads=2, head_dim=128, value_dim=64, dtype=dtype)
    element = 4 if dtype == "float32" else 2
    row = 5 * 2 * (128 + 64) * element
    assert config.bytes_per_token(1000).device == row
    assert config.bytes_per_sequence(1000, multiple=config.segment_tokens).device == 0
    assert config.bytes_per_sequence(1000).device == (config.segment_tokens - 1) * row
    assert config.bytes_per_sequence(1000, multiple=16).device == (config.segment_tokens - 16) * row
    assert config.bytes_per_token(1000).host == config.bytes_per_sequence(1000).host == 0


@pytest.mark.cpu("arithmetic: no GPU need be there")
def test_a_gpu_that_is_not_there_has_a_bound():
    config = config_for(device="cuda:3", segment_tokens=128, dense_below=2048)
    row = 2 * 1 * 128 * 2
    assert config.bytes_per_token(1000).device == row
    tables = config.bytes_per_sequence(1000, multiple=128)
    assert 0 < tables.device < 128 * row
    far = config.replace(placement="host")
    assert far.bytes_per_token(100_000).host == row
    assert far.bytes_per_token(100_000).device < row
    assert far.bytes_per_token(1000).host == 0  # such sequences have no zone
    near = config.replace(placement="device")
    assert near.bytes_per_token(100_000).host == 0
    assert near.bytes_per_token(100_000).device > row


@pytest.mark.cpu("arithmetic")
def test_more_tokens_never_take_less():
    config = config_for(dense_below=2048, tail="own", top_k=100)
    lengths = [1, 64, 1000, 1500, 2304, 2400, 3000, 10_000, 1 << 23]
    for multiple in (1, 64):
        bounds = [
            tokens * config.bytes_per_token(tokens).device
            + config.bytes_per_sequence(tokens, multiple).device
            for tokens in lengths
        ]
        assert bounds == sorted(bounds)


@pytest.mark.cpu("about no backend")
@pytest.mark.parametrize("tokens", [0, -1, (1 << 23) + 1])
def test_numbers_that_are_no_lengths_are_refused(tokens):
    config = config_for()
    sentence = f"most_tokens: expected 1 to 8388608 tokens, got {tokens}"
    for call in (config.bytes_per_token, config.bytes_per_sequence):
        with pytest.raises(ValueError, match=re.escape(f"[{call.__name__}] {sentence}")):
            call(tokens)
    with pytest.raises(ValueError, match=r"\[bytes_per_sequence\] multiple: expected 1 to"):
        config.bytes_per_sequence(1000, multiple=tokens)
    with pytest.raises(TypeError, match=r"\[bytes_per_token\] most_tokens: expected an integer"):
        config.bytes_per_token("many")
    assert repr(config.bytes_per_token(1000)).startswith("Bytes(device=")

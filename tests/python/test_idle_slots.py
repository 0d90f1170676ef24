"""Slots of a step that have no sequence: zeros, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import torch
from support import (
    assert_same_bits,
    assert_same_sequence,
    make_config,
    randn_kv,
    randn_q,
    randn_step,
    state_of,
    unchanged,
)
from test_cuda_graph import Graph, make_steps

POLICIES = {
    "ParisKV": {},
    "blocks and a tail": {"block": 64, "tail": "own", "tail_rows": 16},
    "8 bits": {"kv_dtype": "int8"},
    "dense": {"dense_below": 4096},
    "no window": {"local": 0},
    "HardKV": {"policy": pk.HardKV(most=24)},
    "PRKV": {"policy": pk.PRKV(budget=64, page=16)},
}
LENGTHS = (300, 120, 1200)


def config_for(name: str, **changes) -> pk.Config:
    fields = dict(POLICIES[name])
    policy = fields.pop("policy", None)
    config = make_config(layers=2, **{**fields, **changes})
    return config if policy is None else config.replace(policy=policy)


def filled(config: pk.Config) -> tuple[pk.Cache, list[int]]:
    rng = np.random.default_rng(5)
    cache = pk.Cache(config)
    sequences = [cache.add() for _ in LENGTHS]
    for layer in range(config.layers):
        (k, v), q = randn_kv(rng, sum(LENGTHS), config), randn_q(rng, sum(LENGTHS), config)
        cache.prefill(layer, sequences, k, v, list(LENGTHS), q=q)
    return cache, sequences


def batches(sequences: list[int], seed: int, count: int, width: int = 6) -> list[list[int]]:
    """Some of the sequences in some of the slots."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        slots = [pk.IDLE] * width
        some = rng.permutation(sequences)[: rng.integers(0, len(sequences) + 1)]
        for slot, s in zip(rng.permutation(width), some, strict=False):
            slots[slot] = int(s)
        found.append(slots)
    return found


def live(slots: list[int]) -> list[int]:
    return [slot for slot, s in enumerate(slots) if s != pk.IDLE]


def assert_idle(out: torch.Tensor, lse: torch.Tensor, slots: list[int]) -> None:
    idle = [slot for slot, s in enumerate(slots) if s == pk.IDLE]
    assert (out[idle] == 0).all()
    assert (lse[idle] == -float("inf")).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_with_idle_lanes_is_the_step_without_them(name, dtype, device):
    config = config_for(name, dtype=dtype, device=device)
    (cache, mine), (other, theirs) = filled(config), filled(config)
    rng = np.random.default_rng(1)
    for number, slots in enumerate(batches(mine, 2, 70)):
        rows = live(slots)
        named = cache.batch(slots) if number % 2 else slots
        twins = [theirs[mine.index(slots[row])] for row in rows]
        for layer in range(2):
            step = randn_step(rng, len(slots), config)
            out, lse = cache.decode(layer, named, *step, return_lse=True)
            assert_idle(out, lse, slots)
            expected = other.decode(layer, twins, *(x[rows] for x in step), return_lse=True)
            assert_same_bits(out[rows], expected[0], f"step {number}")
            assert_same_bits(lse[rows], expected[1], f"step {number}")
            again = cache.decode(layer, named, step[0])
            assert (again[[slot for slot in range(6) if slot not in rows]] == 0).all()
            other.decode(layer, twins, step[0][rows])
    assert state_of(cache) == state_of(other)
    if isinstance(config.policy, pk.ParisKV):
        q = randn_q(rng, 1, config)[0]
        for s, t in zip(mine, theirs, strict=True):
            assert_same_sequence(cache, s, other, t, q)


def test_errors_of_idle_lanes_are_zero(device):
    config = config_for("blocks and a tail", device=device)
    cache, sequences = filled(config)
    slots = [pk.IDLE, sequences[2], pk.IDLE]
    out, error = cache.decode(
        0, slots, *randn_step(np.random.default_rng(0), 3, config), return_error=True
    )
    assert (out[[0, 2]] == 0).all()
    assert (error[[0, 2]] == 0).all()
    assert (error[1] > 0).all()


def test_outputs_with_gaps_are_written_between_them(device):
    config = config_for("ParisKV", device=device)
    cache, sequences = filled(config)
    wide = torch.full((4, config.query_heads + 1, config.head_dim), 7.0)
    out = wide[:, : config.query_heads]
    step = randn_step(np.random.default_rng(0), 4, config)
    cache.decode(0, [pk.IDLE, sequences[0], pk.IDLE, pk.IDLE], *step, out=out)
    assert (out[[0, 2, 3]] == 0).all()
    assert (out[1] != 7).any()
    assert (wide[:, config.query_heads :] == 7).all()


def test_an_output_may_lie_where_the_queries_lie(device):
    config = config_for("ParisKV", device=device)
    (cache, mine), (other, theirs) = filled(config), filled(config)
    q, k, v = randn_step(np.random.default_rng(0), 3, config)
    expected = other.decode(0, theirs[:1], q[1:2], k[1:2], v[1:2])
    cache.decode(0, [pk.IDLE, mine[0], pk.IDLE], q, k, v, out=q)
    assert (q[[0, 2]] == 0).all()
    assert_same_bits(q[1:2], expected)


def test_other_calls_refuse_them_before_anything_changes():
    config = config_for("ParisKV")
    cache, (a, *_) = filled(config)
    rng = np.random.default_rng(0)
    (k, v), q = randn_kv(rng, 2, config), randn_q(rng, 2, config)
    for slots in ([a, pk.IDLE], cache.batch([a, pk.IDLE])):
        calls = {
            "prefill": lambda slots=slots: cache.prefill(0, slots, k, v, [1, 1]),
            "attend": lambda slots=slots: cache.attend(0, slots, q, [1, 1]),
            "truncate": lambda slots=slots: cache.truncate(slots, drop=1),
            "reorder": lambda slots=slots: cache.reorder(slots, [0, 1]),
            "flush": lambda slots=slots: cache.flush(slots),
        }
        for verb, call in calls.items():
            sentence = rf"\[{verb}\] sequences: expected a sequence in each place, got an idle slot"
            with unchanged(cache), pytest.raises(ValueError, match=sentence + " at 1"):
                call()
    for verb in ("remove", "fork", "length"):
        with pytest.raises(ValueError, match=rf"\[{verb}\] sequences: expected a sequence in each"):
            getattr(cache, verb)(pk.IDLE)


def test_a_lane_without_tokens_is_not_idle():
    cache = pk.Cache(config_for("ParisKV"))
    s = cache.add()
    q = randn_q(np.random.default_rng(0), 2, cache.config)
    with pytest.raises(ValueError, match=rf"\[decode\] sequences: .*, but {s} has none in layer 0"):
        cache.decode(0, [pk.IDLE, s], q)
    assert (cache.decode(0, [pk.IDLE, pk.IDLE], q) == 0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", ["auto", "host"])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "no window"])
def test_a_graph_over_idle_lanes_serves_any_sequences(name, placement, dtype):
    """Recorded over idle slots alone; each replay has others in other slots."""
    config = config_for(name, dtype=dtype, placement=placement)
    (cache, mine), (other, theirs) = filled(config), filled(config)
    graph = Graph(cache, [pk.IDLE] * 6)
    for number, (slots, step) in enumerate(
        zip(batches(mine, 4, 90), make_steps(config, 6, 90), strict=True)
    ):
        # Slots at the end need not be named.
        named = slots[: max(live(slots), default=-1) + 1] if number % 3 == 0 else slots
        results = graph.step(named, step)
        rows = live(slots)
        twins = [theirs[mine.index(slots[row])] for row in rows]
        for layer in range(2):
            out, lse = results[2 * layer : 2 * layer + 2]
            assert_idle(out, lse, slots)
            inputs = (x[layer][rows] for x in step)
            expected = other.decode(layer, twins, *inputs, return_lse=True)
            assert_same_bits(out[rows], expected[0], f"step {number}")
            assert_same_bits(lse[rows], expected[1], f"step {number}")
    assert state_of(cache) == state_of(other)


@pytest.mark.cuda
def test_sequences_that_come_and_go_find_their_lane():
    config = config_for("ParisKV", dtype="bfloat16")
    cache, other = pk.Cache(config), pk.Cache(config)
    graph = Graph(cache, [pk.IDLE] * 4)
    rng = np.random.default_rng(8)
    slots, twins = [pk.IDLE] * 4, [pk.IDLE] * 4
    for number, step in enumerate(make_steps(config, 4, 80)):
        slot = int(rng.integers(4))
        if slots[slot] == pk.IDLE:
            k, v = randn_kv(rng, int(rng.integers(1, 300)), config)
            for each, own in ((cache, slots), (other, twins)):
                own[slot] = each.add()
                for layer in range(2):
                    each.prefill(layer, [own[slot]], k, v)
        elif number % 3 == 0:
            for each, own in ((cache, slots), (other, twins)):
                each.remove(own[slot])
                own[slot] = pk.IDLE
        results = graph.step(slots, step)
        for layer in range(2):
            inputs = (x[layer] for x in step)
            expected = other.decode(layer, twins, *inputs, return_lse=True)
            for mine, theirs in zip(results[2 * layer :], expected, strict=False):
                assert_same_bits(mine, theirs, f"step {number}")

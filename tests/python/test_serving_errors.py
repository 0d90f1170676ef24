"""Errors that searches report, summed up for each request behind a step."""

from __future__ import annotations

import numpy as np
import pariskv_core as pk
import pytest
import test_error
import torch
from pariskv_core.serving import Engine, ErrorSum, Orders
from pariskv_core.serving.orders import ADD, Command, Row
from pariskv_core.serving.step_errors import StepErrors
from support import assert_same_bits, make_config, randn_kv, randn_q
from test_cuda_graph import filled_with, make_steps, warm_up

SAMPLED = {**test_error.SAMPLED, "top_k": 8}


def taken(errors: StepErrors) -> dict[str, ErrorSum]:
    """When those of all steps are here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return errors.take()


def row(name: str, before: int, count: int) -> Row:
    return Row(name, int(name[1:]), before, before, count, before + count * (count > 1))


def test_steps_add_up_for_each_request(rng: np.random.Generator) -> None:
    config = make_config(layers=2, dense_below=0, **SAMPLED)
    engine = Engine(config)
    engine.tell_errors(3)
    assert engine.errors is not None
    stored = {"r0": 0, "r1": 0, "r2": 0}
    expected: dict[str, ErrorSum] = {}
    # Prompts; one is short and is attended to in full. Then tokens beside a chunk, and alone.
    for counts in ([1500, 20, 1300], [1, 1, 90], [1, 1, 1], [1, 1, 1]):
        rows = [row(*item, count) for item, count in zip(stored.items(), counts, strict=True)]
        first = not any(stored.values())
        commands = [Command(ADD, number) for number in range(3)] if first else []
        engine.begin(Orders(commands, rows), list(stored))
        told = []
        decoding = [one.request for one in rows if one.decodes]
        for layer in range(config.layers):
            q = randn_q(rng, sum(counts), config)
            k, v = randn_kv(rng, sum(counts), config)
            engine.attend(layer, q, k, v, torch.empty_like(q))
            told.append(engine.errors.of(layer, len(decoding)).clone())
        engine.end()
        for place, request in enumerate(decoding):
            of_step = torch.stack(told)[:, place]
            if of_step.max() > 0:
                mine = expected.setdefault(request, ErrorSum())
                mine += ErrorSum(float(of_step.mean()), float(of_step.max()), 1)
        for name, count in zip(stored, counts, strict=True):
            stored[name] += count
    found = taken(engine.errors)
    assert {name: one.steps for name, one in found.items()} == {"r0": 3, "r2": 2}
    assert found == expected
    assert 0 < found["r0"].mean < found["r0"].worst
    assert taken(engine.errors) == {}
    engine.close()


def test_an_error_that_is_no_number_spoils_no_other() -> None:
    errors = StepErrors(make_config(layers=2, **SAMPLED), 2)
    errors.begin(["a", "b"])
    errors.of(0, 2)[0] = float("nan")
    errors.of(1, 2).fill_(0.25)
    errors.end()
    found = taken(errors)
    assert found["b"] == ErrorSum(0.125, 0.25, 1)
    assert found["a"] == ErrorSum(0.125, 0.25, 1)
    errors.begin(["b"])
    errors.end()
    assert taken(errors) == {}, "of an earlier step nothing is left"


@pytest.mark.cuda
def test_replays_tell_the_errors_of_their_steps() -> None:
    config = make_config(dtype="float16", layers=2, dense_below=0, **SAMPLED)
    caches, lengths = (pk.Cache(config), pk.Cache(config)), [1500, 0, 1300]
    mine, alike = (filled_with(cache, lengths) for cache in caches)
    inputs = [torch.zeros_like(x) for x in make_steps(config, len(lengths), 1)[0]]
    warm_up(config)
    errors = StepErrors(config, len(lengths))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, (q, k, v) in enumerate(zip(*inputs, strict=True)):
            caches[0].decode(layer, mine, q, k, v, error=errors.of(layer, len(lengths)))
    names = [f"r{number}" for number in range(len(lengths))]
    expected: dict[str, ErrorSum] = {}
    for number, step in enumerate(make_steps(config, len(lengths), 20)):
        for place, given in zip(inputs, step, strict=True):
            place.copy_(given)
        errors.begin(names)
        caches[0].advance(mine)
        graph.replay()
        told = []
        for layer, (q, k, v) in enumerate(zip(*step, strict=True)):
            told.append(caches[1].decode(layer, alike, q, k, v, return_error=True)[1])
            assert_same_bits(errors.of(layer, len(lengths)).clone(), told[-1], f"step {number}")
        errors.end()
        for place, name in enumerate(names):
            of_step = torch.stack(told)[:, place]
            if float(of_step.max()) > 0:
                one = expected.setdefault(name, ErrorSum())
                one += ErrorSum(float(of_step.mean()), float(of_step.max()), 1)
    found = taken(errors)
    assert set(found) == set(expected) and len(found) >= 2
    for name, one in expected.items():
        assert found[name].steps == one.steps
        assert found[name].worst == one.worst
        assert found[name].total == pytest.approx(one.total, rel=1e-5)

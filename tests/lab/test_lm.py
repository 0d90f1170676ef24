"""The lab's language model: its text, its training, and methods inside its forward pass."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pariskv_core as pk
import pytest
import torch
from quality import drift, engine, inside, lm, text, train
from quality.inside import Prepared, Prompt, Residency
from quality.methods import make_method
from quality.model import Model, Shape

SHAPE = Shape(
    layers=2, width=32, query_heads=4, kv_heads=2, head_dim=64, hidden=64, normed_layers=1
)
RESIDENCY = Residency(sink=4, local=16, update=8)
LENGTH, STEPS = 160, 20


@pytest.fixture(scope="module")
def model() -> Model:
    """Random, and with opinions: fresh layers would do nothing."""
    torch.manual_seed(3)
    model = Model(SHAPE)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.25)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompt(model: Model) -> Prompt:
    zone = text.held_out_zones(LENGTH + STEPS + 1)[0]
    return inside.read(model, zone.name, torch.from_numpy(zone.text.copy()).long(), LENGTH)


def run(model: Model, prompt: Prompt, name: str, rows: int) -> inside.Outcome:
    prepared = Prepared(lambda: make_method(name), prompt, RESIDENCY)
    return inside.run(model, prompt, prepared, rows, STEPS, RESIDENCY, stride=4)


def run_engine(model: Model, prompt: Prompt, **changes) -> inside.Outcome:
    config = engine.make_config(model, RESIDENCY, "cpu", threads=1, **changes)
    outcomes, _ = engine.run(model, [prompt, prompt], STEPS, config, stride=4, explain=1)
    assert torch.equal(outcomes[0].bits, outcomes[1].bits)
    return outcomes[0]


# --- Text --------------------------------------------------------------------------------------


def test_held_out_text_is_not_trained_on():
    corpus = text.training_text().tobytes()
    assert len(corpus) > 5_000_000
    for name in text.HELD_OUT:
        zones = [z for z in text.held_out_zones(2048) if z.name.startswith(f"{name}:")]
        assert zones
        for zone in zones[:: max(1, len(zones) // 8)]:
            assert zone.text.tobytes() not in corpus
            assert len(zone.text) == 2048


def test_held_out_zones_are_long_and_always_the_same():
    zones, again = text.held_out_zones(36_864), text.held_out_zones(36_864)
    assert len(zones) >= 8
    assert [zone.name for zone in zones] == [zone.name for zone in again]
    assert all((a.text == b.text).all() for a, b in zip(zones, again, strict=True))


# --- Model and training ------------------------------------------------------------------------


def test_no_byte_sees_later_bytes(model: Model):
    tokens = torch.randint(256, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] = 7
    assert torch.equal(model(tokens)[:, :25], model(changed)[:, :25])
    # In double: products with fewer rows are added up in another order on some processors.
    wide = copy.deepcopy(model).double()
    assert torch.allclose(wide(tokens, last=3), wide(tokens)[:, -3:])


def test_rotation_depends_on_distance_alone(model: Model):
    layer = model.layers[0]
    x = torch.randn(1, 2, SHAPE.width)
    q, k, _ = layer.project(x, *model.rotary(0, 2))
    near = (q[0, 1, 0] * k[0, 0, 0]).sum()
    q, k, _ = layer.project(x, *model.rotary(5000, 2))
    assert torch.isclose((q[0, 1, 0] * k[0, 0, 0]).sum(), near, rtol=1e-3)


def test_training_learns_and_comes_back(tmp_path: Path):
    plan = replace(train.TINY, seconds=1.5, dropout=0.1)
    corpus = np.frombuffer(b"def spam(eggs):\n    return eggs\n" * 400, dtype=np.uint8)
    zones = torch.from_numpy(corpus[: 4 * 192].reshape(4, 192).copy())
    model, report = train.train(plan, corpus, zones, "cpu", compiled=False)
    after = train.bits_per_byte(model, zones, 128, "cpu", scored=64)
    assert after < 6.5 < report["curve"][0]["bits_per_byte"]

    model.save(tmp_path / "model.pt")
    again = Model.load(tmp_path / "model.pt", "cpu")
    assert train.bits_per_byte(again, zones, 128, "cpu", scored=64) == pytest.approx(after, abs=0.1)


# --- Inside the forward pass -------------------------------------------------------------------


def test_blocks_are_the_engines_regions():
    config = pk.Config(
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        sink=4,
        local=16,
        update=8,
        policy=pk.ParisKV(block=0),
    )
    with pk.Cache(config) as cache:
        sequence = cache.add()
        rows = torch.ones(LENGTH, 1, 64)
        cache.prefill(0, [sequence], rows, rows)
        for step in range(30):
            cache.decode(0, [sequence], rows[:1], rows[:1], rows[:1])
            regions = cache.regions(sequence)
            assert regions.sink + regions.retrieval == RESIDENCY.zone_end(LENGTH, step)
    blocks = list(RESIDENCY.blocks(LENGTH, 30))
    assert [block for _, block in blocks] == [
        slice(0, 7), slice(7, 15), slice(15, 23), slice(23, 30)
    ]  # fmt: skip


def test_all_rows_are_full_attention(model: Model, prompt: Prompt):
    logits = model(prompt.text[None, :-1], last=STEPS)
    following = prompt.text[LENGTH + 1 : LENGTH + STEPS + 1]
    plain = torch.nn.functional.cross_entropy(logits[0], following, reduction="none") / np.log(2)
    full = run(model, prompt, "full", 8)
    assert torch.allclose(full.bits, plain, atol=0.3, rtol=0.05)
    assert full.bits.mean().item() == pytest.approx(plain.mean().item(), rel=0.01)
    assert not full.heads
    for every in (run(model, prompt, "oracle", LENGTH), run_engine(model, prompt, top_k=LENGTH)):
        assert torch.allclose(every.bits, full.bits, atol=0.3, rtol=0.05)


def test_a_budget_costs_and_the_oracle_is_its_own_measure(model: Model, prompt: Prompt):
    oracle, window = run(model, prompt, "oracle", 8), run(model, prompt, "window", 8)
    assert len(oracle.heads) == SHAPE.layers * SHAPE.kv_heads
    for best, worse in zip(oracle.heads, window.heads, strict=True):
        assert torch.allclose(best.share(), torch.ones(STEPS // 4))
        assert torch.allclose(best.recall, torch.ones(STEPS // 4))
        assert worse.share().mean() < 0.9


def test_the_engine_equals_its_torch_copy(model: Model, prompt: Prompt):
    ratio = [(0, 0.25, 0.2)]
    ours = run_engine(model, prompt, top_k=8, scorer="votes", schedule=ratio)
    options = {"scorer": "votes", "candidates": 0.25}
    prepared = Prepared(lambda: make_method("paris", **options), prompt, RESIDENCY)
    copy = inside.run(model, prompt, prepared, 8, STEPS, RESIDENCY, stride=4)
    for a, b in zip(ours.heads, copy.heads, strict=True):
        assert a.share().mean().item() == pytest.approx(b.share().mean().item(), abs=0.05)
    assert ours.bits.mean().item() == pytest.approx(copy.bits.mean().item(), rel=0.03)


def test_drift_follows_generated_text(model: Model, prompt: Prompt):
    config = engine.make_config(model, RESIDENCY, "cpu", top_k=8, threads=1)
    steps = inside.measured_steps(40, 4)
    made = drift.write(model, [prompt], 40, config, steps, say=lambda line: None)
    again = drift.write(model, [prompt], 40, config, steps, say=lambda line: None)
    assert torch.equal(made.text, again.text)
    assert {choice.zone_end for choice in made.choices[0][0]} == {
        RESIDENCY.zone_end(LENGTH, step) for step in steps
    }
    makers = {name: maker for name, maker in lm.DRIFTING.items() if name != "MagicPIG"}
    found = drift.drift(model, [prompt], made, makers, 8, RESIDENCY, say=lambda line: None)
    assert found["oracle"]["share"] == pytest.approx([1.0])
    assert found["pariskv_core"]["share"][0] > found["SnapKV"]["share"][0]
    assert set(found) == {"pariskv_core", *makers}


def test_the_evaluation_writes_every_section(model: Model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lm, "PEERS", {"Quest": lm.PEERS["Quest"]})
    monkeypatch.setattr(lm, "DRIFTING", {"oracle": lm.DRIFTING["oracle"]})
    settings = replace(lm.QUICK, prompt=256, steps=24, written=64, budgets=(8,), ratios=(0.05,))
    lm.Evaluation(model, "cpu", settings, tmp_path / "results.json").run()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["errors"] == {}
    assert results["methods"]["oracle"]["8"]["share"] == pytest.approx(1.0)
    assert results["engine"]["default, 100 rows"]["prompts"] == 2
    assert results["over"]["oracle, 8"]["oracle"]["more"] == 0
    assert results["drift"]["oracle"]["lost"] == pytest.approx(0.0, abs=1e-6)


def test_a_failing_section_leaves_the_rest_running(model: Model, tmp_path: Path):
    evaluation = lm.Evaluation(model, "cpu", lm.QUICK, tmp_path / "results.json")

    def fails() -> None:
        raise RuntimeError("no")

    evaluation.section("one", fails)
    assert "RuntimeError: no" in evaluation.results["errors"]["one"]
    assert (tmp_path / "results.json").exists()

"""Where a step looked, against the model's own attention; the demo's model part on a tiny model."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pariskv_core as pk
import pytest
import torch
from pariskv_core.cli import model_demo, models, weights
from pariskv_core.cli.document import FACTS, with_facts
from pariskv_core.cli.errors import Errors, Watched
from pariskv_core.cli.generate import Pieces
from pariskv_core.cli.look import Layer, Look, look
from pariskv_core.cli.models import Loaded
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.sparse_run import Run
from pariskv_core.cli.strip import strip
from pariskv_core.cli.verify import compare
from pariskv_core.transformers.versions import CACHE
from transformers import DynamicCache


@pytest.fixture(scope="module")
def loaded(model: Path) -> Loaded:
    return models.load(argparse.Namespace(model=str(model), threads=1, device="cpu"))


def watched(loaded: Loaded, text: str, **settings: object) -> tuple[Run, torch.Tensor]:
    ids = loaded.ids(text)
    run = Run.start(loaded, threads=1, **settings)
    run.watch()
    run.forward(ids[:, :-1])
    run.forward(ids[:, -1:])
    return run, ids


def test_the_mass_is_the_models_own_attention(loaded: Loaded, long_text: Path):
    run, ids = watched(loaded, long_text.read_text()[:4600])
    seen = look(run)
    assert seen.searched
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], **{CACHE: cache}, logits_to_keep=1)
        weights = model(ids[:, -1:], **{CACHE: cache}, output_attentions=True).attentions
    for layer, expected in zip(seen.layers, weights, strict=True):
        grouped = expected[0, :, 0].view(2, 2, -1).mean(dim=1)
        # The second layer's query has gone through attention that was estimated.
        tolerance = 1e-5 if layer.layer == 0 else 0.05
        assert np.abs(layer.mass - grouped.numpy()).max() < tolerance
        assert np.allclose(layer.mass.sum(axis=1), 1, atol=1e-4)


def test_the_error_of_a_step_is_predicted(loaded: Loaded, long_text: Path):
    def error_with(top_k: int) -> Errors:
        policy = pk.ParisKV(top_k=top_k, tail="sample", tail_rows=64)
        run, _ = watched(loaded, long_text.read_text()[:4800], policy=policy)
        found = look(run).errors
        assert found is not None
        return found

    few, all_that_matter = error_with(16), error_with(200)
    assert few.true > 1e-4 and 0.2 < few.predicted / few.true < 5
    assert all_that_matter.predicted < 1e-5 and all_that_matter.true < 1e-5


def test_errors_of_steps_are_those_of_their_outputs(loaded: Loaded, long_text: Path):
    """By hand, from all rows at every step; and watching is no search."""
    policy = pk.ParisKV(top_k=16, tail="sample", tail_rows=64)
    run, ids = watched(loaded, long_text.read_text()[:4600], policy=policy)
    together, parts, engine = Watched(), [], run.engine
    for step in range(3):
        if step > 0:
            run.forward(ids[:, step : step + 1])
        before = engine.stats().searched_tokens
        together.add(run)
        assert engine.stats().searched_tokens == before
        for query in run.queries.values():
            place = query.engine_layer, run.sequence
            v = engine.read(*place, 0, engine.length(run.sequence))[1]
            v = torch.from_dlpack(v).double()
            spread = (v - v.mean(dim=0)).square().mean(dim=(0, 2)).sqrt()
            options = query.logits.options()
            arguments = (place[0], [place[1]], query.rows[None])
            full = engine.attend(*arguments, **options)[0].double()
            out, error = engine.decode(*arguments, return_error=True, **options)
            assert torch.equal(out[0], query.out)
            off = (query.out.double() - full).view(2, -1).square().mean(dim=1).sqrt() / spread
            parts.append(torch.stack([error[0].double(), off], dim=1))
    found = together.tally.together()
    assert found is not None and found.searches == 3 * 2 * 2
    expected = torch.cat(parts).square().mean(dim=0).sqrt()
    assert [found.predicted, found.true] == pytest.approx(expected.tolist(), rel=1e-4)


def test_policies_that_predict_nothing_have_no_errors(loaded: Loaded, long_text: Path):
    for policy in (pk.ParisKV(top_k=16, tail="none"), pk.HardKV(most=64)):
        run, _ = watched(loaded, long_text.read_text()[:4600], policy=policy)
        seen = look(run)
        assert seen.errors is None


def test_a_text_that_is_not_searched_selects_nothing(loaded: Loaded):
    run, _ = watched(loaded, "Hello there.")
    seen = look(run)
    assert not seen.searched and seen.searches == 0
    assert seen.shares() == pytest.approx({"resident": 1, "selected": 0, "elsewhere": 0}, abs=1e-5)
    assert seen.passages(3) == []
    assert seen.errors is None


def some_look() -> Look:
    """100 tokens, a zone of [4, 90), two kv heads; most of the mass at 50."""
    mass = np.full((2, 100), 0.001, np.float32)
    mass[:, 50], mass[:, 0] = 0.5, 0.402
    selected = np.array([[50, 20], [50, -1]])
    return Look(100, [Layer(0, True, (4, 90), selected, mass)])


def test_shares_add_up():
    shares = some_look().shares()
    assert shares["selected"] == pytest.approx((0.501 + 0.5) / 2)
    assert shares["resident"] == pytest.approx(0.402 + 13 * 0.001)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)


def test_shares_are_of_rows_where_a_models_sinks_take_a_part():
    seen = some_look()
    whole = seen.shares()
    seen.layers[0].mass *= 0.5
    assert seen.shares() == pytest.approx(whole)


def test_a_prompt_is_a_turn_of_a_chat_unless_it_is_raw(loaded: Loaded):
    tokenizer = loaded.tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}:"
    try:
        said = [tokenizer.decode(loaded.prompt_ids("Hi", raw=raw)[0]) for raw in (False, True)]
    finally:
        tokenizer.chat_template = None
    assert said == ["<Hi>:", "Hi"]


def test_passages_begin_with_the_hottest_and_do_not_overlap():
    first, second = some_look().passages(5)
    assert (first.hottest, first.selected) == (50, 2)
    assert (second.hottest, second.selected) == (20, 1)
    assert second.end <= first.begin


def test_bins_keep_the_sum():
    seen = some_look()
    for width in (1, 7, 100, 300):
        bins = seen.bins(seen.selected, width)
        assert len(bins) == min(width, 100)
        assert bins.sum() == 3


def test_a_strip_shows_the_most_and_all_that_is_not_nothing():
    assert strip([0, 1e-9, 0.5, 1], "utf-8") == " ▁▄█"
    assert strip([0, 1e-9, 0.5, 1], "ascii") == " .=@"
    assert strip([0, 0], "utf-8") == "  "


def test_pieces_wait_for_whole_characters(loaded: Loaded):
    tokens = loaded.ids("aé!")[0].tolist()
    assert len(tokens) == 4
    pieces = Pieces(loaded.tokenizer)
    assert [pieces.add(token) for token in tokens] == ["a", "", "é", "!"]
    assert pieces.text == "aé!"


def test_a_step_that_differs_is_told_from_a_tie():
    sure = torch.tensor([5.0, 1.0, 0.0])
    other = torch.tensor([1.0, 5.0, 0.0])
    close = torch.tensor([5.0, 5.0 - 1e-6, 0.0])
    found = compare([sure, sure, close], [sure, other, other], 1e-6, 9)
    assert (found.same, found.ties, found.first_other) == (1, 1, 1)
    assert not found.equal
    assert found.kl_worst > 1
    assert found.largest_difference == 4
    same = compare([sure], [sure], 1e-6, 0)
    assert same.equal and same.kl_mean == 0


def test_facts_are_planted_once_and_in_order():
    text = with_facts(7000, lambda part: len(part) // 4)
    places = [text.index(f"{fact.begin} {fact.answer}.") for fact in FACTS]
    assert places == sorted(places)
    for fact in FACTS:
        assert text.count(fact.answer) == 1


def test_the_model_part_asks_both_and_shows_the_fact(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With all rows selected both give the same answers, such as they are."""
    monkeypatch.setattr(weights, "fetch", lambda pinned, **_: model)
    found, problems = model_demo.run(1, 3000, Screen(), tokens=2300)
    assert problems == []
    assert len(found["answers"]) == len(FACTS)
    assert all(answer["answer"] == answer["full_answer"] for answer in found["answers"])
    text = with_facts(2300, len)
    for answer in found["answers"]:
        assert text[answer["position"] :].lstrip().startswith(answer["expected"])
    out = capsys.readouterr().out
    assert "0 of 6 facts found, 0 with full attention; 6 answers are the same" in out
    assert out.count("full attention  ✗") == 6


def test_an_encoding_without_blocks_gets_letters(monkeypatch: pytest.MonkeyPatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    from pariskv_core.cli import main

    plan = "plan --layers 2 --kv-heads 2 --head-dim 64 --context 8192 --device cpu --memory 1GB"
    assert main(plan.split()) == 0
    out.flush()
    assert b"It fits." in out.buffer.getvalue()

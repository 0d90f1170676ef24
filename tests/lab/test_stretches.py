"""Drift, another text's balance, long zones and policies, on captures made up here."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

import harness
import numpy as np
import pytest
import torch
from gguf_files import gguf_file
from pariskv_core.cli.weights import MODELS
from quality import __main__ as program
from quality import sources
from quality.pretrained import capture, policies, prefilter, shares, stretches
from quality.pretrained.capture import Capture, Layer, Manifest, Stretch

TOKENS = 1600
WEIGHTS = MODELS["smollm2"]


def track(items, what):
    return items


@pytest.fixture
def make_all(rng, tmp_path, monkeypatch):
    """Gives a capture of one layer for each stretch, with keys of its own."""
    asked = []

    def make(weights, wanted, cache=None):
        made = []
        for stretch in wanted:
            asked.append(stretch)
            folder = tmp_path / f"{len(asked)}"
            count = len(stretch.measured)
            keys = rng.standard_normal((stretch.tokens, 2, 64), np.float32)
            near = keys[rng.integers(4, 500, (count, 40))].sum(axis=1) / 4
            queries = np.repeat(near, 3, axis=1) + rng.standard_normal((count, 6, 64))
            early, recent = rng.standard_normal((512, 6, 64)), queries[:8]
            rows = (keys, queries, recent, early)
            layer = Layer(*(torch.from_numpy(part).half() for part in rows))
            facts = {"model": "Tiny Q4", "packages": [], "sha256": "", "text": stretch.text}
            facts |= {"text_sha256": "0", "python": "", "tokens": stretch.tokens, "layers": [0]}
            known = Manifest(**facts, positions=stretch.measured, recent=[])
            capture.save(folder, known, {0: layer})
            made.append(Capture(folder))
        return made

    for module in (stretches, policies, prefilter):
        monkeypatch.setattr(module, "make_all", make)
    monkeypatch.setattr(stretches, "WRITTEN", 600)
    monkeypatch.setattr(stretches, "LENGTH", TOKENS)
    monkeypatch.setattr(stretches, "COUNTS", (1, 2))
    monkeypatch.setattr(stretches, "_OF_DOCUMENTATION", 1)
    monkeypatch.setattr(policies, "BUDGETS", (64, 128))
    return make


@pytest.fixture
def weights():
    return replace(WEIGHTS, tokens=TOKENS)


def test_a_stretch_begins_within_a_text(tmp_path, monkeypatch):
    """Its keys are those of a text of its own, for positions count from its first token."""
    pytest.importorskip("transformers", reason="needs the extra pariskv_core[models]")
    path = tmp_path / "weights/tiny.gguf"
    path.parent.mkdir()
    gguf_file(path)
    whole = path.read_bytes()
    pinned = replace(
        WEIGHTS, name="tiny", size=len(whole), sha256=hashlib.sha256(whole).hexdigest()
    )
    text = "".join(f"{i} is a number. " for i in range(300))
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: text)
    stretch = Stretch("documentation", 1200, 10, positions=(700, 1000), layers=1)
    (made,) = capture.make_all(pinned, [stretch], tmp_path)
    assert made.manifest.layers == [0] and made.manifest.skip == 10
    assert made.layer(0).queries.shape == (2, 4, 8)
    assert made.folder.name == "tiny-documentation-1200-from10-at700-1layers"
    # The tokens of this tokenizer are bytes, after one that begins a text.
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: text[9:])
    own = capture.make(pinned, "documentation", 1201, tmp_path).layer(0).keys
    assert not torch.equal(made.layer(0).keys, own[:1200])  # turned by one position more
    torch.testing.assert_close(
        made.layer(0).keys.norm(dim=2), own[1:].norm(dim=2), atol=0.02, rtol=0.01
    )


def test_half_of_the_queries_are_asked_at_each_end_of_what_is_written():
    positions = stretches.while_writing(8192)
    begin, half = 8192 - stretches.WRITTEN, capture.MEASURED // 2
    assert len(set(positions)) == capture.MEASURED and list(positions) == sorted(positions)
    assert begin <= positions[0] and positions[half - 1] < begin + 512
    assert positions[half] >= 8192 - 512 and positions[-1] < 8192


def test_choices_while_writing_are_those_of_a_zone_that_grows(make_all, weights):
    (taken,) = make_all(weights, [Stretch("code", TOKENS, positions=(1010, 1590))])
    layer = taken.layer(0)
    choices = stretches.decoded(layer, (1010, 1590), 600, {"schedule": [(0, 1.0, 0.2)]})
    assert [choice.step for choice in choices] == [10, 590]
    # Six hundred tokens after a prompt of 1,000: one flush of 512. Zones end at whole blocks.
    assert choices[1].zone_end - choices[0].zone_end == 512
    assert choices[0].zone_end % 64 == choices[1].zone_end % 64 == 0
    keys = layer.keys[4 : choices[0].zone_end, 0].float()
    logits = (layer.queries[0, :3].float() @ keys.T / 8).softmax(-1).mean(0)
    best = set(logits.topk(100).indices.tolist())
    assert len(best & set(choices[0].rows[0].tolist())) > 80


def test_shares_of_what_was_written_are_held_against_those_at_the_beginning(make_all, weights):
    found = stretches.written(weights, track)
    assert found["written"] == 600 and set(found["methods"]) == set(stretches.SETTINGS)
    for at in found["methods"].values():
        assert 0.5 < at["share_last"] <= 1.001 and 0.5 < at["share_first"] <= 1.001
        assert at["lost"] == pytest.approx(at["share_first"] - at["share_last"])


def test_another_texts_opening_sets_the_balance(make_all, weights):
    own, other = (one.layer(0) for one in make_all(weights, [Stretch("code", TOKENS)] * 2))
    mixed = stretches.with_opening_of(own, other)
    assert torch.equal(mixed.keys[:512], other.keys[:512])
    assert torch.equal(mixed.keys[512:], own.keys[512:]) and torch.equal(mixed.early, other.early)
    found = stretches.balance(weights, track)["cases"]
    names = {f"{text}, {whose}" for text in ("documentation", "code") for whose in ("its own",)}
    assert names < set(found) and len(found) == 4
    for methods in found.values():
        assert methods["block 64"]["share"] > 0.9


def test_stretches_of_text_become_one_zone(make_all, weights):
    found = stretches.lengths(weights, track)["lengths"]
    assert list(found) == ["1600", "3200"]
    for methods in found.values():
        assert methods["block 64, all keys"]["share"] > 0.98
        assert methods["block 64, all keys"]["share"] > methods["block 64, 2 %"]["share"]
    layers = [one.layer(0) for one in make_all(weights, stretches.stretches(None))]
    whole = stretches.joined(layers)
    assert torch.equal(whole.keys[:TOKENS], layers[0].keys)
    assert torch.equal(whole.early, layers[0].early)
    assert torch.equal(whole.queries, layers[1].queries)


def test_the_oldest_stretches_come_first_and_all_differ():
    every = stretches.stretches(layers=3)
    assert len(set(every)) == len(every) == max(stretches.COUNTS)
    assert every[0].text == "code" and every[-1].text == "documentation"
    assert every[-1].skip == 11 * stretches.LENGTH


def test_policies_are_held_against_the_best_rows_of_the_same_mean_number(make_all, weights):
    found = policies.policies(weights, track)
    assert set(found["soon"]) == set(found["all"])
    for of in (found["soon"], found["all"]):
        for by_rows in of.values():
            assert list(by_rows) == ["64", "128"]
        assert of["block 64"]["128"]["share"] > 0.9 > of["PRKV, static 1"]["128"]["share"]
    for kind, by_rows in found["counts"].items():
        for rows, (fewest, most, mean) in by_rows.items():
            assert fewest <= mean <= int(rows) and most >= mean
            assert kind != "fixed" or fewest == most == int(rows)
            assert kind != "Top-p, limited" or most <= policies.AT_MOST * int(rows)


@pytest.fixture
def losses(make_all, weights, monkeypatch):
    """What rules lose in two choices after the first, by part of the pages."""
    monkeypatch.setattr(prefilter, "BUDGET", 128)
    monkeypatch.setattr(prefilter, "CHOICES", 2)
    monkeypatch.setattr(prefilter, "PARTS", {"0": 0.0, "1/4": 0.25, "1/2": 0.5, "1": 1.0})
    return prefilter.prefilter(weights, track)["lengths"][str(TOKENS)]["shares"]


@pytest.mark.parametrize("rank", [*prefilter.RANKS, "best"])
def test_a_choice_from_more_pages_loses_less(losses, rank):
    for more in ("", ", remembers"):
        parts = [losses[f"{rank}{more}, {part}, 0.5, now"] for part in ("0", "1/4", "1/2", "1")]
        assert parts == sorted(parts, reverse=True) and parts[-1] == 0


def test_a_choice_that_remembers_loses_less(losses):
    for rank in (*prefilter.RANKS, "best"):
        alone, more = (losses[f"{rank}{how}, 1/4, 0.5, now"] for how in ("", ", remembers"))
        assert more < alone
    assert losses["mean, softmax, remembers, 0, 0.5, now"] < losses["as before, 0.5, now"]


def test_no_digest_finds_better_pages_than_the_best(losses):
    best = losses["best, 1/4, 0.5, now"]
    of_whole_pages = [rank for rank in prefilter.RANKS if not rank.startswith("of 8")]
    assert all(best <= losses[f"{rank}, 1/4, 0.5, now"] for rank in of_whole_pages)


def test_only_rows_of_the_best_pages_are_looked_at():
    zone = 3 * prefilter.PAGE + 1
    seen = prefilter.looked_at(torch.tensor([1, 0, 2]), 0.4, zone)
    first = prefilter.PAGE
    assert seen.nonzero()[:, 0].tolist() == [*range(first, 2 * first), zone - 1]


def test_pages_beside_kept_rows_are_found_without_them(monkeypatch):
    monkeypatch.setattr(prefilter, "BUDGET", 2 * prefilter.PAGE)
    page = prefilter.PAGE
    keys = torch.zeros(3 * page + 1, 2)
    keys[:page], keys[-page - 1 :] = 5, 1
    attention = torch.tensor([0.5] * page + [0.2] * page + [0.3] * page + [0.0]) / page
    queries = torch.ones(1, 1, 2)
    choice = prefilter.choice_of(keys, queries, queries)
    choice.attention = attention[None]
    assert prefilter.with_pages(choice, torch.arange(page)) == pytest.approx(0.8)


def test_the_command_keeps_what_was_measured_before(make_all, tmp_path, monkeypatch):
    for module in (harness, sources):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    for name in ("smollm2", "gemma-270m"):
        monkeypatch.setitem(MODELS, name, replace(MODELS[name], tokens=TOKENS))
        words = ["quality", "keys", "--model", name, "--parts", "balance", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", words)
        program.main()
    record = json.loads((tmp_path / "quality-keys-cpu.json").read_text())
    assert list(record["results"]) == ["balance"]
    assert list(record["results"]["balance"]) == ["smollm2", "gemma-270m"]


def test_some_methods_are_measured_anew_and_others_stay(make_all, tmp_path, monkeypatch, weights):
    for module in (harness, sources):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (taken,) = make_all(weights, [Stretch("documentation", TOKENS)])
    monkeypatch.setattr(capture, "make", lambda *_, **__: taken)
    monkeypatch.setattr(shares, "METHODS", {n: shares.METHODS[n] for n in ("Quest", "ArkVale")})
    for name in ("Quest", "ArkVale"):
        words = ["quality", "models", "--tokens", "1600", "--threads", "1", "--only", name]
        monkeypatch.setattr(sys, "argv", words)
        program.main()
    (found,) = json.loads((tmp_path / "quality-models-cpu.json").read_text())["results"].values()
    assert list(found["methods"]) == ["Quest", "ArkVale"]

"""Long zones and policies that keep rows, on captures made up here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pariskv_core.cli.weights import MODELS
from quality import __main__ as program
from quality.pretrained import capture, lengths, policies, while_writing
from quality.pretrained.capture import Capture, Layer, Manifest, Stretch
from tiny_models import gguf_file

TOKENS = 1984
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

    for module in (lengths, policies, while_writing):
        monkeypatch.setattr(module, "make_all", make)
    monkeypatch.setattr(while_writing, "WRITTEN", 1200)
    monkeypatch.setattr(while_writing, "LENGTH", 2800)
    monkeypatch.setattr(lengths, "LENGTH", TOKENS)
    monkeypatch.setattr(lengths, "COUNTS", (1, 2))
    monkeypatch.setattr(lengths, "_OF_DOCUMENTATION", 1)
    monkeypatch.setattr(policies, "BUDGETS", (64, 128))
    return make


@pytest.fixture
def weights():
    return replace(WEIGHTS, tokens=TOKENS)


def test_a_stretch_begins_within_a_text(transformers, tmp_path, monkeypatch):
    """Its keys are those of a text of its own, for positions count from its first token."""
    path = tmp_path / "weights/tiny.gguf"
    path.parent.mkdir()
    gguf_file(path)
    whole = path.read_bytes()
    pinned = replace(
        WEIGHTS, name="tiny", size=len(whole), sha256=hashlib.sha256(whole).hexdigest()
    )
    text = "".join(f"{i} is a number. " for i in range(300))
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: text)
    stretch = Stretch("documentation", 1200, 10, layers=1)
    (made,) = capture.make_all(pinned, [stretch], tmp_path)
    assert made.manifest.layers == [0] and made.manifest.skip == 10
    assert made.layer(0).queries.shape == (capture.MEASURED, 4, 8)
    assert made.folder.name == "tiny-documentation-1200-from10-1layers"
    # The tokens of this tokenizer are bytes, after one that begins a text.
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: text[9:])
    own = capture.make(pinned, "documentation", 1201, tmp_path).layer(0).keys
    assert not torch.equal(made.layer(0).keys, own[:1200])  # turned by one position more
    torch.testing.assert_close(
        made.layer(0).keys.norm(dim=2), own[1:].norm(dim=2), atol=0.02, rtol=0.01
    )


def test_half_of_the_queries_are_asked_at_each_end_of_what_is_written():
    positions = while_writing.ends(8192, 4096)
    half = capture.MEASURED // 2
    assert len(set(positions)) == capture.MEASURED and list(positions) == sorted(positions)
    assert positions[0] >= 4096 and positions[half - 1] < 4096 + 512
    assert positions[half] >= 8192 - 512 and positions[-1] < 8192


def test_choices_while_writing_are_those_of_a_zone_that_grows(make_all, weights):
    (taken,) = make_all(weights, [Stretch("code", TOKENS, positions=(1394, 1974))])
    found = while_writing.decoded(
        taken.layer(0), (1394, 1974), 600, {"schedule": [(0, 1.0, 0.2)], "tail": "none"}
    )
    assert [len(heads) for heads in found] == [2, 2]
    # All keys are reranked: all that is missed is by their 4-bit estimates.
    assert all(head.share().item() > 0.97 for heads in found for head in heads)
    few = while_writing.while_writing(weights, track)["methods"]
    assert list(few) == list(while_writing.SETTINGS)
    for ends in few.values():
        assert all(0.5 < at["share"] <= 1.001 for at in ends.values())


def test_stretches_of_text_become_one_zone(make_all, weights):
    found = lengths.lengths(weights, track)["lengths"]
    assert list(found) == [str(TOKENS), str(2 * TOKENS)]
    for methods in found.values():
        assert methods["all keys"]["share"] > 0.98
        assert methods["all keys"]["share"] > methods["2 %"]["share"]
    layers = [one.layer(0) for one in make_all(weights, lengths.stretches(None))]
    whole = lengths.joined(layers)
    assert torch.equal(whole.keys[:TOKENS], layers[0].keys)
    assert torch.equal(whole.early, layers[0].early)
    assert torch.equal(whole.queries, layers[1].queries)


def test_the_oldest_stretches_come_first_and_all_differ():
    every = lengths.stretches(layers=3)
    assert len(set(every)) == len(every) == max(lengths.COUNTS)
    assert every[0].text == "code" and every[-1].text == "documentation"
    assert every[-1].skip == 11 * lengths.LENGTH


def test_policies_are_held_against_the_best_rows_of_the_same_mean_number(make_all, weights):
    found = policies.policies(weights, track)
    assert set(found["soon"]) == set(found["all"])
    for of in (found["soon"], found["all"]):
        for by_rows in of.values():
            assert list(by_rows) == ["64", "128"]
        assert of["block 64"]["128"]["share"] > 0.9 > of["PRKV, S = 1"]["128"]["share"]
    for kind, by_rows in found["counts"].items():
        for rows, (fewest, most, mean) in by_rows.items():
            assert fewest <= mean <= int(rows) and most >= mean
            assert kind != "one count" or fewest == most == int(rows)
            assert not kind.endswith("twice the mean") or most <= policies.AT_MOST * int(rows)


def test_the_command_keeps_what_was_measured_before(make_all, results, monkeypatch):
    for name in ("smollm2", "gemma-270m"):
        monkeypatch.setitem(MODELS, name, replace(MODELS[name], tokens=TOKENS))
        program.main(["keys", "--model", name, "--parts", "lengths", "--threads", "1"])
    record = json.loads((results / "quality-keys-cpu.json").read_text())
    assert list(record["results"]) == ["lengths"]
    assert list(record["results"]["lengths"]) == ["smollm2", "gemma-270m"]

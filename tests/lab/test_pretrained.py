"""Pretrained models in the lab: texts, captures, shares. Nothing here is downloaded."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pariskv_core.cli.weights import MODELS, Part, Unusable, Weights
from pariskv_core.transformers.versions import CACHE
from quality import __main__ as program
from quality.measures import Quality
from quality.methods import logits_of
from quality.pretrained import capture, shares, texts
from quality.pretrained.capture import Capture, Layer, Manifest
from quality.regions import Residency
from tiny_models import gguf_file, tiny_model

TOKENS = 1984


TINY = Weights(
    name="tiny",
    model="Tiny",
    licence="none",
    parts=(Part("tiny-1", "1.0", "tiny/1.bin"),),
    size=10_240,
    sha256=hashlib.sha256(b"tiny").hexdigest(),
    tokens=TOKENS,
)

# --- Texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", texts.TEXTS)
def test_texts_are_long_plain_and_always_the_same(name):
    text = texts.TEXTS[name]()
    assert len(text) > 250_000 and "\0" not in text
    assert texts.TEXTS[name]() == text


# --- Captures ------------------------------------------------------------------------------------


def manifest(**changes) -> Manifest:
    fields = {
        "model": "Tiny",
        "packages": ["tiny-1==1.0"],
        "sha256": TINY.sha256,
        "text": "documentation",
        "text_sha256": "0" * 64,
        "python": "3.11.7",
        "tokens": TOKENS,
        "layers": [0, 3],
        "positions": capture.late_positions(TOKENS),
        "recent": [1000, 1001],
    }
    return Manifest(**{**fields, **changes})


@pytest.fixture
def synthetic(rng, tmp_path) -> Capture:
    """Two layers; each query is close to some of the keys."""
    layers = {}
    for index in (0, 3):
        keys = rng.standard_normal((TOKENS, 2, 64), np.float32)
        near = keys[rng.integers(4, 700, (capture.MEASURED, 40))].sum(axis=1) / 4
        queries = np.repeat(near, 3, axis=1) + rng.standard_normal((capture.MEASURED, 6, 64))
        early = rng.standard_normal((capture.EARLY, 6, 64))
        rows = (keys, queries, queries[:2], early)
        layers[index] = Layer(*(torch.from_numpy(part).half() for part in rows))
    folder = tmp_path / "captures" / "tiny"
    capture.save(folder, manifest(), layers)
    return Capture(folder)


def test_captures_are_read_as_they_were_written(synthetic, tmp_path):
    assert synthetic.manifest == manifest()
    layers = dict(synthetic.layers())
    capture.save(tmp_path / "again", synthetic.manifest, layers)
    for index, layer in Capture(tmp_path / "again").layers():
        assert all(torch.equal(rows, vars(layers[index])[n]) for n, rows in vars(layer).items())


def test_measured_queries_all_see_one_zone():
    positions = capture.late_positions(8192)
    assert len(set(positions)) == capture.MEASURED
    begin = 8192 - capture.LATE
    residency = Residency()
    ends = {residency.zone_end(begin, position - begin) for position in positions}
    assert ends == {residency.zone_end(begin, -1)}
    assert min(positions) >= begin and max(positions) < 8192


def config(**changes) -> SimpleNamespace:
    fields = {"num_hidden_layers": 24, "head_dim": 128, "num_attention_heads": 12}
    return SimpleNamespace(**{**fields, "num_key_value_heads": 2, **changes})


@pytest.mark.parametrize("tokens", [8192, 16_384, 32_768])
def test_chosen_layers_fit_what_may_travel(tokens):
    layers = capture.chosen_layers(config(), tokens)
    assert 2 * tokens * 2 * 128 * len(layers) < capture.MOST_BYTES
    assert layers[0] == 0 and len(layers) >= 3


def test_layers_with_a_sliding_window_are_left_out():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert capture.chosen_layers(config(num_hidden_layers=6, layer_types=kinds), 8192) == [2, 5]


def test_keys_beyond_float16_are_refused():
    with pytest.raises(Unusable, match="does not fit into float16"):
        capture.half(torch.tensor([1e5]))


def test_too_few_tokens_are_refused_before_anything_is_fetched(tmp_path):
    with pytest.raises(Unusable, match="1000 tokens are too few"):
        capture.make(TINY, "documentation", 1000, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(Unusable, match=r"accelerate is missing; pip install '\.\[models\]'"):
        capture.load_transformers()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3"])
def test_captures_are_what_the_models_attention_sees(transformers, family):
    """Keys are those of the model's cache; queries give the attention that the model reports."""
    model = tiny_model(transformers, family, vocab_size=50)
    ids = torch.randint(50, (40,))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(ids[None], use_cache=True, output_attentions=True)
    layers = capture.chosen_layers(model.config, 40)
    assert layers == ([1, 2] if family == "Gemma3" else [0, 1, 2])

    positions = [30, 39]
    found = capture.record(model, ids, capture.Recorder(layers, positions, [28, 29]))
    assert list(found) == layers
    for index, layer in found.items():
        keys = told[CACHE].layers[index].keys[0].transpose(0, 1)
        torch.testing.assert_close(layer.keys.float(), keys, atol=2e-3, rtol=2e-3)
        for head in range(4):
            logits = logits_of(layer.queries[:, head, None].float(), keys[:, head // 2])[:, 0]
            logits[0, positions[0] + 1 :] = -torch.inf
            attention = told.attentions[index][0, head, positions]
            torch.testing.assert_close(logits.softmax(-1), attention, atol=5e-3, rtol=0)


def test_a_capture_of_a_gguf_file_is_made_once(transformers, tmp_path, monkeypatch):
    path = tmp_path / "weights/tiny.gguf"
    path.parent.mkdir()
    gguf_file(path)
    whole = path.read_bytes()
    pinned = replace(TINY, size=len(whole), sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: "Plain words. " * 200)
    made = capture.make(pinned, "documentation", TOKENS, tmp_path)
    assert made.manifest.layers == [0, 1]
    assert made.manifest.text_sha256 == hashlib.sha256(b"Plain words. " * 200).hexdigest()
    layer = made.layer(1)
    assert layer.keys.shape == (TOKENS, 2, 8)
    assert layer.queries.shape == (capture.MEASURED, 4, 8)
    assert layer.recent.shape == (capture.RECENT, 4, 8)
    assert layer.early.shape == (capture.EARLY, 4, 8)
    monkeypatch.setattr(capture, "record", None)  # is not called again
    again = capture.make(pinned, "documentation", TOKENS, tmp_path)
    assert again.manifest == made.manifest
    monkeypatch.setitem(capture.TEXTS, "documentation", lambda: "Other words. " * 200)
    with pytest.raises(TypeError, match="not callable"):  # it is, for another text
        capture.make(pinned, "documentation", TOKENS, tmp_path)
    with pytest.raises(Unusable, match=r"has 2,6\d\d tokens for this model, not 4,000"):
        capture.make(pinned, "documentation", 4000, tmp_path)


# --- Shares --------------------------------------------------------------------------------------

FEW = {
    "oracle": shares.peer("oracle"),
    "whole keys, all of them": shares.engine(1.0, block=0),
    "whole keys": shares.METHODS["whole keys"],
    "whole keys, 5 %": shares.METHODS["whole keys, 5 %"],
}


def test_shares_on_a_capture_are_in_order(synthetic):
    found = shares.of_capture(synthetic, lambda items, what: items, FEW)
    methods = found["methods"]
    assert all(number == 1 for number in methods["oracle"].values())
    order = [methods[name]["share"] for name in FEW]
    assert order == sorted(order, reverse=True)
    assert order[1] > 0.99 > order[3] > 0.5
    for numbers in methods.values():
        assert numbers["worst_head"] <= numbers["median"] <= 1.01
    assert found["zone"] == TOKENS - capture.LATE - 256 - 4
    assert 0 < found["mass_of_best_100"] < 1
    assert found["energy_in_mean"] < 0.01  # these keys have none


def test_block_means_find_rows_that_a_loud_mean_hides(synthetic, tmp_path):
    layers = dict(synthetic.layers())
    for layer in layers.values():
        layer.keys[:, :, 7] += 60
        for queries in (layer.queries, layer.early):
            queries[:, :, 7] /= 16
    capture.save(tmp_path / "loud", synthetic.manifest, layers)
    names = ("whole keys, 5 %", "block 64, 5 %", "block 64, all keys")
    some = {name: shares.METHODS[name] for name in names}
    found = shares.of_capture(Capture(tmp_path / "loud"), lambda items, what: items, some)
    whole, block, ceiling = (found["methods"][name]["share"] for name in names)
    assert block > whole + 0.1 and ceiling > 0.98


def test_a_zone_that_the_engine_does_not_have_is_an_error(synthetic):
    layer = synthetic.layer(0)
    positions = torch.tensor(synthetic.manifest.positions)
    with pytest.raises(RuntimeError, match="another zone than the one that is measured"):
        shares.of_layer(layer, positions, slice(4, 800), FEW)


def test_a_mean_in_the_keys_is_reported(synthetic, tmp_path):
    layers = dict(synthetic.layers())
    for layer in layers.values():
        layer.keys[:, 0] += 3  # nine times the energy of what varies
    capture.save(tmp_path / "shifted", synthetic.manifest, layers)
    only = {"oracle": FEW["oracle"]}
    found = shares.of_capture(Capture(tmp_path / "shifted"), lambda items, what: items, only)
    assert found["energy_in_mean_at_most"] == pytest.approx(0.9, abs=0.01)
    assert found["energy_in_mean"] == pytest.approx(0.45, abs=0.01)
    assert found["loudest_channel_at_most"] < 1.5  # all channels are alike


def test_a_loud_channel_is_reported(synthetic, tmp_path):
    layers = dict(synthetic.layers())
    for layer in layers.values():
        layer.keys[:, :, 7] *= 8
    capture.save(tmp_path / "loud", synthetic.manifest, layers)
    only = {"oracle": FEW["oracle"]}
    found = shares.of_capture(Capture(tmp_path / "loud"), lambda items, what: items, only)
    assert found["loudest_channel"] == pytest.approx(64 / (127 / 64), rel=0.05)


def test_a_head_without_attention_in_the_zone_counts_little_by_mass():
    def head(mass: float, best: float) -> Quality:
        rows = torch.ones(4)
        return Quality(rows, mass * torch.ones(4, 2), best * torch.ones(4, 2), rows)

    found = shares.summary([head(0.45, 0.9), head(0.01, 0.01)])
    assert found["share"] == pytest.approx(0.75)
    assert found["worst_head"] == found["worst_kv_head"] == pytest.approx(0.5)
    assert found["by_mass"] == pytest.approx(0.46 / 0.91)


def test_the_command_keeps_other_models_results(synthetic, results, monkeypatch, capsys):
    monkeypatch.setattr(shares, "METHODS", FEW)
    monkeypatch.setattr(capture, "make", lambda *_, **__: synthetic)

    def measured(*words: str) -> dict:
        program.main(["models", "--tokens", "1600", "--threads", "1", *words])
        return json.loads((results / "quality-models-cpu.json").read_text())["results"]

    measured("--model", "smollm2")
    both = measured("--model", "qwen-0.5b")
    assert list(both) == [f"{model}, documentation, 1600" for model in list(MODELS)[:2]]
    assert "median query head" in capsys.readouterr().out
    more = measured("--model", "qwen-0.5b", "--layers", "2")
    assert more.keys() - both.keys() == {"qwen-0.5b, documentation, 1600, 2 layers"}


def test_some_methods_are_measured_anew_and_others_stay(synthetic, results, monkeypatch):
    monkeypatch.setattr(capture, "make", lambda *_, **__: synthetic)
    for name in ("Quest", "ArkVale"):
        program.main(["models", "--tokens", "1600", "--threads", "1", "--only", name])
    (found,) = json.loads((results / "quality-models-cpu.json").read_text())["results"].values()
    assert list(found["methods"]) == ["Quest", "ArkVale"]


def test_the_command_ends_with_a_sentence_where_weights_are_unusable(monkeypatch):
    def make(*_, **__) -> Capture:
        raise Unusable("pip could not fetch tiny-1==1.0.")

    monkeypatch.setattr(capture, "make", make)
    with pytest.raises(SystemExit, match="could not fetch tiny-1"):
        program.main(["models"])

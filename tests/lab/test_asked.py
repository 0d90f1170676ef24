"""RULER's samples answered by a model that sees the rows that a peer has chosen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from pariskv_core.evaluation import samples
from pariskv_core.evaluation.prompts import Template, load_tokenizer
from pariskv_core.evaluation.samples import Made, Wanted
from quality import __main__ as program
from quality.pretrained import asked
from tiny_models import gguf_file

PROMPT = 300  # tokens: 4 sinks, a zone of 40, 256 that are near


def in_full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(query heads, dim) over all rows, of two kv heads."""
    groups = query.unflatten(0, (2, -1))
    weights = torch.softmax(groups @ key.transpose(1, 2) / math.sqrt(query.shape[-1]), -1)
    return (weights @ value).flatten(0, 1)


@pytest.mark.parametrize("name", ["SnapKV", "best"])
def test_a_step_that_may_see_all_rows_is_full_attention(name, gauss):
    key, value, query = gauss(2, PROMPT + 1, 16), gauss(2, PROMPT + 1, 16), gauss(4, PROMPT, 16)
    chosen = asked._Chosen(name, rows=40)
    chosen.read(0, query, key[:, :PROMPT])
    step = query[:, -1]
    torch.testing.assert_close(chosen.attend(0, step, key, value), in_full(step, key, value))


def test_a_step_sees_the_ends_and_the_best_rows_of_the_zone(gauss):
    key, value, query = gauss(2, PROMPT, 16), gauss(2, PROMPT, 16), gauss(2, PROMPT, 16)
    key[:, 20] = 9 * query[:, -1]  # far the best one of each head
    chosen = asked._Chosen("best", rows=1)
    chosen.read(0, query, key)
    places = torch.cat([torch.arange(4), torch.tensor([20]), torch.arange(44, PROMPT)])
    expected = in_full(query[:, -1], key[:, places], value[:, places])
    torch.testing.assert_close(chosen.attend(0, query[:, -1], key, value), expected)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_file(path, width=256)
    return path


@pytest.fixture
def prompts(tmp_path: Path, model: Path) -> Path:
    template = Template.of(load_tokenizer(model), "base")
    folder = samples.folder_of(tmp_path / "prompts", "tiny", template)
    wanted = Wanted("vt", 1024, 2, 42)
    made = [{"question": f"{n} " * 150, "begin": "it", "outputs": ["x"]} for n in (31, 57)]
    samples.write(samples.place(folder, wanted), wanted, Made(made, 6), template, "by hand")
    return tmp_path / "prompts"


def test_answers_go_into_a_result_that_goes_on(model, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["asked", str(model), "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    words += ["--methods", "SnapKV", "best", "--rows", "8", "1000", "--threads", "1"]
    program.main(words)
    found = json.loads((out / "result.json").read_text())
    assert found["settings"] == ["SnapKV=8", "SnapKV=1000", "best=8", "best=1000"]
    by = {(each["setting"], each["index"]): each["answer"] for each in found["answers"]}
    assert len(by) == 8
    # All rows are the same, whoever chose them.
    assert all(by["SnapKV=1000", index] == by["best=1000", index] for index in range(2))
    before = (out / "answers.jsonl").read_text()
    program.main(words)
    assert (out / "answers.jsonl").read_text() == before
    assert "8 of them there from before" in capsys.readouterr().out


def test_a_model_of_other_logits_is_refused():
    asked._chosen = asked._Chosen("best", 1)
    layer = torch.nn.Module()
    layer.layer_idx = 0
    rows = torch.zeros(1, 1, 2, 16)
    with pytest.raises(NotImplementedError, match=r"scaled by 0\.5"):
        asked._attention(layer, rows, rows, rows, None, scaling=0.5)
    for more in ({"sliding_window": 512}, {"softcap": 30.0}):
        with pytest.raises(NotImplementedError, match="a window or a soft cap"):
            asked._attention(layer, rows, rows, rows, None, **more)


def test_a_model_that_the_engine_does_not_know_is_a_sentence(prompts, tmp_path):
    narrow = tmp_path / "narrow.gguf"
    gguf_file(narrow)
    words = ["asked", str(narrow), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="head_dim: expected"):
        program.main([*words, "--device", "cpu", "--threads", "1"])


def test_a_folder_without_samples_is_a_sentence(model, tmp_path):
    none = str(tmp_path / "none")
    with pytest.raises(SystemExit, match="there is no folder"):
        program.main(["asked", str(model), "--prompts", none, "--out", str(tmp_path)])

"""The five lines that open README.md generate text."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from tiny import model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.filterwarnings("default")  # transformers' own, of saving and of pipelines
def test_the_first_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    [lines, *_] = re.findall(
        r"```python no-run\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len([line for line in lines.splitlines() if line]) == 5
    assert lines in (ROOT / "docs/index.md").read_text(encoding="utf-8")
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", *(f"w{i}" for i in range(200))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    small = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    copy.deepcopy(model("llama")).save_pretrained(tmp_path / "model")
    small.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(" ".join(f"w{i % 200}" for i in range(400)))
    capsys.readouterr()
    exec(lines.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model")), {})
    assert "w198 w199" in capsys.readouterr().out


def test_the_picture_is_there():
    [picture] = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")

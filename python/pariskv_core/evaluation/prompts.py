"""Texts into prompts: a model's tokenizer, and its chat template around a question."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pariskv_core._failures import CannotRunError

KINDS = ("base", "chat")
_MARK = "THE-QUESTION-STANDS-HERE"
_SEAM = 2  # tokens that two pieces of text may have more when they are one
_LONGEST_REASON = 300  # characters of another library's error


def load_tokenizer(place: Path) -> Any:
    """Of a model folder, or of a GGUF file. Never from the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers is imported
    warnings.filterwarnings("ignore")
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True}
    folder = place
    if place.is_file():
        folder = place.parent
        if place.suffix != ".json":
            options["gguf_file"] = place.name
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except MemoryError:
        raise
    except Exception as reason:  # whatever transformers and its readers raise
        said = " ".join(str(reason).split())[:_LONGEST_REASON] or type(reason).__name__
        raise CannotRunError(f"transformers cannot load a tokenizer of {place}: {said}") from None


class Prompt(NamedTuple):
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Template:
    """How a question becomes a prompt. The beginning of the answer comes last."""

    tokenizer: Any
    kind: str
    before: str = ""
    after: str = ""

    @staticmethod
    def of(tokenizer: Any, kind: str | None) -> Template:
        """kind: "base", "chat", or None: chat where the tokenizer has a template for it."""
        has = bool(getattr(tokenizer, "chat_template", None))
        kind = kind or ("chat" if has else "base")
        if kind == "base":
            return Template(tokenizer, kind)
        if not has:
            raise CannotRunError(
                "--template chat: the tokenizer has no chat template; expected --template base"
            )
        try:
            said = tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
            )
        except Exception as reason:  # a template is a program of its own
            said = str(reason)
        if said.count(_MARK) != 1:
            raise CannotRunError(
                "--template chat: the tokenizer's chat template does not take a question of one "
                "turn; expected --template base"
            )
        before, _, after = said.partition(_MARK)
        return Template(tokenizer, kind, before, after)

    @property
    def extra(self) -> int:
        """Tokens of a prompt that are not its text's, at most."""
        if self.kind == "base":
            return len(self.tokenizer("").input_ids)
        parts = (self.before, self.after)
        return sum(self.count(part) for part in parts) + _SEAM

    def count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, question: str, begin: str) -> Prompt:
        """begin: of the answer."""
        if self.kind == "base":
            text = question + begin
        else:
            text = self.before + question + self.after + begin.lstrip()
        ids = self.tokenizer(text, add_special_tokens=self.kind == "base").input_ids
        return Prompt(text, [int(each) for each in ids])

    @property
    def digest(self) -> str:
        """Of all that makes a prompt of a text: eight digits."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else str(self.tokenizer.get_vocab())
        parts = "\0".join([words, self.kind, self.before, self.after])
        return hashlib.sha256(parts.encode()).hexdigest()[:8]

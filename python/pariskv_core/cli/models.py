"""Loads a model from a folder or a GGUF file for `generate`, `verify` and `explain`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core import _shapes as shapes
from pariskv_core.cli import parsing
from pariskv_core.cli.failures import CannotRunError, need

if TYPE_CHECKING:
    import torch

_LONGEST_REASON = 300  # characters of another library's error


def arguments(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """What the commands that run a model have in common."""
    add = parser.add_argument
    add("model", help="a model folder (config.json, weights, tokenizer) or a GGUF file")
    add("prompt", nargs="?", help="the text; or --prompt-file")
    add("--prompt-file", metavar="FILE", help="read the text from FILE; - is standard input")
    add("--raw", action="store_true", help="the text as it is, without the model's chat template")
    add(
        "--max-new-tokens",
        type=parsing.whole(1),
        default=new_tokens,
        metavar="N",
        help=f"({new_tokens})",
    )
    add("--top-k", type=parsing.top_k, default=100, help="rows fetched per kv head (100)")
    add("--device", choices=("cpu", "cuda"), help="(cuda where it is ready)")
    add(
        "--threads",
        type=parsing.threads,
        default=machine.usable_cores(),
        help="of the engine, and of torch (usable cores)",
    )


@dataclass
class Loaded:
    model: Any
    tokenizer: Any
    context: int  # the longest text the model was made for; 0: not known
    device: str

    @property
    def name(self) -> str:
        return str(self.model.config.get_text_config(decoder=True).model_type)

    def ids(self, text: str, *, special: bool = True) -> torch.Tensor:
        """(1, tokens)"""
        found: torch.Tensor = self.tokenizer(
            text, return_tensors="pt", add_special_tokens=special
        ).input_ids
        return found.long().to(self.device)

    def prompt_ids(self, text: str, *, raw: bool) -> torch.Tensor:
        """(1, tokens): as one turn of a chat where the model has a template for that."""
        if raw or not getattr(self.tokenizer, "chat_template", None):
            ids = self.ids(text)
        else:
            chat = [{"role": "user", "content": text}]
            said = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
            ids = self.ids(said, special=False)
        if ids.shape[1] == 0:
            raise CannotRunError("the prompt is empty")
        return ids

    def check_length(self, prompt: int, new: int) -> None:
        if self.context and prompt + new > self.context:
            raise CannotRunError(
                f"the prompt has {prompt:,} tokens and {new:,} more are asked for, but {self.name} "
                f"was made for {self.context:,}: give a shorter prompt or fewer --max-new-tokens"
            )


def prompt_text(arguments: argparse.Namespace) -> str | None:
    """The text that was given; None: none was."""
    file = arguments.prompt_file
    if file is None:
        return None if arguments.prompt is None else str(arguments.prompt)
    if arguments.prompt is not None:
        raise CannotRunError("expected a prompt or --prompt-file, got both")
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8")
    except OSError as reason:
        raise CannotRunError(f"cannot read {file}: {reason.strerror}") from reason
    except UnicodeDecodeError:
        raise CannotRunError(f"{file} is not text in UTF-8") from None


def _device(wanted: str | None) -> str:
    import torch

    ready = pk.is_available("cuda") and torch.cuda.is_available()
    if wanted == "cuda" and not ready:
        raise CannotRunError("there is no GPU that torch and pariskv_core can use; see: doctor")
    return wanted or ("cuda" if ready else "cpu")


def _quiet() -> None:
    """Only ours is printed; models come from the disk, never from the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")


def load(arguments: argparse.Namespace) -> Loaded:
    place = Path(arguments.model)
    shape = shapes.read(arguments.model)
    shape.config(threads=arguments.threads)  # refuses the sizes that the engine lacks
    if place.is_file() and place.suffix == ".json":
        place = place.parent
    need("torch", "transformers", *(["gguf"] if place.is_file() else []))
    _quiet()
    import torch
    import transformers

    try:
        import pariskv_core.transformers  # noqa: F401
    except ImportError as reason:  # too old a version
        raise CannotRunError(str(reason).removeprefix("[transformers] ")) from None
    device = _device(arguments.device)
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True}
    if place.is_file():
        options["gguf_file"] = place.name
        place = place.parent
    return _loaded(place, options, device, shape.context)


def _loaded(folder: Path, options: dict[str, Any], device: str, context: int) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pariskv_core import transformers as pkt
    from pariskv_core.transformers.support import check_model

    is_gguf = "gguf_file" in options
    dtype: Any = "auto"
    if is_gguf:  # unpacked numbers; GPUs compute faster with 16 bits, CPUs with 32
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        check_model(model)
        pkt.PariskvCache(model.config)
    except NotImplementedError as reason:
        raise CannotRunError(str(reason).removeprefix("[transformers] ")) from None
    except MemoryError:
        raise
    except Exception as reason:  # whatever transformers and its readers raise
        said = " ".join(str(reason).split())[:_LONGEST_REASON] or type(reason).__name__
        raise CannotRunError(f"transformers cannot load {folder}: {said}") from None
    model.eval().to(device)
    return Loaded(model, tokenizer, context, device)

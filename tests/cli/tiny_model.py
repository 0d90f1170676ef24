"""A random model of two layers, with a tokenizer of its own, as a folder on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONTEXT = 8192
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 299,
    "pad_token_id": 298,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def _save_tokenizer(folder: Path) -> None:
    """A token for each byte, and one for the end of a text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<end>": 299}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def save(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:  # sharp attention, so that the text is not one token repeated
                parameter.mul_(4.0)
            if name == "lm_head.weight":  # printable ASCII comes first, and nothing else comes
                parameter[94:] = 0
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def save_config(folder: Path, **fields: Any) -> Path:
    """A config alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", **SHAPE, **fields}
    text = json.dumps({name: value for name, value in config.items() if value is not None})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder

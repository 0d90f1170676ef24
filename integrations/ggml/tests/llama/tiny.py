"""Small random models with layers of several kinds, as GGUF files: llama.cpp's own converter, and a
pretrained model's tokenizer.

    python tiny.py KIND FOLDER GGUF_WITH_A_TOKENIZER LLAMA_CPP
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
GATED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# kind: the class, what its config has besides, and the layers that are the engine's.
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING] * 5 + [FULL],
            "sliding_window": 512,
            "query_pre_attn_scalar": 64,
        },
        1,
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": 128,
            **EXPERTS,
        },
        2,
    ),
    "qwen3-next": ("Qwen3Next", {**GATED, **EXPERTS}, 1),
    "qwen3.5": ("Qwen3_5", GATED, 1),
    "lfm2": (
        "Lfm2",
        {"hidden_size": 512, "num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2},
        2,
    ),
}


def make(kind: str, folder: Path, tokenizer: Path, sources: Path) -> None:
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]  # its own gguf, also for transformers
    import torch
    import transformers as hf

    words = hf.AutoTokenizer.from_pretrained(tokenizer.parent, gguf_file=tokenizer.name)
    words.save_pretrained(folder)
    shape = {
        "vocab_size": len(words),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    name, own, _ = KINDS[kind]
    config_class = getattr(hf, f"{name}TextConfig", None) or getattr(hf, f"{name}Config")
    torch.manual_seed(3)
    model = getattr(hf, f"{name}ForCausalLM")(config_class(**{**shape, **own}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    model.float().save_pretrained(folder)
    _convert(folder, sources, ["--no-mtp"] if kind.startswith("qwen") else [])


def _convert(folder: Path, sources: Path, options: list[str]) -> None:
    """By llama.cpp's program, told which tokenizer it is: the program knows those of releases."""
    import runpy

    from conversion import base

    for one in vars(base).values():
        if isinstance(one, type) and hasattr(one, "get_vocab_base_pre"):
            one.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    out = ["--outtype", "f32", "--outfile", str(folder / "model.gguf")]
    sys.argv = ["convert", str(folder), *out, *options]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    make(sys.argv[1], *map(Path, sys.argv[2:5]))

"""Models of a few thousand numbers: of transformers, and as GGUF files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch


def tiny_model(transformers: ModuleType, family: str, **changes: Any) -> Any:
    """A random model whose vocabulary is bytes; biases and norms are random, too."""
    torch.manual_seed(5)
    options = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
    }
    if family == "Gemma3":
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        # Logits of this one are not scaled by the root of its head_dim.
        options |= {"layer_types": kinds, "sliding_window": 8, "query_pre_attn_scalar": 40}
    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    settings = config(**options | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def gguf_file(path: Path, layers: int = 2, width: int = 32) -> None:
    """A random Llama of four heads over two, and a tokenizer whose tokens are bytes."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    rng = np.random.default_rng(8)
    out = gguf.GGUFWriter(path, "llama")
    tokens = [*bytes_to_unicode().values(), "ab", "<s>", "</s>"]
    out.add_context_length(4096)
    out.add_embedding_length(width)
    out.add_block_count(layers)
    out.add_feed_forward_length(width)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_rope_dimension_count(width // 4)
    out.add_rope_freq_base(10_000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    out.add_token_merges(["a b"])
    out.add_bos_token_id(len(tokens) - 2)
    out.add_eos_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width)}
    shapes["output_norm"] = (width,)
    for i in range(layers):
        square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        shapes |= {f"blk.{i}.{name}": (width, width) for name in square}
        shapes |= {f"blk.{i}.{name}": (width // 2, width) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()

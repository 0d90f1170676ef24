"""The table of docs/models.md, from models' configurations. Run with --write to put it there."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pariskv_core._served import refusal
from pariskv_core._shapes import ModelShape, full_every, read
from pariskv_core.cli import main
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.transformers.versions import WITHOUT_ROWS
from pariskv_core.vllm import allowed
from pariskv_core.vllm.options import Options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN = "<!-- models: written by tests/docs/models_table.py -->\n"
END = "<!-- /models -->"

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class Tried:
    """How far a model, or a smaller one with its kinds of layers, went in each host: "weights" of a
    pretrained one, "random" ones, its whole "shape" with random weights; "": not tried."""

    vllm: str = ""
    transformers: str = ""
    llama_cpp: str = ""


def fields(
    kind: str, layers: list[str], heads: int, kv_heads: int, dim: int, hidden: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_size": hidden,
        "layer_types": layers,
        **more,
    }


def nemotron() -> list[str]:
    """Mamba, experts and attention are layers of their own."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    return [{"M": LINEAR, "E": "moe", "*": FULL}[kind] for kind in pattern]


def gated(keys: int, values: int) -> dict[str, Any]:
    """Of a gated delta rule."""
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }


MODELS: dict[str, tuple[dict[str, Any], Tried]] = {
    "Llama-3.1-8B": (
        fields("llama", [FULL] * 32, 32, 8, 128, 4096),
        Tried("weights, shape", "weights", "weights"),
    ),
    "Qwen2.5-Coder-1.5B": (
        fields("qwen2", [FULL] * 28, 12, 2, 128, 1536),
        Tried("", "weights", "weights"),
    ),
    "Qwen3-30B-A3B": (fields("qwen3_moe", [FULL] * 48, 32, 4, 128, 2048), Tried("", "random", "")),
    "gpt-oss-20b": (
        fields("gpt_oss", full_every(2, SLIDING, 24), 64, 8, 64, 2880, sliding_window=128),
        Tried("random", "random", "random"),
    ),
    "gpt-oss-120b": (
        fields("gpt_oss", full_every(2, SLIDING, 36), 64, 8, 64, 2880, sliding_window=128),
        Tried("random", "random", "random"),
    ),
    "Gemma-3-12B": (
        fields("gemma3_text", full_every(6, SLIDING, 48), 16, 8, 256, 3840, sliding_window=1024),
        Tried("random, shape", "weights", "random"),
    ),
    "Gemma-4, 30 layers": (
        fields(
            "gemma4_text",
            full_every(6, SLIDING, 30),
            16,
            8,
            256,
            2816,
            sliding_window=1024,
            global_head_dim=512,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
        ),
        Tried("random", "random", ""),
    ),
    "Qwen3-Next-80B-A3B": (
        fields("qwen3_next", full_every(4, LINEAR, 48), 16, 2, 256, 2048, **gated(16, 32)),
        Tried("random", "random", "random"),
    ),
    "Qwen3.6-35B-A3B": (
        fields("qwen3_5_moe_text", full_every(4, LINEAR, 40), 16, 2, 256, 2048, **gated(16, 32)),
        Tried("random", "random", "random"),
    ),
    "Qwen3.6-27B": (
        fields("qwen3_5_text", full_every(4, LINEAR, 64), 24, 4, 256, 5120, **gated(16, 48)),
        Tried("random, shape", "random", "random"),
    ),
    "Nemotron-3-Nano-30B-A3B": (
        fields("nemotron_h", nemotron(), 32, 2, 128, 2688),
        Tried("random", "random", ""),
    ),
    "Jamba-v0.1": (
        fields("jamba", [FULL if i % 8 == 4 else LINEAR for i in range(32)], 32, 8, 128, 4096),
        Tried("random", "random", ""),
    ),
    "LFM2": (
        fields("lfm2", full_every(3, "conv", 30), 32, 8, 64, 2048),
        Tried("random", "random", "random"),
    ),
    "Llama-4-Scout": (
        fields("llama4_text", full_every(4, "chunked_attention", 48), 40, 8, 128, 5120),
        Tried("", "random", ""),
    ),
    "Falcon-H1": (fields("falcon_h1", ["hybrid"] * 32, 32, 8, 128, 4096), Tried()),
    "DeepSeek-V3": (
        fields("deepseek_v3", [FULL] * 61, 128, 128, 192, 7168, kv_lora_rank=512),
        Tried(),
    ),
}


def shape_of(config: dict[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    """And the bytes of a token, as `pariskv plan` counts them."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "config.json"
        place.write_text(json.dumps(config))
        room = ["--memory", "1TB", "--host-memory", "1TB", "--context", "128K"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(["plan", folder, "--device", "cuda", *room, "--json"])
        return read(folder), json.loads(printed.getvalue())["bytes_per_token"]


def refused_by_vllm(config: dict[str, Any]) -> bool:
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(**config), use_mla=bool(config.get("kv_lora_rank"))
    )
    none = SimpleNamespace()
    parts = {"parallel_config": none, "cache_config": none, "scheduler_config": none}
    parts["device_config"] = SimpleNamespace(device_type="cuda")
    made = SimpleNamespace(model_config=model, kv_transfer_config=None, **parts)
    return allowed.refusal_of(Options(made)) is not None


def rows() -> Iterator[list[str]]:
    for name, (config, tried) in MODELS.items():
        kinds = config["layer_types"]
        others = {kind: kinds.count(kind) for kind in kinds if kind != FULL}
        layers = f"{kinds.count(FULL)} of {len(kinds)}"
        beside = ", ".join(kind.removesuffix("_attention") for kind in others) or "–"
        taken = ["–", "–"]
        with contextlib.suppress(CannotRunError, ValueError):
            shape, token = shape_of(config)
            taken = [f"{token['device'] / 1e3:.1f}", f"{shape.layers * shape.row_bytes / 1e3:.1f}"]
        hosts = [
            "no" if refused_by_vllm(config) else tried.vllm or "not tried",
            "no" if refusal(config.get, WITHOUT_ROWS) else tried.transformers or "not tried",
            tried.llama_cpp or "not tried",
        ]
        if taken[0] == "–":
            hosts[2] = "no"
        yield [name, layers, beside, *taken, *hosts]


def table() -> str:
    header = ["model", "layers", "others", "KB on the GPU", "KB of rows"]
    header += ["vLLM", "transformers", "llama.cpp"]
    lines = [header, ["---"] * len(header), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def present() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.stdout.write(table())
    else:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text.replace(BEGIN + present(), BEGIN + table()), encoding="utf-8")

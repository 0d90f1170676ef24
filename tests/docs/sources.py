"""Where the figures of the pages come from: bench/results, bench/notes, the library itself."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pariskv_core as pk
from pariskv_core._shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]

# Models of the lab, as its files call them and as the pages order them.
SMOLLM2, QWEN, QWEN_15B, GEMMA = "smollm2", "qwen-0.5b", "qwen-1.5b", "gemma-270m"


@functools.cache
def results(name: str) -> Any:
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())["results"]


def noted(page: str, quoted: str) -> None:
    """Fails if a note does not say this any more: it is all that is left of a measurement."""
    text = " ".join((ROOT / "bench/notes" / f"{page}.md").read_text(encoding="utf-8").split())
    assert " ".join(quoted.split()) in text, f"bench/notes/{page}.md does not say: {quoted}"


# --- How a number is written --------------------------------------------------------------------


def whole(number: float) -> str:
    return f"{number:,.0f}"


def short(number: float, digits: int = 3) -> str:
    """.987, without the zero before the point."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{number:.{digits}f}")


def times(number: float) -> str:
    """Two digits, three where the first two say nothing: 12, 6.5, 1.01."""
    return (
        f"{number:.0f}" if number >= 9.95 else f"{number:.2f}" if number < 1.1 else f"{number:.1f}"
    )


# --- Times ----------------------------------------------------------------------------------------

H100, H200 = "cuda-nvidia-h100-80gb-hbm3", "cuda-nvidia-h200"
AUTO, MIXED = "auto-nvidia-h100-80gb-hbm3", "mixtures-nvidia-h100-80gb-hbm3"
STEPS = [(1, 2**15), (1, 2**17), (1, 2**19), (1, 2**20), (8, 2**15), (8, 2**17), (8, 2**19)]


def step(card: str, batch: int, tokens: int, of: str = "microseconds") -> float:
    """µs of a decode step, or of dense attention."""
    [row] = [
        row for row in results(card)["decode"] if (row["batch"], row["tokens"]) == (batch, tokens)
    ]
    return row[of]


def steps(card: str, *which: tuple[int, int], of: str = "microseconds") -> list[str]:
    return [whole(step(card, *each, of=of)) for each in which]


def auto_rows(*which: tuple[int, int]) -> list[dict[str, float]]:
    """Steps that leave to the cache where rows lie, beside dense attention, and the memory."""
    rows = {(row["batch"], row["tokens"]): row for row in results(AUTO)["auto"]}
    return [rows[each] for each in which]


def row_cached(card: str, batch: int, top_k: int, row_cache: int, queries: str) -> str:
    """µs of a step over 128K tokens; queries: "steady" select most rows again."""
    wanted = dict(batch=batch, top_k=top_k, row_cache=row_cache, queries=queries)
    [row] = [row for row in results(card)["rows"] if wanted.items() <= row.items()]
    return whole(row["microseconds"])


def verb(card: str, name: str, tokens: int) -> float:
    [row] = [
        row
        for row in results(card)["verbs"]
        if (row["verb"], row["batch"], row["tokens"]) == (name, 1, tokens)
    ]
    return row["microseconds"]


def on_cpu(row: dict[str, float]) -> tuple[float, float]:
    """Milliseconds of a step and of torch, whichever of its ways is faster."""
    dense = min(row["torch_folded_seconds"], row["torch_enable_gqa_seconds"])
    return row["pariskv_seconds"] * 1e3, dense * 1e3


# --- Quality --------------------------------------------------------------------------------------


def and_worst(model: str, tokens: int, method: str) -> str:
    """A share of the attainable attention, on keys of a pretrained model; in brackets those of the
    worst kv head and of the worst query head."""
    found = results("quality-models-cpu")[f"{model}, documentation, {tokens}"]["methods"][method]
    worst = [short(found[name]) for name in ("worst_kv_head", "worst_head")]
    return f"{short(found['share'])} ({', '.join(worst)})"


def inside(model: str, tokens: int, method: str) -> dict[str, float]:
    """What a method costs inside a model: its "kl", its "rows" and more."""
    return results("quality-inside-cpu")[f"{model}, documentation, {tokens}"]["text"][method]


def kl(model: str, method: str, tokens: int = 7168, digits: int = 4) -> str:
    return short(inside(model, tokens, method)["kl"], digits)


DEFAULT = "the default"


def facts(model: str, method: str, tokens: int = 7168, of: str = "found") -> int:
    found = results("quality-inside-cpu")[f"{model}, documentation, {tokens}"]["facts"]
    return round(found[method]["all"][of])


def worst_kind() -> tuple[str, str, int, str]:
    """The model, tokens and kind of facts of which the default is least sure beside full attention,
    and by how much its mean log-probability is lower."""
    apart = {}
    for key, run in results("quality-inside-cpu").items():
        model, _, tokens = key.split(", ")
        ours, full = (run.get("facts", {}).get(name, {}) for name in (DEFAULT, "full attention"))
        for kind in ours.keys() & full.keys():
            lost = full[kind]["log_probability"] - ours[kind]["log_probability"]
            apart[model, int(tokens), kind] = lost
    model, tokens, kind = max(apart, key=lambda each: apart[each])
    return model, kind, tokens, short(apart[model, tokens, kind], 2)


def runs_that_find_as_many() -> tuple[int, int]:
    """Runs in which the default finds as many facts as full attention, give or take two; all."""
    found = [run["facts"] for run in results("quality-inside-cpu").values() if "facts" in run]
    apart = [
        abs(run[DEFAULT]["all"]["found"] - run["full attention"]["all"]["found"]) for run in found
    ]
    return sum(round(each) <= 2 for each in apart), len(apart)


# --- Bytes ----------------------------------------------------------------------------------------

LLAMA = ModelShape("Llama-3.1-8B", 32, 32, 8, 128, 128)


@functools.cache
def bytes_per_key(head_dim: int, block: int = 64) -> float:
    """Of summaries, per token, layer and kv head, as the engine counts them."""
    shape = ModelShape("", 1, 8, 2, head_dim, head_dim)
    config = shape.config(policy=pk.ParisKV(block=block))
    return _of_tokens(config)["summaries"] / config.segment_tokens / shape.kv_heads


def _of_tokens(config: pk.Config) -> pk.Footprint:
    return config.footprint(sequences=0, tokens=config.segment_tokens)


def llama() -> tuple[float, float, float]:
    """Bytes of Llama-3.1-8B: summaries and rows of a token, the tail of a layer."""
    config = LLAMA.config()
    grows = _of_tokens(config)
    tail = config.footprint(tokens=0)["tail copies"] // LLAMA.layers
    return grows["summaries"] / config.segment_tokens, grows["rows"] / config.segment_tokens, tail

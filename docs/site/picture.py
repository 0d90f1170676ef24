"""Draws docs/pictures/speed.png from bench/results: python docs/site/picture.py

Matplotlib is loaded to draw alone: a test that asks what the picture shows does without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
OURS, DENSE = "#0f766e", "#9ca3af"


def on_gpu() -> list[tuple[int, float, float]]:
    """(tokens, milliseconds of ours, of dense attention) for one sequence."""
    found = json.loads((RESULTS / "cuda-nvidia-h100-80gb-hbm3.json").read_text())
    rows = found["results"]["decode"]
    return [
        (row["tokens"], row["microseconds"] / 1e3, row["dense"] / 1e3)
        for row in rows
        if row["batch"] == 1
    ]


def on_cpu() -> list[tuple[int, float, float]]:
    rows = json.loads((RESULTS / "decode-amd-epyc.json").read_text())["results"]
    dense = ("torch_folded_seconds", "torch_enable_gqa_seconds")  # whichever is faster
    return [
        (row["tokens"], row["pariskv_seconds"] * 1e3, min(row[each] for each in dense) * 1e3)
        for row in rows
    ]


def what_it_shows() -> str:
    """Its numbers, which the picture carries along: a test compares them with the results."""
    return json.dumps({"H100": on_gpu(), "AMD EPYC": on_cpu()})


def draw(axes: Axes, title: str, rows: list[tuple[int, float, float]]) -> None:
    tokens, ours, dense = zip(*rows, strict=True)
    axes.plot(tokens, dense, "o-", color=DENSE, lw=2.5, label="dense attention (torch)")
    axes.plot(tokens, ours, "o-", color=OURS, lw=2.5, label="pariskv_core")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{t // 1024}K" if t < 2**20 else "1M" for t in tokens])
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#111827")
    for t, mine, other in rows:
        better = f"{other / mine:.1f} ×" if other >= mine else f"{other / mine:.2f} ×"
        place = (0, -17 if other >= mine else 9)
        style = dict(textcoords="offset points", ha="center", fontsize=10, fontweight="bold")
        axes.annotate(better, (t, mine), place, color=OURS, **style)
    low, high = min(ours + dense), max(ours + dense)
    axes.set_ylim(low / 2.2, high * 1.6)
    ticks = [t for t in (0.03, 0.1, 0.3, 1, 3, 10, 30, 100) if low / 2.2 < t < high * 1.6]
    axes.set_yticks(ticks, [f"{t:g} ms" for t in ticks])
    axes.margins(x=0.09)
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.tick_params(length=0, colors="#374151", labelsize=10)
    axes.set_xlabel("earlier tokens", color="#374151")


def main() -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), dpi=160)
    draw(left, "One H100, keys and values in host memory", on_gpu())
    draw(right, "Two cores of an AMD EPYC", on_cpu())
    left.legend(frameon=False, fontsize=10, loc="upper left", labelcolor="#111827")
    figure.text(0.008, 0.01, "Time of one decode step of one layer: 32 query heads, 8 kv heads of "
                "128, bfloat16, one sequence. Both axes are logarithmic.", fontsize=8.5,
                color="#6b7280")  # fmt: skip
    figure.tight_layout(rect=(0, 0.045, 1, 1), w_pad=3)
    out = ROOT / "docs/pictures/speed.png"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, facecolor="white", metadata={"Description": what_it_shows()})
    print(out.relative_to(ROOT))


if __name__ == "__main__":
    main()

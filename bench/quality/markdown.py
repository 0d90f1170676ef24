"""Markdown tables, and numbers as they stand in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "*Not measured yet.*\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fill(page: str, made: Callable[[str], str]) -> str:
    """The page with every block that is marked as a table made anew, from its name."""
    return _BLOCK.sub(lambda found: found[1] + made(found[2]) + found[3], page)


def share(value: float) -> str:
    """As .978 or -.012."""
    # Plus nothing: -0 is 0 then.
    return re.sub(r"^(-?)0\.", r"\1.", f"{round(value, 3) + 0.0:.3f}")


def fine(value: float) -> str:
    """As .0011: of numbers, none below 0, whose third digit says too little."""
    return f"{value:.4f}".removeprefix("0")


def and_worst(at: dict[str, float]) -> str:
    """A share, and in brackets those of the worst kv head and of the worst query head, if known."""
    worst = [share(at[name]) for name in ("worst_kv_head", "worst_head") if name in at]
    return f"{share(at['share'])} ({', '.join(worst)})"

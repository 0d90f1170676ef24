"""Numbers as commands write them."""

from __future__ import annotations


def size(size: float) -> str:
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size:.0f} bytes"


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def seconds(taken: float) -> str:
    if taken >= 1:
        return f"{taken:.3g} s"
    return f"{1e3 * taken:.3g} ms" if taken >= 1e-3 else f"{1e6 * taken:.3g} µs"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

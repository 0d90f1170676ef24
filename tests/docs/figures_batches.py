"""What the pages say of many sequences, see figures.py."""

from __future__ import annotations

from collections.abc import Iterator

from sources import MIXED, auto_rows, results, whole


def fit() -> Iterator[str]:
    short = [(1, 2**13), (8, 2**13), (64, 2**11), (64, 2**12), (256, 2**11)]
    for row in auto_rows(*short, (64, 2**13), (64, 2**14), (16, 2**15)):
        yield (
            f"| {row['batch']} × {row['tokens']:,} | {whole(row['microseconds'])} µs | "
            f"{whole(row['dense'])} µs | {row['live_share']:.2f} × |"
        )
    mixed = results(MIXED)["mixtures"][0]
    (one, long), (many, brief) = mixed["parts"]
    apart = " and ".join(map(whole, mixed["alone"]))
    yield f"{one} × {long:,} and {many} × {brief:,} tokens {whole(mixed['together'])} µs, {apart}"

"""A line of blocks for a context: the higher, the more."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#@"


def strip(values: Sequence[float], encoding: str) -> str:
    """The largest value is the highest block, half of it one of half the height."""
    try:
        _BLOCKS.encode(encoding)
        blocks = _BLOCKS
    except (UnicodeEncodeError, LookupError):
        blocks = _ASCII
    most = max(values, default=0.0)
    if not most > 0:
        return blocks[0] * len(values)
    last = len(blocks) - 1
    # Anything at all shows.
    return "".join(blocks[max(round(last * v / most), 1) if v > 0 else 0] for v in values)

"""What a batch of sequences takes of a device and of host memory, as `plan` shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pariskv_core as pk
from pariskv_core._shapes import ModelShape

MOST_TOKENS = 1 << 23  # of a sequence

_SHOWN = {
    "rows": "keys and values",
    "resident rows": "keys and values",
    "summaries": "key summaries",
    "state": "key summaries",
    "kept rows": "kept rows",
    "recent queries": "kept rows",
    "row cache": "row cache, tail",
    "tail copies": "row cache, tail",
    "tables": "row cache, tail",
    "opening rows": "beside, in a call",
    "changes": "beside, in a call",
}
_ROWS = "keys and values"


class Bytes(NamedTuple):
    device: int = 0
    host: int = 0


class PerToken(NamedTuple):
    """Of all layers, whatever sequence it is of. plain: of a token that is in no zone."""

    summaries: float
    rows: float
    plain: float


@dataclass(frozen=True)
class Taken:
    """Of a batch of so many sequences, beside so much memory. Prompts that are dropped are not in
    it."""

    shape: ModelShape
    config: pk.Config
    batch: int
    memory: int
    host: int

    def per_token(self) -> PerToken:
        tokens = self.config.segment_tokens
        grows = self.config.footprint(sequences=0, tokens=tokens)
        plain = self.config.footprint(longest=1, sequences=0, tokens=tokens)
        rows = grows["rows"] + grows["prompt rows"]
        return PerToken(grows["summaries"] / tokens, rows / tokens, plain["rows"] / tokens)

    def parts(self, tokens: int) -> dict[str, Bytes]:
        """Of sequences of so many tokens. Rows stay on a GPU as far as it has room for them."""
        found = self.config.footprint(longest=tokens, sequences=self.batch)
        # A zone opens in one prompt after another.
        one = self.config.footprint(longest=tokens)
        parts = dict.fromkeys(_SHOWN.values(), Bytes())
        resident = either = 0
        for entry in found.entries:
            if entry.name == "prompt rows":
                continue
            taken = one["opening rows"] if entry.name == "opening rows" else entry.bytes
            if entry.name == "changes" and self.config.device == "cpu":
                # Most calls change one layer, and a cut all of one sequence; on a GPU a step all.
                taken = max(taken // self.config.layers, one["changes"])
            if entry.place == "either":
                either, resident = taken, found["resident rows"]
                continue
            name = _SHOWN.get(entry.name, "row cache, tail")
            device, host = parts[name]
            if entry.place == "host":
                parts[name] = Bytes(device, host + taken)
            else:
                parts[name] = Bytes(device + taken, host)
        sliding = self.batch * self.shape.sliding_layers * min(self.shape.window, tokens)
        parts["sliding layers"] = Bytes(sliding * self.shape.sliding_row)
        states = self.batch * self.shape.linear_layers * self.shape.state
        parts["states of linear layers"] = Bytes(states)
        if either:
            others = sum(part.device for part in parts.values()) - resident
            stay = min(max(self.memory - others, resident), either)
            parts[_ROWS] = Bytes(stay, either - stay)
        return parts

    def fits(self, tokens: int) -> bool:
        needed = together(self.parts(tokens))
        return needed.device <= self.memory and needed.host <= self.host

    def longest(self) -> int:
        """Tokens in whole segments that fit; 0: not even one segment does."""
        segment = self.config.segment_tokens
        most = MOST_TOKENS // segment

        def last(fits: Callable[[int], bool], low: int, high: int) -> int:
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(middle * segment) else (low, middle - 1)
            return low

        # Rows of a zone may leave a GPU, those of a shorter sequence may not: two slopes.
        short = last(
            lambda tokens: self.config.footprint(longest=tokens)["summaries"] == 0, 0, most
        )
        if short < most and self.fits((short + 1) * segment):
            return last(self.fits, short + 1, most) * segment
        return last(self.fits, 0, short) * segment


def together(parts: dict[str, Bytes]) -> Bytes:
    return Bytes(
        sum(part.device for part in parts.values()), sum(part.host for part in parts.values())
    )

"""Settings of the engine by the names that `eval` takes: full, default, int8, error=.01, ..."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pariskv_core as pk
from pariskv_core._estimates import tells_errors
from pariskv_core.cli.failures import CannotRunError
from pariskv_core.evaluation.record import FULL

# As the paper has it; bench/quality/engine.py measures the same.
_SCHEDULE = [(0, 0.5, 0.5), (5_000, 0.25, 0.3), (10_000, 0.2, 0.25), (30_000, 0.1, 0.2)]
_WORDS: dict[str, dict[str, Any]] = {
    "default": {},
    "int8": {"kv_dtype": "int8"},
    "published": {
        "scorer": "votes",
        "group_rule": "mean_query",
        "schedule": _SCHEDULE,
        "block": 0,
    },
}
_NUMBERS: dict[str, type[float] | type[int]] = {
    "error": float,
    "top_k": int,
    "tail_rows": int,
    "block": int,
}
_ROWS = 400  # top_k of a budget by error, as docs/search.md has it: else 100 would often be its end
EXPECTED = (
    "full, default, int8, published, or fields of ParisKV as error=.01 or top_k=64, "
    "joined by commas as in int8,error=.01"
)


@dataclass(frozen=True)
class Setting:
    """cache: of a PariskvCache; None: full attention, without the engine. fields: of its policy,
    where they are not the default's."""

    name: str
    cache: dict[str, Any] | None = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> dict[str, Any]:
        """The same for the plugin for vLLM, which tells errors where the policy knows them."""
        if self.cache is None:
            raise ValueError(f"{self.name} is without the engine")
        policy = self.cache["policy"]
        # A server's samples are drawn by a secret unless it is told a seed.
        found: dict[str, Any] = {"policy": {"name": "pariskv", "seed": policy.seed, **self.fields}}
        if "kv_dtype" in self.cache:
            found["kv_dtype"] = self.cache["kv_dtype"]
        if tells_errors(policy):
            found["report_error"] = True
        return found


def parse(name: str) -> Setting:
    if name == FULL:
        return Setting(name, None)
    policy: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    for part in name.split(","):
        word, equals, value = part.partition("=")
        if not equals and word in _WORDS:
            fields = _WORDS[word]
        elif equals and word in _NUMBERS:
            fields = {word: _number(name, word, value)}
        else:
            raise CannotRunError(f"--settings: there is no setting {part}; expected {EXPECTED}")
        for key, at in fields.items():
            (cache if key == "kv_dtype" else policy)[key] = at
    if "error" in policy:
        policy.setdefault("top_k", _ROWS)
    try:
        cache["policy"] = pk.ParisKV(**policy)
    except ValueError as reason:
        raise CannotRunError(f"--settings: {name}: {reason}") from None
    return Setting(name, cache, policy)


def _number(name: str, word: str, value: str) -> float | int:
    try:
        return _NUMBERS[word](value)
    except ValueError:
        raise CannotRunError(f"--settings: {name}: expected a number for {word}") from None

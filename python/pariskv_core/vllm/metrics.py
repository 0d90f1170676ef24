"""The engine's counters in vLLM's own metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge

import pariskv_core as pk

from .names import KVConnectorPromMetrics, KVConnectorStats

# What was counted since the last report.
_COUNTERS = {
    "decode_tokens": "Tokens that layers have decoded.",
    "searched_tokens": "Of these, tokens whose layer searched for rows.",
    "fetched_rows": "Rows selected by searches, over kv heads.",
    "cached_rows": "Of these, rows found in the row cache of a GPU.",
    "lost_requests": "Requests that failed, as some of their rows were not there.",
    "forgotten_blocks": "Blocks of prefixes whose rows nobody had: they are not found any more.",
    "restarts": "Errors after which nothing that was stored is used.",
}
_ENGINES = ("decode_tokens", "searched_tokens", "fetched_rows", "cached_rows")
# What there is now, of all ranks together.
_GAUGES = {
    "device_bytes": "Bytes that engines have in use on their devices.",
    "host_bytes": "Bytes of host memory that engines beside GPUs have in use.",
    "row_bytes": "Bytes of keys and values.",
    "ready_host_bytes": "Bytes of host memory that are pinned, in use or not.",
    "offloaded_bytes": "Of these, bytes in host memory beside a GPU.",
    "summary_bytes": "Bytes of key summaries.",
    "sequences": "Sequences: of requests, and parked ones whose prefix may be found.",
}
# As searches estimate it, once they do: of the rank that does worst, by this choice.
_ESTIMATES: dict[str, tuple[Callable[..., float], str]] = {
    "mass": (min, "Mean share of the attention on rows attended to exactly."),
    "error": (max, "Mean error that searches report of themselves."),
}
_PREFIX = "vllm:pariskv_"


@dataclass
class Reporter:
    """Of one rank: what its engine has counted since the last report."""

    rank: int
    before: dict[str, int] = field(default_factory=dict)

    def report(self, stats: pk.Stats, sequences: int) -> EngineStats:
        now = {name: int(getattr(stats, name)) for name in _ENGINES}
        data: dict[str, float] = {name: now[name] - self.before.get(name, 0) for name in now}
        self.before = now
        data.update(
            device_bytes=stats.memory.live,
            host_bytes=stats.host_memory.live,
            row_bytes=stats.row_bytes,
            ready_host_bytes=stats.host_memory.reserved - stats.host_memory.coming,
            offloaded_bytes=stats.offloaded_bytes,
            summary_bytes=stats.summary_bytes,
            sequences=sequences,
        )
        means = {name: float(getattr(stats, f"mean_{name}")) for name in _ESTIMATES}
        data.update({name: mean for name, mean in means.items() if not math.isnan(mean)})
        return EngineStats(data={str(self.rank): data})


@dataclass
class EngineStats(KVConnectorStats):
    """By rank. Of a rank that is here twice, counters add up and the rest is what came last."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged: dict[str, dict[str, float]] = {}
        for rank, values in (*self.data.items(), *other.data.items()):
            mine = merged.setdefault(rank, {})
            for name, value in values.items():
                mine[name] = value + (mine.get(name, 0) if name in _COUNTERS else 0)
        return EngineStats(data=merged)

    def total(self, name: str) -> float:
        return sum(values.get(name, 0) for values in self.data.values())

    def estimates(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, (worst, _) in _ESTIMATES.items():
            known = [values[name] for values in self.data.values() if name in values]
            if known:
                found[name] = worst(known)
        return found

    def reduce(self) -> dict[str, int | float]:
        """A line of the log."""
        if self.is_empty():
            return {}
        found: dict[str, int | float] = {
            "searched": _share(self.total("searched_tokens"), self.total("decode_tokens")),
            "row cache": _share(self.total("cached_rows"), self.total("fetched_rows")),
            "device GB": round(self.total("device_bytes") / 1e9, 3),
            "host GB": round(self.total("host_bytes") / 1e9, 3),
            "sequences": self.total("sequences"),
        }
        found |= {name: float(f"{value:.3g}") for name, value in self.estimates().items()}
        errors = sum(self.total(name) for name in _COUNTERS if name not in _ENGINES)
        if errors:
            found["errors"] = errors
        return found


def scheduler_stats(errors: dict[str, int]) -> EngineStats | None:
    return EngineStats(data={"scheduler": dict(errors)}) if errors else None


def _share(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0


class PromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._counters = {name: self._made(counter, name, _COUNTERS[name]) for name in _COUNTERS}
        self._gauges = {name: self._made(gauge, name, _GAUGES[name]) for name in _GAUGES}
        # Its labels come with its first value: until then it would be exported as 0.
        self._estimates = {
            name: self._metric(gauge, name, text) for name, (_, text) in _ESTIMATES.items()
        }
        self._last: dict[int, EngineStats] = {}

    def _metric(self, kind: Any, name: str, text: str) -> Any:
        # Of several API servers the one that was told last knows, as of vLLM's own gauges.
        more = {"multiprocess_mode": "mostrecent"} if name in (*_GAUGES, *_ESTIMATES) else {}
        return kind(name=_PREFIX + name, documentation=text, labelnames=self._labelnames, **more)

    def _made(self, kind: Any, name: str, text: str) -> dict[int, Any]:
        metric = self._metric(kind, name, text)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        new = EngineStats(data=transfer_stats_data)
        for name, of_engine in self._counters.items():
            of_engine[engine_idx].inc(new.total(name))
        last = self._last.setdefault(engine_idx, EngineStats())
        last.data.update(new.data)  # ranks report at times of their own
        for name, of_engine in self._gauges.items():
            of_engine[engine_idx].set(last.total(name))
        for name, value in last.estimates().items():
            labels = self.per_engine_labelvalues[engine_idx]
            self._estimates[name].labels(*labels).set(value)

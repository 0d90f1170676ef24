"""How much of everything the experiments take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quality import workloads
from quality.trial import Trial

Track = Callable[[Sequence[Any], str], Iterable[Any]]
TOP_K = 100


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    tokens: int  # of a prompt
    long: int  # of the prompt where a small share of it must still be many rows
    prompt: int  # before the drift
    decoded: int  # during it
    lengths: tuple[int, ...]
    seeds: int
    steps: int
    device: str = "cpu"

    def spec(self, **changes: Any) -> workloads.Spec:
        return workloads.Spec(**{"tokens": self.tokens, "steps": self.steps, **changes})

    def trials(self, **changes: Any) -> list[Trial]:
        specs = [self.spec(seed=seed, **changes) for seed in range(self.seeds)]
        return [Trial(spec, self.device) for spec in specs]


CPU = Size(
    tokens=16_384,
    long=65_536,
    prompt=8_192,
    decoded=16_384,
    lengths=(8_192, 16_384, 32_768, 65_536, 131_072),
    seeds=2,
    steps=24,
)
GPU = Size(
    tokens=131_072,
    long=131_072,
    prompt=32_768,
    decoded=65_536,
    lengths=tuple(2**i for i in range(13, 20)),
    seeds=4,
    steps=64,
    device="cuda",
)

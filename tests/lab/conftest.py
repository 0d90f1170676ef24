"""Tests of bench/: the programs that measure, and the quality lab. They run on the CPU.

They check that programs work, on small inputs of their own; bench/results is not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# For the programs of bench and the lab, and for the oracle that the engine's tests have.
sys.path += [str(ROOT / "bench"), str(ROOT / "tests/python")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch's: small work in many pieces, whose threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _few(variants: dict[str, Any]) -> dict[str, Any]:
    """Of the workloads, each of which is made in test_workloads.py."""
    names = ("all of it", "16 outlier channels", "nothing planted")
    return {name: variants[name] for name in names}


class Measured:
    """The lab's experiments at a small size, each run once, when it is first asked for."""

    def __init__(self) -> None:
        from quality.sizes import Size

        self.size = Size(
            tokens=3000,
            long=4500,
            prompt=1200,
            decoded=1200,
            lengths=(2000, 4000),
            seeds=1,
            steps=4,
        )
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        from quality import workloads
        from quality.__main__ import EXPERIMENTS

        every = workloads.variants
        if name not in self._found:
            with patch.object(workloads, "variants", lambda spec: _few(every(spec))):
                self._found[name] = EXPERIMENTS[name](self.size, lambda items, what: items)
        return self._found[name]

    def everything(self) -> dict[str, Any]:
        from quality.__main__ import EXPERIMENTS
        from quality.experiments import workload_facts

        facts = {"size": vars(self.size), "workload": workload_facts(self.size)}
        return {**facts, **{name: self[name] for name in EXPERIMENTS}}


@pytest.fixture(scope="session")
def measured() -> Measured:
    return Measured()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)

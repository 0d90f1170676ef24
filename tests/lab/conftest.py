"""Tests of bench/: the programs that measure, and the quality lab. They run on the CPU.

They check that programs work, on small inputs of their own; bench/results is not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)


@pytest.fixture
def gauss(rng):
    """Normal numbers, as a float32 tensor of a shape."""
    return lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """The folder of results files, which is empty."""
    import harness
    from quality import sources

    for module in (harness, sources):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path

"""Fixtures for every file. A test that takes `device` runs on every backend there is."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import support

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=60,
    # The fixtures that property tests take are plain strings.
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.fixture(params=support.devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=support.DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=support.HEAD_DIMS)
def head_dim(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)

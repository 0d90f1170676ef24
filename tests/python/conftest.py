"""Fixtures for every file. Every test runs on every backend there is, unless it is marked."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterator

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


# A shell starts jobs in its background with Ctrl-C ignored, and so would they their own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "cpu(reason): about the CPU backend, or about no backend")
    config.addinivalue_line("markers", "cuda: about the CUDA backend; skipped where no GPU is")
    config.addinivalue_line("markers", "sanitize: a few that reach every kernel, for slow checkers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="2/3: the second third of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, _, of = config.getoption("--shard").partition("/")
    if not (shard.isdigit() and of.isdigit() and 1 <= int(shard) <= int(of)):
        raise pytest.UsageError(f"--shard: expected one of several, as 2/3, got {shard}/{of}")
    mine = [zlib.crc32(item.nodeid.encode()) % int(of) == int(shard) - 1 for item in items]
    config.hook.pytest_deselected(
        items=[item for item, is_mine in zip(items, mine, strict=True) if not is_mine]
    )
    items[:] = [item for item, is_mine in zip(items, mine, strict=True) if is_mine]


def _devices_of(definition: pytest.Function) -> list:
    if definition.get_closest_marker("cpu"):
        return ["cpu"]
    if not definition.get_closest_marker("cuda"):
        return support.devices()
    there = "cuda" in support.devices()
    reason = "needs a GPU and a build with the CUDA backend"
    return [pytest.param("cuda", marks=[] if there else pytest.mark.skip(reason=reason))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("device", _devices_of(metafunc.definition), indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of this test: what make_config and torch's factories take by default."""
    support.use_device(request.param)
    yield request.param
    support.use_device("cpu")


@pytest.fixture(params=support.DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=support.HEAD_DIMS)
def head_dim(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)

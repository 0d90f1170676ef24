"""Fixtures: a count of the engine's calls, and few threads."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pariskv_core.transformers.store as store
import pytest
import tiny
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Of the libraries; what is ours to warn about, tests ask for.
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", "error::FutureWarning")  # a name that they drop
    config.addinivalue_line("filterwarnings", r"error:\[transformers\]")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(store.pk, "Cache", tiny.Counting)


@pytest.fixture(params=tiny.SETTINGS.values(), ids=tiny.SETTINGS.keys())
def settings(request: pytest.FixtureRequest) -> dict:
    return request.param

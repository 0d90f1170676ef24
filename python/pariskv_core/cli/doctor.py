"""`pariskv doctor`: what is installed here and what it can use."""

from __future__ import annotations

import importlib.metadata
import platform

from rich import box
from rich.console import Console
from rich.table import Table

import pariskv_core as pk
from pariskv_core.cli import machine

_BACKENDS = ("cpu", "cuda")


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backend(device: str) -> str:
    if not pk.is_built(device):
        return "not in this build; install the CUDA toolkit (nvcc 12.8 or newer) and build again"
    if not pk.is_available(device):
        return "built, but no CUDA device or driver was found"
    names = ", ".join(machine.gpu_names()) if device == "cuda" else ""
    return f"ready: {names}" if names else "ready"


def run() -> int:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("pariskv_core", pk.__version__)
    for device in _BACKENDS:
        table.add_row(f"{device} backend", _backend(device))
    table.add_row("processor", machine.cpu_name())
    table.add_row("instructions in use", pk.cpu_level())
    table.add_row("usable cores", str(machine.usable_cores()))
    table.add_row("available memory", f"{machine.available_memory() / 1e9:.1f} GB")
    table.add_row("python", platform.python_version())
    for distribution in ("numpy", "torch", "rich"):
        table.add_row(distribution, _installed(distribution))
    Console().print(table)
    return 0 if pk.is_available("cpu") else 1

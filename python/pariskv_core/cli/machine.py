"""What this machine offers to this process: cores, memory, names. Linux, standard library only."""

from __future__ import annotations

import math
import os
import platform
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_GPUS = Path("/proc/driver/nvidia/gpus")


def _first_line(path: Path, prefix: str = "") -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return next((line.strip() for line in lines if line.startswith(prefix)), "")
    except OSError:
        return ""


def usable_cores() -> int:
    """A container may show 64 cores and let this process use two of them."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _first_line(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def cpu_name() -> str:
    name = _first_line(Path("/proc/cpuinfo"), "model name").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """What the driver calls the GPUs here; empty when it does not say."""
    lines = (_first_line(file, "Model:") for file in sorted(_GPUS.glob("*/information")))
    return [line.partition(":")[2].strip() for line in lines if line]


def available_memory() -> int:
    """Bytes that this process may take; 0 when nobody says."""
    kilobytes = _first_line(Path("/proc/meminfo"), "MemAvailable").split()
    available = int(kilobytes[1]) * 1024 if len(kilobytes) > 1 else 0
    limit = _first_line(_CGROUP / "memory.max")
    return min(available or int(limit), int(limit)) if limit.isdigit() else available


def peak_memory() -> int:
    """The most bytes that this process has had in RAM at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

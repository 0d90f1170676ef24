"""What this machine offers to this process: cores, memory, names. Linux, standard library only."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")
_PROCESSORS = Path("/proc/stat")
_GPUS = Path("/proc/driver/nvidia/gpus")
_DRIVER = Path("/proc/driver/nvidia/version")
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")  # where a build looks as well, cmake/cuda.cmake
_ASKING_SECONDS = 20  # nvidia-smi may have to wake the driver


@dataclass(frozen=True)
class Gpu:
    name: str
    total: int  # bytes
    free: int


@dataclass(frozen=True)
class Room:
    """Bytes that a plan is for: of a device, and of host memory beside a GPU. name: of the GPU."""

    total: int
    free: int
    host: int = 0
    name: str = ""


@dataclass(frozen=True)
class Limit:
    """Memory that a control group allows, and has left; page cache counts as left."""

    path: str
    size: int
    left: int


def _first_line(path: Path, prefix: str = "") -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return next((line.strip() for line in lines if line.startswith(prefix)), "")
    except OSError:
        return ""


def machine_cores() -> int:
    return os.cpu_count() or 1


def usable_cores() -> int:
    """A container may show 64 cores and let this process use two of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine_cores()
    quota, _, period = _first_line(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def _processor_ticks() -> tuple[int, int]:
    """Of all cores, since the machine started: busy ones, and all."""
    ticks = [int(part) for part in _first_line(_PROCESSORS, "cpu ").split()[1:9] if part.isdigit()]
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if len(ticks) == 8 else (0, 0)


def busy_cores(seconds: float = 0.3) -> float:
    """Cores that are busy while this process waits: other programs'; 0 where nobody says."""
    busy, ticks = _processor_ticks()
    time.sleep(seconds)
    busy_now, ticks_now = _processor_ticks()
    return machine_cores() * (busy_now - busy) / max(ticks_now - ticks, 1)


def cpu_name() -> str:
    name = _first_line(Path("/proc/cpuinfo"), "model name").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """What the driver calls the GPUs here; empty when it does not say."""
    lines = (_first_line(file, "Model:") for file in sorted(_GPUS.glob("*/information")))
    return [line.partition(":")[2].strip() for line in lines if line]


def driver_version() -> str:
    """Of NVIDIA's driver; empty where there is none."""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _first_line(_DRIVER) + " ")
    return found[1] if found else ""


def gpus() -> list[Gpu]:
    """As nvidia-smi reports them; empty where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=_ASKING_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = (line.rsplit(",", 2) for line in done.stdout.splitlines() if done.returncode == 0)
    found = []
    for row in rows:
        if len(row) == 3 and all(part.strip().isdigit() for part in row[1:]):
            found.append(Gpu(row[0].strip(), int(row[1]) << 20, int(row[2]) << 20))
    return found


def nvcc() -> str:
    """CUDA's compiler: on the PATH, by its variables, or at its usual places; empty: none."""
    folders = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME")]
    places = [str(Path(folder) / "bin/nvcc") for folder in (*folders, *_TOOLKITS) if folder]
    named = os.environ.get("CUDACXX", "").split(" ")[0]
    found = (shutil.which(place) for place in (named, "nvcc", *places) if place)
    return next(filter(None, found), "")


def nvcc_version(program: str) -> tuple[int, ...]:
    """As (12, 8); empty where it does not say."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_ASKING_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else ()


def _meminfo(name: str) -> int:
    kilobytes = _first_line(_MEMORY, name).split()
    return int(kilobytes[1]) * 1024 if len(kilobytes) > 1 else 0


def total_memory() -> int:
    """Bytes of the machine; 0 where the system does not say."""
    return _meminfo("MemTotal")


def _own_folders() -> Iterator[Path]:
    """The folder of this process's control group and those above it (version 2)."""
    path = _first_line(_OWN_CGROUP, "0::").removeprefix("0::/")
    folder = _CGROUP / path
    while True:
        yield folder
        if folder == _CGROUP:
            return
        folder = folder.parent


def memory_limit() -> Limit | None:
    """The control group's limit that leaves least; None: there is none."""
    found = []
    for folder in _own_folders():
        limit = _first_line(folder / "memory.max")
        if limit.isdigit():
            used = _first_line(folder / "memory.current")
            cached = _first_line(folder / "memory.stat", "inactive_file").split()
            taken = int(used) if used.isdigit() else 0
            taken -= min(int(cached[1]) if len(cached) > 1 else 0, taken)
            path = str(folder / "memory.max")
            found.append(Limit(path, int(limit), max(int(limit) - taken, 0)))
    limit = _first_line(_CGROUP / "memory/memory.limit_in_bytes")  # version 1
    if limit.isdigit() and int(limit) < (total_memory() or 1 << 60):
        used = _first_line(_CGROUP / "memory/memory.usage_in_bytes")
        left = int(limit) - (int(used) if used.isdigit() else 0)
        path = str(_CGROUP / "memory/memory.limit_in_bytes")
        found.append(Limit(path, int(limit), max(left, 0)))
    return min(found, key=lambda limit: limit.left, default=None)


def available_memory() -> int:
    """Bytes that this process may take; 0 when nobody says."""
    available = _meminfo("MemAvailable")
    limit = memory_limit()
    if limit is None:
        return available
    return min(available, limit.left) if available else limit.left


def peak_memory() -> int:
    """The most bytes that this process has had in RAM at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

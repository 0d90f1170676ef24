"""What this machine and this installation offer, how fast its memory is, and what to do about it.

Exit code 1: something that is here cannot be used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import pariskv_core as pk
from pariskv_core import _machine as machine
from pariskv_core.cli import bandwidth
from pariskv_core.cli.failures import CHECKOUT, DOES_NOT_HOLD, OK, install
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import rate, size

HELP = "what this machine and installation offer, and what to do about it"

_BACKENDS = ("cpu", "cuda")
_PACKAGES = ("numpy", "torch", "transformers", "gguf", "rich")
_OLDEST_TRANSFORMERS = (4, 57)
_OLDEST_NVCC = (12, 8)
_SLOW_BUS = 12e9  # bytes a second; a PCI Express 4 slot of 16 lanes carries twice as much
_LITTLE_MEMORY = 4e9


@dataclass(frozen=True)
class Finding:
    problem: bool  # something that is here cannot be used; else it is only worth knowing
    what: str
    do: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-bandwidth", action="store_true", help="measure nothing: ready at once"
    )


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backend(device: str, gpu: bool) -> str:
    """A state alone: what to do about it is a finding."""
    if not pk.is_built(device):
        none = device == "cuda" and not gpu
        return "not in this build" + ("; no GPU was found here either" if none else "")
    if not pk.is_available(device):
        return "built, but no CUDA device or driver was found"
    names = ", ".join(machine.gpu_names()) if device == "cuda" else ""
    return f"ready: {names}" if names else "ready"


def _usable_nvcc() -> str:
    """Empty: a build cannot have CUDA."""
    program = machine.nvcc()
    return program if program and machine.nvcc_version(program) >= _OLDEST_NVCC else ""


def _rebuild() -> str:
    """What brings CUDA into the build."""
    build = "pip install . -C cmake.define.PARISKV_CUDA=ON"
    program = _usable_nvcc()
    if not program:
        return f"install the CUDA toolkit (nvcc 12.8 or newer), then {CHECKOUT}: {build}"
    on_path = program == shutil.which("nvcc")
    return f"build with {program}, {CHECKOUT}: {'' if on_path else f'CUDACXX={program} '}{build}"


def _bus(found: dict[str, Any]) -> bandwidth.Bus | None:
    """Torch is loaded only where there is a GPU to measure."""
    if not found["gpus"] or found["packages"]["torch"] == "not installed":
        return None
    return bandwidth.bus()


def examine(*, measure: bool) -> dict[str, Any]:
    limit = machine.memory_limit()
    gpus = [asdict(gpu) for gpu in machine.gpus()] or [
        {"name": name, "total": 0, "free": 0} for name in machine.gpu_names()
    ]
    found: dict[str, Any] = {
        "pariskv_core": pk.__version__,
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in _PACKAGES},
        "backends": {name: _backend(name, bool(gpus)) for name in _BACKENDS},
        "ready": {name: pk.is_available(name) for name in _BACKENDS},
        "processor": machine.cpu_name(),
        "instructions": pk.cpu_level(),
        "cores": machine.machine_cores(),
        "usable_cores": machine.usable_cores(),
        "memory": machine.total_memory(),
        "memory_available": machine.available_memory(),
        "memory_limit": asdict(limit) if limit else None,
        "driver": machine.driver_version(),
        "gpus": gpus,
        "host_bytes_per_second": None,
        "bus_bytes_per_second": None,
    }
    if measure:
        found["host_bytes_per_second"] = bandwidth.host(found["usable_cores"])
        bus = _bus(found)
        found["bus_bytes_per_second"] = asdict(bus) if bus else None
    found["findings"] = [asdict(finding) for finding in _findings(found)]
    return found


def _findings(found: dict[str, Any]) -> list[Finding]:
    return [*_of_gpus(found), *_of_packages(found["packages"]), *_of_host(found)]


def _of_gpus(found: dict[str, Any]) -> list[Finding]:
    findings = []
    if found["gpus"] and not pk.is_built("cuda"):
        what = "there is a GPU, and this build has no CUDA backend"
        findings.append(Finding(True, what, _rebuild()))
    if found["gpus"] and pk.is_built("cuda") and not pk.is_available("cuda"):
        what = f"there is a GPU, and CUDA cannot use it (driver {found['driver'] or 'unknown'})"
        do = "update the driver; in a container, start it with the GPU (--gpus all)"
        findings.append(Finding(True, what, do))
    torch = found["packages"]["torch"]
    if found["ready"]["cuda"] and (torch == "not installed" or torch.endswith("+cpu")):
        do = "pip install torch, from the index for your CUDA version"
        findings.append(Finding(True, f"the GPU is ready, and torch is not ({torch})", do))
    bus = found["bus_bytes_per_second"]
    if bus and bus["to_device"] < _SLOW_BUS:
        what = f"the bus to the GPU carries {rate(bus['to_device'])} only"
        do = (
            'look at the slot\'s lanes (nvidia-smi -q), or keep rows on the GPU: placement="device"'
        )
        findings.append(Finding(False, what, do))
    return findings


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _of_packages(packages: dict[str, str]) -> list[Finding]:
    findings = []
    for name, what in (("torch", "bench and models"), ("transformers", "models")):
        if packages[name] == "not installed":
            do = f"for {what}, {install(name)}"
            findings.append(Finding(False, f"{name} is not installed", do))
    version = _version(packages["transformers"])
    if version and version < _OLDEST_TRANSFORMERS:
        what = f"transformers {packages['transformers']} is older than 4.57"
        findings.append(Finding(True, what, "pip install --upgrade transformers"))
    if packages["transformers"] != "not installed" and packages["gguf"] == "not installed":
        do = f"for GGUF files, {install('models')}"
        findings.append(Finding(False, "gguf is not installed", do))
    return findings


def _of_host(found: dict[str, Any]) -> list[Finding]:
    findings = []
    if not found["ready"]["cpu"]:
        findings.append(Finding(True, "the CPU backend is not in this build", "build it again"))
    level = os.environ.get("PARISKV_CPU_LEVEL")
    if level:
        do = "unset it to have the best instruction set of this processor"
        findings.append(Finding(False, f"PARISKV_CPU_LEVEL is set to {level}", do))
    elif found["instructions"] == "plain":
        what = "this processor has neither AVX2 nor AVX-512: plain loops run, several times slower"
        findings.append(Finding(False, what, "use another machine where speed matters"))
    if found["usable_cores"] < found["cores"]:
        what = f"{found['usable_cores']} of {found['cores']} cores are for this process"
        do = "if that is not meant: taskset, or the container's --cpus"
        findings.append(Finding(False, what, do))
    limit = found["memory_limit"]
    if limit and limit["size"] < found["memory"]:
        what = f"this process may have {size(limit['size'])} of {size(found['memory'])} of memory"
        findings.append(Finding(False, what, f"if that is not meant, raise {limit['path']}"))
    if 0 < found["memory_available"] < _LITTLE_MEMORY:
        what = f"{size(found['memory_available'])} of memory are available"
        do = "end other programs, or set memory_budget so that a cache refuses in time"
        findings.append(Finding(False, what, do))
    return findings


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    limit, host, bus = (
        found[name] for name in ("memory_limit", "host_bytes_per_second", "bus_bytes_per_second")
    )
    rows = [("pariskv_core", found["pariskv_core"])]
    rows += [(f"{name} backend", text) for name, text in found["backends"].items()]
    rows += [("GPU driver", found["driver"] or "none found")]
    for gpu in found["gpus"]:
        memory = f", {size(gpu['total'])}, {size(gpu['free'])} free" if gpu["total"] else ""
        rows.append(("GPU", gpu["name"] + memory))
    rows += [
        ("processor", found["processor"]),
        ("instructions in use", found["instructions"]),
        ("usable cores", f"{found['usable_cores']} of {found['cores']}"),
        ("memory", f"{size(found['memory'])}, {size(found['memory_available'])} available"),
        ("memory limit", f"{size(limit['size'])} ({limit['path']})" if limit else "none"),
    ]
    if host:
        threads = found["usable_cores"]
        rows.append(("reading memory", f"{rate(host)} with {threads} threads, measured"))
    if bus:
        both = f"{rate(bus['to_device'])} to the GPU, {rate(bus['from_device'])} back, measured"
        rows.append(("bus", both))
    rows.append(("python", found["python"]))
    return rows + list(found["packages"].items())


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    found = examine(measure=not arguments.no_bandwidth)
    screen.table(_rows(found))
    findings = [Finding(**finding) for finding in found["findings"]]
    for finding in findings:
        screen.say(
            f"{'Problem' if finding.problem else 'Note'}: {finding.what}.",
            style="red" if finding.problem else "yellow",
        )
        screen.say(f"  To do: {finding.do}.")
    if not findings:
        screen.say("Nothing to do.")
    screen.record(found)
    return DOES_NOT_HOLD if any(finding.problem for finding in findings) else OK

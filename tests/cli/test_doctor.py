"""`pariskv doctor`: what it says of each backend, here and on other machines."""

import sys
from pathlib import Path

import pariskv_core as pk
import pytest
from pariskv_core import _machine as machine
from pariskv_core.cli import doctor
from pariskv_core.cli import main as cli


def says(monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(["doctor", "--no-bandwidth"]) in (0, 1)
    row = next(line for line in capsys.readouterr().out.splitlines() if "cuda backend" in line)
    return row.split("cuda backend")[1].strip()


@pytest.fixture
def pretend(monkeypatch):
    """A build and a machine with or without CUDA."""

    def pretend(*, built: bool, available: bool, gpus: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(pk, "is_built", lambda name: name == "cpu" or built)
        monkeypatch.setattr(pk, "is_available", lambda name: name == "cpu" or available)
        monkeypatch.setattr(machine, "gpu_names", lambda: list(gpus))
        monkeypatch.setattr(machine, "_TOOLKITS", ())
        for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", "")

    return pretend


def make_nvcc(folder: Path, version: str = "13.0") -> Path:
    program = folder / "bin/nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V1'\n")
    program.chmod(0o755)
    return program


def test_without_a_gpu_a_build_without_cuda_has_nothing_to_do(
    pretend, monkeypatch, capsys, tmp_path
):
    """A compiler alone is no reason to build again."""
    pretend(built=False, available=False)
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path).parent))
    monkeypatch.setenv("COLUMNS", "200")
    cli(["doctor", "--no-bandwidth"])
    out = capsys.readouterr().out
    assert "not in this build; no GPU was found here either\n" in out
    assert "build again" not in out and "CUDA toolkit" not in out


def test_nvcc_is_asked_once(pretend, monkeypatch, capsys, tmp_path):
    pretend(built=False, available=False, gpus=("NVIDIA H200",))
    asked = []
    monkeypatch.setattr(machine, "nvcc_version", lambda program: asked.append(program) or (13, 0))
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path).parent))
    assert cli(["doctor", "--no-bandwidth"]) == 1
    assert len(asked) == 1


@pytest.mark.parametrize("place", ["PATH", "CUDACXX", "CUDA_PATH", "CUDA_HOME", "usual"])
def test_a_build_without_cuda_is_made_again_where_nvcc_is(
    place, pretend, monkeypatch, capsys, tmp_path
):
    pretend(built=False, available=False, gpus=("NVIDIA H200",))
    program = make_nvcc(tmp_path / "cuda")
    if place == "usual":
        monkeypatch.setattr(machine, "_TOOLKITS", (str(tmp_path / "cuda"),))
    else:
        values = {"PATH": program.parent, "CUDACXX": program}
        monkeypatch.setenv(place, str(values.get(place, tmp_path / "cuda")))
    monkeypatch.setenv("COLUMNS", "400")
    assert cli(["doctor", "--no-bandwidth"]) == 1
    out = capsys.readouterr().out
    assert "not in this build\n" in out
    named = "" if place == "PATH" else f"CUDACXX={program} "
    build = f"{named}pip install . -C cmake.define.PARISKV_CUDA=ON"
    assert f"build with {program}, in a checkout of the repository: {build}.\n" in out
    assert "install the CUDA toolkit" not in out


@pytest.mark.parametrize("version", ["12.4", "of today"])
def test_an_nvcc_that_is_too_old_is_no_compiler(version, pretend, monkeypatch, capsys, tmp_path):
    pretend(built=False, available=False, gpus=("NVIDIA H200",))
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path, version).parent))
    monkeypatch.setenv("COLUMNS", "400")
    assert cli(["doctor", "--no-bandwidth"]) == 1
    assert "To do: install the CUDA toolkit (nvcc 12.8 or newer), then" in capsys.readouterr().out


def test_without_a_gpu_the_error_names_what_is_missing(pretend, monkeypatch, capsys):
    pretend(built=True, available=False)
    assert says(monkeypatch, capsys) == "built, but no CUDA device or driver was found"


def test_doctor_names_the_gpu(pretend, monkeypatch, capsys):
    pretend(built=True, available=True, gpus=("NVIDIA H200", "NVIDIA L4"))
    assert says(monkeypatch, capsys) == "ready: NVIDIA H200, NVIDIA L4"


def test_a_gpu_without_a_name_is_ready_all_the_same(pretend, monkeypatch, capsys):
    pretend(built=True, available=True)
    assert says(monkeypatch, capsys) == "ready"


def test_doctor_agrees_with_the_library(monkeypatch, capsys):
    words = "not in this build" if not pk.is_built("cuda") else "built, but"
    words = "ready" if pk.is_available("cuda") else words
    assert says(monkeypatch, capsys).startswith(words)


def test_names_of_gpus_are_the_drivers(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_GPUS", tmp_path)
    assert machine.gpu_names() == []
    for bus, text in (
        ("0000:02:00.0", "Model: \t\t NVIDIA L4\nIRQ:   \t\t 9\n"),
        ("0000:01:00.0", "Model: \t\t NVIDIA H200\n"),
        ("0000:03:00.0", "IRQ:   \t\t 9\n"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert machine.gpu_names() == ["NVIDIA H200", "NVIDIA L4"]


def test_import_does_not_load_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # what a missing library looks like to import
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "gpu_names", list)
    assert cli(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out  # its version only, from the installed metadata


def findings(**changes) -> list[str]:
    """What the doctor finds on a machine where nothing is wrong but this."""
    sound = {
        "packages": {"torch": "2.13.0", "transformers": "5.23.0", "gguf": "0.19.0"},
        "ready": {"cpu": True, "cuda": False},
        "instructions": "avx512",
        "cores": 8,
        "usable_cores": 8,
        "memory": 64e9,
        "memory_available": 32e9,
        "memory_limit": None,
        "driver": "",
        "gpus": [],
        "bus_bytes_per_second": None,
    }
    return [finding.what for finding in doctor._findings({**sound, **changes})]


def test_a_sound_machine_has_no_findings(monkeypatch):
    monkeypatch.delenv("PARISKV_CPU_LEVEL", raising=False)
    assert findings() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"usable_cores": 2}, "2 of 8 cores are for this process"),
        (
            {"memory_limit": {"size": 4e9, "left": 3e9, "path": "/sys/fs/cgroup/memory.max"}},
            "this process may have 4 GB of 64 GB of memory",
        ),
        ({"memory_available": 2e9}, "2 GB of memory are available"),
        ({"instructions": "plain"}, "neither AVX2 nor AVX-512"),
        ({"packages": {"torch": "not installed", "transformers": "5.23.0", "gguf": "1"}}, "torch"),
        ({"packages": {"torch": "2", "transformers": "4.40.0", "gguf": "1"}}, "older than 4.57"),
        ({"bus_bytes_per_second": {"to_device": 3e9, "from_device": 3e9}}, "3.0 GB/s only"),
    ],
)
def test_what_limits_the_engine_is_found(monkeypatch, changes, said):
    monkeypatch.delenv("PARISKV_CPU_LEVEL", raising=False)
    [found] = findings(**changes)
    assert said in found


def test_a_gpu_that_cannot_be_used_is_a_problem(pretend, monkeypatch, capsys):
    pretend(built=False, available=False, gpus=("NVIDIA H200",))
    monkeypatch.setattr(machine, "gpus", list)
    assert cli(["doctor", "--no-bandwidth"]) == 1
    assert "Problem: there is a GPU, and this build has no CUDA backend." in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_control_groups_limit_counts(monkeypatch, tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/box/inner\n")
    inner = tmp_path / "cgroup/box/inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_CGROUP", own)
    assert machine.memory_limit() is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000000\n")
    (inner.parent / "memory.current").write_text("700000\n")
    (inner.parent / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    limit = machine.memory_limit()
    assert (limit.size, limit.left) == (1_000_000, 500_000)
    assert machine.available_memory() == 500_000


def test_nvidia_smi_is_read(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 140000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.gpus() == [machine.Gpu("NVIDIA H200", 143771 << 20, 140000 << 20)]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpus() == []

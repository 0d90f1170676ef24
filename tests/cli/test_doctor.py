"""`pariskv doctor`: what it says of each backend, here and on other machines."""

import sys

import pariskv_core as pk
import pytest
from pariskv_core.cli import doctor, machine
from pariskv_core.cli import main as cli

pytestmark = pytest.mark.cpu("the CLI; it pretends what there is")


def says(monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli(["doctor"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "cuda backend" in line)
    return row.split("cuda backend")[1].strip()


@pytest.fixture
def pretend(monkeypatch):
    """A build and a machine with or without CUDA."""

    def pretend(*, built: bool, available: bool, gpus: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(pk, "is_built", lambda name: name == "cpu" or built)
        monkeypatch.setattr(pk, "is_available", lambda name: name == "cpu" or available)
        monkeypatch.setattr(machine, "gpu_names", lambda: list(gpus))

    return pretend


def test_without_cuda_the_error_names_the_remedy(pretend, monkeypatch, capsys):
    pretend(built=False, available=False)
    text = says(monkeypatch, capsys)
    assert text.startswith("not in this build")
    assert "CUDA toolkit" in text and "12.8" in text


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
    assert doctor.run() == 0
    assert "torch" in capsys.readouterr().out  # its version only, from the installed metadata

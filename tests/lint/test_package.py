"""What is installed: complete, of one version, and safe on an older processor."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pariskv_core as pk
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(pk.__file__).parent


def macro(text: str, name: str) -> str:
    found = re.search(rf'#define PARISKV_VERSION_{name} "?([^"\s]+)"?', text)
    assert found, name
    return found[1]


def test_there_is_one_version() -> None:
    header = (ROOT / "cpp/include/pariskv/version.h").read_text()
    version = macro(header, "STRING")
    assert version == ".".join(macro(header, part) for part in ("MAJOR", "MINOR", "PATCH"))
    assert version == pk.__version__ == metadata.version("pariskv_core")
    config = (PACKAGE / "lib/cmake/pariskv/pariskvConfigVersion.cmake").read_text()
    assert f'"{version}"' in config
    assert version in (ROOT / "CHANGELOG.md").read_text()


def test_vllm_finds_the_plugin() -> None:
    [entry] = metadata.entry_points(group="vllm.general_plugins", name="pariskv")
    assert entry.value == "pariskv_core.vllm:register"
    assert callable(entry.load()), "without vLLM, too"


def test_formatters_are_the_same_everywhere() -> None:
    pinned = set((ROOT / "constraints.txt").read_text().split())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"[\w-]+==[\d.]+", hooks)) <= pinned


def test_constraints_match_the_installed_versions() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        found = re.fullmatch(r"(torch|numpy|pytest|nanobind)==([\d.]+)", line)
        if found:
            assert metadata.version(found[1]).split("+")[0] == found[2]


def test_the_package_is_complete() -> None:
    headers = {path.name for path in (ROOT / "cpp/include/pariskv").iterdir()}
    assert {path.name for path in Path(pk.get_include(), "pariskv").iterdir()} == headers
    assert Path(pk.cmake_dir(), "pariskvConfig.cmake").is_file()
    assert (PACKAGE / "lib/libpariskv.a").is_file()
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("library", ["core", "shared"])
def test_a_program_links_the_library_of_the_package(tmp_path: Path, library: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(app LANGUAGES CXX)\n"
        "find_package(pariskv 0.1 REQUIRED)\nadd_executable(app main.cpp)\n"
        f"target_link_libraries(app PRIVATE pariskv::{library})\n"
    )
    (tmp_path / "main.cpp").write_text(
        "#include <cstdio>\n#include <pariskv/pariskv.h>\n"
        "int main() { std::puts(pariskv::cpu_level()); }\n"
    )
    options = ["-G", "Ninja", "-D", f"pariskv_DIR={pk.cmake_dir()}"]
    build = tmp_path / "build"
    for command in (["-S", tmp_path, "-B", build, *options], ["--build", build]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    said = subprocess.run([build / "app"], capture_output=True, text=True, check=True).stdout
    assert said.strip() == pk.cpu_level()


def test_the_stub_is_the_one_of_this_extension(tmp_path: Path) -> None:
    """The build makes it, with no package around the extension but an empty one."""
    fresh = tmp_path / "_core.pyi"
    patterns = ROOT / "python/stub_patterns.txt"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "pariskv_core._core"]
    subprocess.run([*command, "-p", patterns, "-o", fresh], check=True)
    assert fresh.read_text() == (PACKAGE / "_core.pyi").read_text()


def test_import_works_without_a_driver() -> None:
    """The CUDA runtime is inside, out of sight of another one that the process may have."""
    [extension] = PACKAGE.glob("_core*.so")
    for command in (["readelf", "--dynamic"], ["nm", "--dynamic", "--defined-only"]):
        listing = subprocess.run(
            [*command, extension], capture_output=True, text=True, check=True
        ).stdout
        assert not re.findall(r"libcuda\S*|\b_*(?:cuda|cu)[A-Z]\w*", listing)


def test_the_library_has_exactly_one_cuda_backend() -> None:
    archive = ["ar", "t", PACKAGE / "lib/libpariskv.a"]
    members = subprocess.run(archive, capture_output=True, text=True, check=True).stdout.split()
    kernels = [member for member in members if member.endswith(".cu.o")]
    assert ("no_cuda.cpp.o" in members) != bool(kernels)
    assert bool(kernels) == pk.is_built("cuda")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
def test_code_for_newer_processors_stays_in_its_files() -> None:
    """The linker keeps one copy of an inline function that several files define. Were it one
    from a file compiled for AVX-512, an older processor would meet its instructions. It would
    too if such a file had constructors to run when the program starts."""
    listing = subprocess.run(
        ["nm", "--defined-only", "--format=posix", "--demangle", PACKAGE / "lib/libpariskv.a"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    inline = re.compile(r"(.+) [WVu] |(?:_GLOBAL__|global constructors)(.+)")
    leaked = []
    member = ""
    seen = set()
    for line in listing.splitlines():
        if header := re.fullmatch(r".*\[(.+)\]:", line):
            member = header[1]
            seen.add(member)
        elif member.startswith("avx") and (found := inline.match(line)):
            leaked.append(f"{member}: {found[0]}")
    assert {"avx2.cpp.o", "avx512.cpp.o"} <= seen
    assert not leaked, "\n".join(leaked)


def configured(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """What CMake says of a build of the library alone, and how it ends."""
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout + " ".join(done.stderr.split())


def test_a_build_without_nvcc_names_the_remedy(tmp_path: Path) -> None:
    missing = {"CUDACXX": str(tmp_path / "nvcc")}
    how = "so this build has no CUDA backend; install the CUDA toolkit (nvcc 12.8 or newer)"
    code, said = configured(tmp_path / "auto", **missing)
    assert code == 0, said
    assert how in said
    code, said = configured(tmp_path / "on", "-D", "PARISKV_CUDA=ON", **missing)
    assert code != 0
    assert how in said


def compiled_for(folder: Path, *options: str, **environment: str) -> set[tuple[str, ...]]:
    """The kinds of code that nvcc is asked for, file by file."""
    code, said = configured(folder, "-D", "PARISKV_CUDA=ON", *options, **environment)
    assert code == 0, said
    commands = (folder / "build.ninja").read_text()
    return {
        tuple(re.findall(r"--generate-code=arch=compute_\w+,code=\[(\w+)\]", flags))
        for flags in re.findall(r"FLAGS = .*--generate-code.*", commands)
    }


@pytest.mark.skipif(not pk.is_built("cuda"), reason="needs a CUDA compiler")
def test_a_build_for_everybody_has_code_for_every_gpu(tmp_path: Path) -> None:
    everybody = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120")
    kinds = compiled_for(tmp_path, "-D", "PARISKV_CUDA_ARCHITECTURES=all-supported")
    assert kinds == {everybody, ("sm_90a",)}


@pytest.mark.skipif(not pk.is_built("cuda"), reason="needs a CUDA compiler")
def test_a_build_by_default_has_code_for_the_gpus_that_are_here(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 8.0\necho 9.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    kinds = compiled_for(tmp_path / "build", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert kinds == {("sm_80", "sm_90"), ("sm_90a",)}

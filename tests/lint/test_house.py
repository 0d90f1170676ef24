"""The rules of the house that a program can check: who sees whom, what a library never does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "cpp/include"
SRC = ROOT / "cpp/src"
CUDA = ROOT / "cpp/cuda"

CPP_SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".inl"}
MAX_LINES = 450

# A policy sees no other one. Backends and what is common to all policies see every one of them.
POLICIES = sorted(name.relative_to(ROOT).as_posix() for name in SRC.glob("policy/*/"))

# The rooms of the CUDA backend: what kernels share, what all policies share, a folder per policy.
SHARED_CUDA = ["cpp/cuda", "cpp/cuda/device", "cpp/cuda/exact", "cpp/cuda/kept"]
CUDA_POLICIES = [policy.replace("src/policy", "cuda") for policy in POLICIES]
ALL_CUDA = [*SHARED_CUDA, *CUDA_POLICIES]

# The first folder that holds a file is its room; a room may see itself and the rooms named.
ROOMS = {
    "cpp/include": set(),
    "cpp/src/cpu": {"cpp/include", "cpp/src", *POLICIES},
    "cpp/src/gpu": {"cpp/include", "cpp/src"},
    **{policy: {"cpp/include", "cpp/src"} for policy in POLICIES},
    # C is a second public door: it sees what any embedder sees, and how errors are written.
    "cpp/src/c": {"cpp/include", "cpp/src"},
    "cpp/src": {"cpp/include", "cpp/src/gpu", *POLICIES},
    "cpp/cuda/device": set(),
    "cpp/cuda/exact": {"cpp/include", "cpp/src", "cpp/cuda", "cpp/cuda/device"},
    "cpp/cuda/kept": {"cpp/include", "cpp/src", "cpp/cuda", "cpp/cuda/device"},
    **{
        cuda: {"cpp/include", "cpp/src", policy, *SHARED_CUDA} - {"cpp/cuda/exact"}
        for cuda, policy in zip(CUDA_POLICIES, POLICIES, strict=True)
    },
    "cpp/cuda": {"cpp/include", "cpp/src", *ALL_CUDA, *POLICIES},
    "python/src": {"cpp/include"},
    # Verbs are timed one by one, and the public door has none.
    "bench": {"cpp/include", "cpp/src", *ALL_CUDA, *POLICIES},
    "examples": {"cpp/include"},
    "integrations/ggml/src": {"cpp/include"},
    "integrations/ggml/tests": {"integrations/ggml/src"},
    "tests/cpp/emulated_cuda": {"cpp/include", "cpp/src", *ALL_CUDA, *POLICIES},
    "tests/cpp/fake_cuda": {"cpp/include", "cpp/src", *ALL_CUDA, *POLICIES},
    "tests/cpp": {"cpp/include", "cpp/src", "cpp/src/c", "cpp/src/cpu", *ALL_CUDA, *POLICIES},
    "tests/c": {"cpp/include"},
}

# A file compiled for one instruction set must not bring in inline functions, for the linker
# might keep its copy of them for everyone. So it includes these, and headers of intrinsics.
ISA_ROOM = "cpp/src/cpu/simd"
ISA_HEADERS = {
    "pariskv/sizes.h",
    "row_type.h",
    "cstdint",
    "math.h",
    "stdint.h",
    "string.h",
}

# Headers that C reads have its standard library in place of C++'s.
C_HEADERS = {(name, std) for name in ("c.h", "c_types.h") for std in ("stddef.h", "stdint.h")}

FOREIGN = re.compile(
    r"(torch|ATen|c10|cuda|cub|cooperative_groups|mma|thrust|nanobind|Python|dlpack)(?=\W|_)"
)


def files(*folders: str, suffixes: set[str] = CPP_SUFFIXES) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    return next(room for room in ROOMS if path.is_relative_to(ROOT / room))


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """What a file includes, with the character that opens it: a quote or `<`."""
    yield from (
        (found[2], found[1])
        for found in re.finditer(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.M)
    )


def code_of(path: Path) -> str:
    """A file without its comments and string literals."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.S)
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


def resolve(path: Path, included: str) -> Path | None:
    for folder in (path.parent, SRC, INCLUDE, CUDA):
        if (folder / included).exists():
            return (folder / included).resolve()
    return None


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_only_permitted_rooms(room: str) -> None:
    wrong = []
    for path in files(room):
        if room_of(path) != room:
            continue
        for included, opening in includes(path):
            if opening == "<":
                continue
            target = resolve(path, included)
            if target is None:
                wrong.append(f"{name(path)} includes {included}, which is not in the tree")
            elif room_of(target) not in ROOMS[room] | {room}:
                wrong.append(f"{name(path)} includes {included} of {room_of(target)}")
    assert not wrong, "\n".join(wrong)


def test_what_is_common_to_all_policies_names_none() -> None:
    """A policy is known where a search is made of its settings: by the backends alone."""
    wrong = [
        f"{name(path)} includes {included}"
        for path in files("cpp/src")
        if room_of(path) == "cpp/src"
        for included, _ in includes(path)
        if re.match(r"policy/\w+/", included)
    ]
    assert not wrong, "\n".join(wrong)


def test_few_places_tell_policies_apart() -> None:
    """Settings are checked, resolved and written to a file; all else is a call of Search."""
    visits = [name(path) for path in files("cpp") if "std::visit" in code_of(path)]
    assert set(visits) == {"cpp/src/config.cpp", "cpp/src/saved/settings.cpp"}
    assert sum(code_of(ROOT / path).count("std::visit") for path in visits) <= 3


def test_foreign_headers_stay_where_they_belong() -> None:
    cuda = {"cuda", "cub", "cooperative_groups", "mma"}
    allowed = {
        "python/src": {"nanobind", "Python"},
        **dict.fromkeys(ALL_CUDA, cuda),
        # These stand in for CUDA, whose types they have to know.
        "tests/cpp/emulated_cuda": cuda,
        "tests/cpp/fake_cuda": cuda,
    }
    wrong = []
    for path in files("cpp", "python/src", "bench", "examples", "integrations", "tests/cpp"):
        for included, opening in includes(path):
            ours = opening == '"' and resolve(path, included) is not None
            found = None if ours else FOREIGN.match(included)
            if found and found[1] not in allowed.get(room_of(path), set()):
                wrong.append(f"{name(path)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_public_headers_include_themselves_and_the_standard_library_only() -> None:
    wrong = [
        f"{name(path)} includes {included}"
        for path in files("cpp/include")
        for included, opening in includes(path)
        if ("pariskv/" in included) != (opening == '"')
        or (opening == "<" and "." in included and (path.name, included) not in C_HEADERS)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_one_instruction_set_include_few_headers() -> None:
    wrong = []
    for path in files(ISA_ROOM):
        if path.stem == "dispatch":
            continue
        for included, _ in includes(path):
            target = resolve(path, included)
            own = target is not None and target.is_relative_to(ROOT / ISA_ROOM)
            if not own and included not in ISA_HEADERS and not included.endswith("intrin.h"):
                wrong.append(f"{name(path)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_the_library_never_prints_aborts_exits_or_reads_the_environment() -> None:
    forbidden = re.compile(
        r"\b(printf|fprintf|puts|fputs|putchar|perror|cout|cerr|clog|abort|terminate|exit|_Exit"
        r"|quick_exit|assert|getenv)\b"
    )
    switch = SRC / "cpu/simd/dispatch.cpp"  # reads PARISKV_CPU_LEVEL, once
    wrong = [
        f"{name(path)}: {found[1]}"
        for path in files("cpp", "python/src")
        for found in forbidden.finditer(code_of(path))
        if not (path == switch and found[1] == "getenv")
    ]
    assert not wrong, "\n".join(wrong)
    assert code_of(switch).count("getenv") == 1


def test_kernels_run_on_the_stream_of_the_call() -> None:
    """A launch that names no stream runs on the default one, and so can a library call."""
    wrong = []
    for path in files("cpp/cuda"):
        code = code_of(path)
        for launch in re.finditer(r"<<<(.*?)>>>", code, re.S):
            flat = launch[1]
            for _ in range(4):  # brackets within brackets
                flat = re.sub(r"\([^()]*\)|<[^<>]*>|\{[^{}]*\}", "", flat)
            last = flat.split(",")[-1].strip()
            if flat.count(",") != 3 or last in ("0", "nullptr"):
                wrong.append(f"{name(path)}: <<<{' '.join(launch[1].split())}>>>")
    assert not wrong, "\n".join(wrong)


def test_inline_assembly_is_in_two_headers() -> None:
    """The emulator replaces these headers, and can read no assembly."""
    homes = [CUDA / "device/ptx.cuh", CUDA / "device/ptx_wgmma.cuh"]
    wrong = [
        f"{name(path)}: {found[0]}"
        for path in files("cpp", "bench")
        if path not in homes
        for found in re.finditer(r"\b(asm|__asm|__asm__)\b", code_of(path))
    ]
    assert not wrong, "\n".join(wrong)
    assert all("asm volatile" in code_of(home) for home in homes)


def test_files_can_be_read_in_one_sitting() -> None:
    long = [
        f"{name(path)}: {lines} lines"
        for path in files("cpp", "python", "tests", "bench", suffixes={*CPP_SUFFIXES, ".py"})
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    ]
    assert not long, "\n".join(long)


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    wrong = [
        f"{name(path)}: {found[1]}"
        for path in files("cpp", "python", "bench", suffixes={*CPP_SUFFIXES, ".py"})
        for found in marks.finditer(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_headers_are_guarded() -> None:
    bare = [
        name(path)
        for path in files("cpp", "python", "tests", suffixes={".h", ".cuh"})
        if "#pragma once" not in path.read_text()
    ]
    assert not bare, bare


def test_every_public_header_has_its_part_of_the_page() -> None:
    page = "".join((ROOT / "docs" / page).read_text() for page in ("cpp.md", "c.md"))
    parts = set(re.findall(r"^\.\. doxygenfile:: (\S+)", page, re.M))
    parts &= {f"{part}.h" for part in re.findall(r"^\.\. include:: headers/(\w+)\.rst", page, re.M)}
    nothing_declared = {"pariskv.h", "export.h"}
    assert parts == {path.name for path in files("cpp/include")} - nothing_declared


def test_functions_of_public_headers_are_in_the_shared_library() -> None:
    """Names without PARISKV_API are hidden: a program would find them in the archive alone."""
    declared = re.compile(r"^(?!PARISKV_API|constexpr|typedef)\w[^;{}#]*\([^;{}]*\);", re.M)
    wrong = [
        f"{name(path)}: {' '.join(found[0].split())}"
        for path in files("cpp/include")
        for found in declared.finditer(code_of(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("header", [*files("cpp/include")], ids=lambda path: path.name)
def test_a_public_header_compiles_on_its_own(header: Path, tmp_path: Path) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "pariskv/{header.name}"\n#include "pariskv/{header.name}"\n')
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]
    result = subprocess.run(["c++", *flags, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

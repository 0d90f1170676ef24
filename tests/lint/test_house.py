"""The rules of the house that a program can check: who sees whom, what a library never does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "cpp/include"
SRC = ROOT / "cpp/src"
CUDA = ROOT / "cpp/cuda"
PACKAGE = ROOT / "python/pariskv_core"

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
    # Packages in Python, and the modules beside them. Nothing sees the command line.
    "python/pariskv_core/serving": {"python/pariskv_core"},
    "python/pariskv_core/vllm": {"python/pariskv_core", "python/pariskv_core/serving"},
    "python/pariskv_core/transformers": {"python/pariskv_core"},
    "python/pariskv_core/evaluation": {"python/pariskv_core"},
    "python/pariskv_core/cli": {
        "python/pariskv_core",
        "python/pariskv_core/evaluation",
        "python/pariskv_core/serving",
        "python/pariskv_core/transformers",
        "python/pariskv_core/vllm",
    },
    "python/pariskv_core/__main__.py": {"python/pariskv_core", "python/pariskv_core/cli"},
    "python/pariskv_core": set(),
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

# Other packages that a room of Python may import, some only once they are needed.
OTHER_PACKAGES = {
    "python/pariskv_core/serving": {"torch"},
    "python/pariskv_core/vllm": {"prometheus_client", "torch", "vllm"},
    "python/pariskv_core/transformers": {"safetensors", "torch", "transformers"},
    "python/pariskv_core/evaluation": {"hard_needle", "matplotlib", "transformers", "yaml"},
    "python/pariskv_core/cli": {"numpy", "rich", "torch", "transformers"},
    "python/pariskv_core/__main__.py": set(),
    "python/pariskv_core": {"matplotlib", "numpy", "transformers"},
}
ANYWHERE = {*sys.stdlib_module_names, "typing_extensions"}

# A room that others enter by these modules alone.
DOORS = {"python/pariskv_core/serving": {"__init__", "memory", "sizes"}}

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


def imports(path: Path, text: str) -> Iterator[str]:
    """What a file of the package imports, in functions and for types, too: `torch.nn.Linear`."""
    package = ["pariskv_core", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            begin = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*begin, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def home_of(imported: str) -> Path | None:
    """The file of the package that has an imported name; None: it is not in the package."""
    first, *parts = imported.split(".")
    if first != "pariskv_core":
        return None
    place = PACKAGE
    for part in parts:
        if (place / f"{part}.py").is_file():
            return place / f"{part}.py"
        if not (place / part).is_dir():
            break
        place /= part
    return place / "__init__.py"


def wrong_imports(path: Path, text: str) -> Iterator[str]:
    own = room_of(path)
    if "import_module" in text and path != PACKAGE / "vllm/names.py":
        yield f"{name(path)} imports a module by a string, which no rule can read"
    for imported in imports(path, text):
        home = home_of(imported)
        if home is None:
            allowed = imported.partition(".")[0] in ANYWHERE | OTHER_PACKAGES[own]
        else:
            room = room_of(home)
            door = room == own or home.stem in DOORS.get(room, {home.stem})
            allowed = door and room in ROOMS[own] | {own}
        if not allowed:
            yield f"{name(path)} imports {imported}"


@pytest.mark.parametrize("room", OTHER_PACKAGES)
def test_a_room_imports_only_permitted_rooms(room: str) -> None:
    paths = [path for path in files("python", suffixes={".py"}) if room_of(path) == room]
    assert paths
    wrong = [line for path in paths for line in wrong_imports(path, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("serving/new.py", "import pariskv_core.vllm"),
        ("serving/new.py", "from .. import vllm"),
        ("serving/new.py", "from ..vllm.names import Options"),
        ("serving/new.py", "def late():\n    from vllm import LLM"),
        ("serving/new.py", "from importlib import import_module"),
        ("serving/inner/new.py", "from ...cli import plan"),
        ("vllm/new.py", "from pariskv_core.cli import plan"),
        ("vllm/new.py", "from pariskv_core.serving.books import Holder"),
        ("vllm/new.py", "from pariskv_core.serving import rooms, engine"),
        ("transformers/new.py", "from pariskv_core import serving as host"),
        ("_new.py", "if TYPE_CHECKING:\n    from .cli import main"),
        ("_new.py", "import numpy, torch"),
    ],
)
def test_an_import_that_breaks_a_rule_is_found(file: str, text: str) -> None:
    assert len(list(wrong_imports(PACKAGE / file, text))) == 1
    assert not list(wrong_imports(PACKAGE / file, "import numbers\nfrom pariskv_core import Cache"))


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

"""Pages that say how something is added: their blocks, in a copy of the tree, compile and work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import recipe

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/recipes"  # kept: a second run compiles what has changed
PARTS = ["CMakeLists.txt", "README.md", "LICENSE", "cmake", "cpp", "python/src", "pyproject.toml"]
# Recipes that meet in one tree. A new verb has to be in every backend, so it has one to itself.
TREES = {
    "together": [
        *("add-a-policy", "add-a-backend", "add-a-head-size", "add-a-row-format", "add-a-gpu"),
    ],
    "verb": ["add-a-verb"],
}
PAGES = {page: ROOT / f"docs/{page}.md" for pages in TREES.values() for page in pages}


def run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if "error" in line][:20]
    assert done.returncode == 0, "\n".join([*errors, done.stdout[-3000:], done.stderr[-3000:]])


def refresh(source: Path, target: Path) -> None:
    """Copies a file unless it is there, so that a build sees what has changed alone."""
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def files_of(part: Path) -> list[Path]:
    return [path for path in part.rglob("*") if path.is_file()] if part.is_dir() else [part]


def with_recipes(name: str, place: Path) -> Path:
    """A copy of the tree with the recipes of a tree in it; changed files alone are written."""
    made, tree = place / "made", place / "tree"
    shutil.rmtree(made, ignore_errors=True)
    for part in PARTS:
        for path in files_of(ROOT / part):
            refresh(path, made / path.relative_to(ROOT))
    for page in TREES[name]:
        blocks = recipe.blocks_of(PAGES[page])
        recipe.apply(blocks, made)
        checks = [block.text for block in blocks if block.action == "check"]
        assert len(checks) == 1, f"{page}: one program that checks it"
        (made / f"{page}.cpp").write_text(checks[0] + "\n", encoding="utf-8")
    wanted = {path.relative_to(made) for path in files_of(made)}
    for path in files_of(tree) if tree.exists() else []:
        if path.relative_to(tree) not in wanted:
            path.unlink()
    for path in wanted:
        refresh(made / path, tree / path)
    return tree


@pytest.fixture(scope="module", params=TREES)
def built(request: pytest.FixtureRequest) -> Path:
    """A tree with its library."""
    tree = with_recipes(request.param, BUILD / request.param)
    build = tree.parent / "build"
    options = ["-DPARISKV_CUDA=OFF", "-DPARISKV_TESTS=OFF", "-DPARISKV_BENCH=OFF"]
    flags = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DCMAKE_UNITY_BUILD=ON"]
    run(["cmake", "-S", tree, "-B", build, "-G", "Ninja", *options, *flags])
    run(["cmake", "--build", build, "--target", "pariskv"])
    return tree


def test_a_recipe_works(built: Path) -> None:
    build = built.parent / "build"
    for page in TREES[built.parent.name]:
        program = build / page
        source, library = built / f"{page}.cpp", build / "libpariskv.a"
        places = [f"-I{built / 'cpp/include'}", f"-I{ROOT / 'tests/recipes'}"]
        if page == "add-a-gpu":  # a table that the library has with CUDA alone
            places += [f"-I{built / 'cpp/src'}", f"-I{built / 'cpp/cuda'}"]
        warnings = ["-Wall", "-Wextra", "-Werror"]
        compiler = os.environ.get("CXX", "c++")
        flags = ["-std=c++17", *warnings, *places, "-lpthread", "-ldl"]
        run([compiler, source, library, "-o", program, *flags])
        run([program])


def test_bindings_of_a_policy_compile() -> None:
    nanobind = pytest.importorskip("nanobind", reason="waits for nanobind's headers")
    tree = with_recipes("together", BUILD / "bindings")  # another process may build the other one
    places = [tree / "cpp/include", nanobind.include_dir(), sysconfig.get_paths()["include"]]
    flags = ["-std=c++17", "-fsyntax-only", *(f"-I{place}" for place in places)]
    run([os.environ.get("CXX", "c++"), *flags, tree / "python/src/policies.cpp"])


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs").glob("add-a-*.md")))
def test_every_block_has_its_place(page: str) -> None:
    assert recipe.unmarked(ROOT / f"docs/{page}.md") == 0


def test_a_stale_anchor_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("int a;\n", encoding="utf-8")
    page = tmp_path / "page.md"
    order = '<!-- recipe: add a.cpp | after "int b;" -->\n```cpp\nint c;\n```\n'
    page.write_text(order, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page.md: a.cpp has 0 times, not once: int b;"):
        recipe.apply(recipe.blocks_of(page), tmp_path)

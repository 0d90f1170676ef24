"""Paths, links and make targets that the pages name exist, and paths in comments of code."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in (
        *("README.md", "DESIGN.md", "CONTRIBUTING.md"),
        *("docs/*.md", "bench/NOTES.md", "bench/notes/*.md"),
    )
    for page in ROOT.glob(pattern)
)
FOLDERS = ("cpp", "python", "tests", "bench", "docs", "cmake", "packaging", "examples")
# What the recipes tell the reader to write, and what a command writes.
TO_BE_WRITTEN = re.compile(
    r"keep_last|test_float8|key_norms|stub_backend|no_stub|stub\.cmake|cpp/stub|^build/"
)
# Where a path in a comment may begin, beside the folder of its file: where an #include may.
BEGINNINGS = ("", "cpp", "cpp/src", "cpp/cuda", "cpp/include")
CODE = {".h", ".cpp", ".cu", ".cuh", ".inl", ".py", ".cmake"}
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?|[\w*-]+\.(h|cpp|cu|cuh|inl|py|md|cmake)")


# The same among other words: a file by its ending, or anything in a folder of the root.
PATH_IN_TEXT = re.compile(
    r"(?<![\w./<-])(?:[\w.-]+(?:/[\w.-]+)*\.(?:h|cpp|cuh?|inl|py|md|cmake)\b"
    rf"|(?:{'|'.join(FOLDERS)})/[\w./-]*\w)"
)
# In C++ a comment, or a string of an error; a string is matched so that a // in it is none.
CPP_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|(?<!#include )"(?:\\.|[^"\\\n])*"', re.S)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.S)


def tree() -> set[str]:
    """Files and folders, as paths from the root."""
    top = {path.name for path in ROOT.iterdir()}
    inside = {
        path.relative_to(ROOT).as_posix()
        for folder in (*FOLDERS, "integrations")
        for path in (ROOT / folder).rglob("*")
    }
    return top | inside


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_paths_in_the_pages_exist() -> None:
    there = tree()
    # A path may leave out the folders that the page has just named.
    ends = {
        "/".join(parts[i:]) for parts in (p.split("/") for p in there) for i in range(len(parts))
    }
    wrong = [
        f"{name(page)}: {path}"
        for page in PAGES
        for path in re.findall(r"`([^`\s]+)`", prose_of(page))
        if PATH.fullmatch(path)
        and not TO_BE_WRITTEN.search(path)
        and not (
            path.rstrip("/") in ends
            or ("*" in path and any(fnmatch.fnmatch(end, path) for end in ends))
        )
    ]
    assert not wrong, "\n".join(wrong)


def text_of(path: Path) -> Iterator[str]:
    """Comments of a file of code; of C++ strings with a path in them, too."""
    code = path.read_text(encoding="utf-8")
    if path.suffix in {".py", ".cmake"} or path.name == "CMakeLists.txt":
        yield from re.findall(r"(?:^|\s)#\s(.*)", code)
        return
    for found in CPP_TEXT.findall(code):
        if not found.startswith('"') or re.search(r"/.*\.(cpp|cuh?|h)\)", found):
            yield found


def test_paths_in_comments_exist() -> None:
    wrong = [
        f"{name(path)}: {named}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in CODE or path.name == "CMakeLists.txt"
        for text in text_of(path)
        for named in PATH_IN_TEXT.findall(text)
        if not TO_BE_WRITTEN.search(named)
        and not (path.parent / named).exists()
        and not any((ROOT / beginning / named).exists() for beginning in BEGINNINGS)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(link)
    assert not wrong, wrong


def test_make_targets_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    wrong = [
        f"{name(page)}: make {target}"
        for page in PAGES
        for target in re.findall(r"`make ([a-z][\w-]*)", page.read_text(encoding="utf-8"))
        if target not in targets
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_is_installed_from_a_checkout() -> None:
    """There is no release on PyPI, whose name pip would look for."""
    folders = ("docs", "python", "bench", "examples", "integrations")
    files = [ROOT / "README.md", *(path for f in folders for path in (ROOT / f).rglob("*"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.suffix in (".md", ".py") and path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install\b.*pariskv_core", line)
    ]
    assert not wrong, "\n".join(wrong)

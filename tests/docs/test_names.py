"""Paths, links and make targets that the pages name exist."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "docs/*.md", "bench/NOTES.md")
    for page in ROOT.glob(pattern)
)
FOLDERS = ("cpp", "python", "tests", "bench", "docs", "cmake", "packaging", "examples")
# What the recipes tell the reader to write, and what a command writes.
TO_BE_WRITTEN = re.compile(
    r"keep_last|test_float8|key_norms|stub_backend|no_stub|stub\.cmake|cpp/stub|^build/"
)
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?|[\w*-]+\.(h|cpp|cu|cuh|inl|py|md|cmake)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.S)


def tree() -> set[str]:
    """Files and folders, as paths from the root."""
    top = {path.name for path in ROOT.iterdir()}
    inside = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
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

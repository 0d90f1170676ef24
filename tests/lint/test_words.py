"""Plain words: a sentence names the thing instead of pointing at it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in (
        *("README.md", "DESIGN.md", "CONTRIBUTING.md"),
        *("docs/*.md", "bench/NOTES.md", "bench/notes/*.md"),
    )
    for path in ROOT.glob(pattern)
)
CODE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inl"}
FOLDERS = sorted(
    {path.parent for path in (ROOT / "cpp").rglob("*") if path.suffix in CODE_SUFFIXES}
)

POINTING = {"who", "whoever", "whose", "whom", "those", "others", "nobody", "somebody", "what"}
MOST = 1.2  # of them in 100 words


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words_of(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z][\w'’-]*", text)]


def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.S)


def comments_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.suffix in CODE_SUFFIXES:
            code = re.sub(r'"(\\.|[^"\\\n])*"', '""', path.read_text(encoding="utf-8"))
            yield from re.findall(r"//[^\n]*|/\*.*?\*/", code, flags=re.S)


def pointing_in_100(text: str) -> float:
    words = words_of(text)
    return 100 * sum(word in POINTING for word in words) / max(len(words), 1)


def test_pointing_words_are_counted() -> None:
    assert pointing_in_100("whoever waits for words, and a block") == pytest.approx(100 / 7)
    assert pointing_in_100("A block spins on flags.") == 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_what_it_means(page: Path) -> None:
    share = pointing_in_100(prose_of(page))
    assert share <= MOST, f"{share:.2f} pointing words in 100: {sorted(POINTING)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_comments_name_what_they_mean(folder: Path) -> None:
    share = pointing_in_100(" ".join(comments_of(folder)))
    text = f"{share:.2f} pointing words in 100 of comments in {name(folder)}"
    sys.stdout.write(text + "\n")
    assert share <= MOST, f"{text}: {sorted(POINTING)}"

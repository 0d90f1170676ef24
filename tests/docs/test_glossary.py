"""The glossary is short, and has the words that the code and the pages use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs/glossary.md"
MOST_TERMS = 70
TERMS = [
    line.split(" | ")[0].strip("| ")
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| term |")
]


def used() -> str:
    """Pages, and comments and names of the code: `ReadyFlags` is "ready flags"."""
    pages = [ROOT / "README.md", ROOT / "DESIGN.md", *(ROOT / "docs").glob("*.md")]
    code = [
        path
        for folder in ("cpp", "python/src", "python/pariskv_core", "bench/quality")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".py"}
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in {*pages, *code} - {GLOSSARY})
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_\s]+", " ", text)
    return words.lower()


def test_the_glossary_is_short() -> None:
    assert len(TERMS) <= MOST_TERMS
    assert len(set(TERMS)) == len(TERMS)


@pytest.fixture(scope="module")
def words() -> str:
    return used()


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used(term: str, words: str) -> None:
    for name in term.replace("`", "").split(", "):
        assert name.lower() in words, f"{name} is in the glossary, and nowhere else"


def test_pages_say_copied_cached_or_kept() -> None:
    """Kept rows are HARD-KV's and PRKV's alone; a batch has no lanes."""
    wrong = []
    for page in (ROOT / "README.md", ROOT / "DESIGN.md", *(ROOT / "docs").glob("*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        wrong += [
            f"{page.name}: {found[0]}"
            for found in re.finditer(
                r"\bkept (?:rows? of (?:the|a) tail|logits?|in device memory)\b|\blanes?\b"
                r"|tail's rows are kept",
                text,
            )
        ]
    assert not wrong, "\n".join(wrong)

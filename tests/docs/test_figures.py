"""Measured figures in the pages are those of their sources: figures.py has both."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import figures
import pytest
import sources

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/site"))

import picture

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "DESIGN.md", "CHANGELOG.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
# A time, a factor, bytes of something, or a share or distance: .987.
MEASURED = re.compile(
    r"(?<![\w.,])(?:\d[\d,]*(?:\.\d+)?|\.\d+) (?:µs|ms|×|bytes)(?!\w)|(?<![\w.])\.\d{2,}\b"
)


def prose_of(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(re.sub(r"```.*?```", " ", text, flags=re.S).split())


def without_source(text: str, said: list[str]) -> list[str]:
    """Figures of a page in none of these sentences, with the words before them."""
    covered = [found.span() for each in said for found in re.finditer(re.escape(each), text)]
    return [
        text[max(found.start() - 60, 0) : found.end()]
        for found in MEASURED.finditer(text)
        if not any(begin <= found.start() and found.end() <= end for begin, end in covered)
    ]


@pytest.mark.parametrize("page", figures.SAID)
def test_figures_are_those_of_their_sources(page: str) -> None:
    text = prose_of(page)
    wrong = [
        sentence for sentence in figures.SAID[page]() if " ".join(sentence.split()) not in text
    ]
    assert not wrong, f"{page} does not say: " + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_figure_has_a_source(page: str) -> None:
    said = list(figures.SAID[page]()) if page in figures.SAID else []
    given = (*figures.GIVEN.get(page, ()), *figures.ONCE.get(page, ()))
    text = prose_of(page)
    assert not [each for each in given if each not in text]
    wrong = without_source(text, [" ".join(each.split()) for each in (*said, *given)])
    assert not wrong, f"{page}: no source in tests/docs/figures.py for\n" + "\n".join(wrong)


def test_a_figure_without_a_source_is_found() -> None:
    text = "A step takes 134 µs, or 10 × less; .987 of it. A key takes 85 bytes, a table 4 rows."
    wrong = without_source(text, ["takes 134 µs", ".987 of it"])
    assert [each.split(" ")[-2:] for each in wrong] == [["10", "×"], ["85", "bytes"]]


def test_a_note_that_changed_is_found() -> None:
    with pytest.raises(AssertionError, match=r"tried\.md does not say"):
        sources.noted("tried", "a sentence of no note")


def texts_of(png: bytes) -> dict[str, str]:
    """What a PNG carries as text. Its chunks are: length, kind, content, checksum."""
    found, at = {}, 8
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        if kind == b"tEXt":
            name, text = png[at + 8 : at + 8 + length].split(b"\0", 1)
            found[name.decode("latin-1")] = text.decode("latin-1")
        at += 12 + length
    return found


def test_the_picture_shows_the_results() -> None:
    drawn = texts_of((ROOT / "docs/pictures/speed.png").read_bytes())
    assert drawn["Description"] == picture.what_it_shows(), "run: python docs/site/picture.py"


def test_tables_of_the_lab_are_made_of_its_results() -> None:
    program = (
        "from quality import served, sources, tables\n"
        "page, ruler = tables.PAGE.read_text(), served.PAGE.read_text()\n"
        "same = tables.filled(page, sources.load()) == page\n"
        "raise SystemExit(not same or served.filled(ruler, served.load()) != ruler)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "bench", check=False)
    assert done.returncode == 0, "run in bench/: python -m quality tables --write"

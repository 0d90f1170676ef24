"""Builds the documentation into build/docs/html: python docs/site/build.py

Pages are those of docs/, with DESIGN.md, CONTRIBUTING.md and CHANGELOG.md beside them. Links to
files that are not pages become their paths.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build/docs"
SOURCE = OUT / "source"
BESIDE = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
RENAMED = {"search.md": "the-search.md"}  # Sphinx has a page of that name, to search in
HEADERS = ROOT / "cpp/include/pariskv"
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")


def linked(text: str, page: Path) -> str:
    """Links as the site has them: from page to page, or a path where there is no page."""

    def replaced(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path, _, place = target.partition("#")
        file = (page.parent / path).resolve()
        place = f"#{place}" if place else ""
        if file.suffix == ".png":
            return f"{picture}[{label}](pictures/{file.name})"
        if file.parent == ROOT / "docs" or file.name in BESIDE:
            return f"[{label}]({RENAMED.get(file.name, file.name)}{place})"
        name = file.relative_to(ROOT).as_posix()
        return f"`{name}`" if label.endswith(file.name) else f"{label} (`{name}`)"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # not inside of programs
    return "".join(p if p.startswith("```") else LINK.sub(replaced, p) for p in parts)


def lexed(text: str) -> str:
    """Without the marks that are for tests: `python no-run` is python to a reader."""
    return re.sub(r"^```python no-run$", "```python", text, flags=re.M)


def lay_out() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for file in ("conf.py", "site.css"):
        shutil.copy(ROOT / "docs/site" / file, SOURCE)
    shutil.copytree(ROOT / "docs/pictures", SOURCE / "pictures")
    shutil.copytree(HEADERS, SOURCE / "headers")
    for page in [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in BESIDE)]:
        text = page.read_text(encoding="utf-8")
        name = RENAMED.get(page.name, page.name)
        (SOURCE / name).write_text(lexed(linked(text, page)), encoding="utf-8")


if __name__ == "__main__":
    lay_out()
    sys.exit(sphinx(["-q", "-W", "--keep-going", "-b", "html", str(SOURCE), str(OUT / "html")]))

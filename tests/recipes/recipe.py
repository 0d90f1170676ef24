"""Recipes of docs/add-a-*.md: what their blocks of code do to a copy of the tree.

A comment before a block says where it goes:

    <!-- recipe: new FILE | includes "a.h" <limits> | in pariskv::cpu -->
    <!-- recipe: add FILE | before "TEXT" | includes "a.h" -->
    <!-- recipe: add FILE | after "TEXT" -->
    <!-- recipe: add FILE | in place of "TEXT" -->
    <!-- recipe: more FILE -->
    <!-- recipe: check -->

A new file gets its includes, its namespace (pariskv unless it is named) and, if it is a header,
`#pragma once`. A text has to be in the file once; `\\n` in it ends a line. `more` goes to the end
of a file that the page has made. The block of `check` is a program that ends with 0 if the recipe
works.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_COMMENT = r"<!-- recipe: (?P<order>[^\n]*?) -->\n+"
_BLOCK = r"(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)\n *```"
_MARKED = re.compile(r"(?: *)" + _COMMENT + _BLOCK, re.DOTALL)
_ANY = re.compile(r"^ *```(\w+)\n", re.MULTILINE)
_WAYS = ("before", "after", "in place of")


@dataclass(frozen=True)
class Block:
    """A block of code and what is to be done with it."""

    page: str
    action: str  # new, add, more, check
    file: str
    ways: dict[str, str]  # before, after, in place of; includes; in
    text: str


def _block(page: str, order: str, text: str) -> Block:
    head, *rest = (part.strip() for part in order.split(" | "))
    action, _, file = head.partition(" ")
    ways = {}
    for part in rest:
        name = next(way for way in (*_WAYS, "includes", "in") if part.startswith(way + " "))
        value = part[len(name) + 1 :].strip()
        if name in _WAYS:
            assert value[0] == value[-1] == '"', f"{page}: {part}: a text in quotes"
            value = value[1:-1].replace("\\n", "\n")
        ways[name] = value
    return Block(page, action, file, ways, text)


def blocks_of(page: Path) -> list[Block]:
    """The marked blocks of a page, in order."""
    found = _MARKED.finditer(page.read_text(encoding="utf-8"))
    return [_block(page.name, m["order"], _outdented(m["text"], len(m["indent"]))) for m in found]


def _outdented(text: str, by: int) -> str:
    """Without the indentation of a list that the block is in."""
    return "\n".join(line[by:] for line in text.split("\n"))


def unmarked(page: Path, languages: tuple[str, ...] = ("cpp", "cmake")) -> int:
    """How many blocks of code have no comment."""
    text = page.read_text(encoding="utf-8")
    return sum(m[1] in languages for m in _ANY.finditer(_MARKED.sub("", text)))


def _includes(block: Block) -> str:
    names = block.ways.get("includes", "").split()
    return "".join(f"#include {name}\n" for name in names)


def _new(block: Block) -> str:
    if not block.file.endswith((".h", ".cpp")):
        return block.text + "\n"
    space = block.ways.get("in", "pariskv")
    once = "#pragma once\n\n" if block.file.endswith(".h") else ""
    return f"{once}{_includes(block)}\nnamespace {space} {{\n\n{block.text}\n\n}}\n"


def _added(block: Block, text: str) -> str:
    [way] = [way for way in _WAYS if way in block.ways]
    anchor = block.ways[way]
    where = f"{block.page}: {block.file} has {text.count(anchor)} times, not once: {anchor}"
    assert text.count(anchor) == 1, where
    new = {"before": f"{block.text}\n\n{anchor}", "after": f"{anchor}\n{block.text}"}
    text = text.replace(anchor, new.get(way, block.text))
    return text.replace("#include", _includes(block) + "#include", 1)


def apply(blocks: list[Block], tree: Path) -> None:
    """Does to a tree what the blocks of a page say."""
    for block in blocks:
        path = tree / block.file
        if block.action == "new":
            assert not path.exists(), f"{block.page}: {block.file} is there"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_new(block), encoding="utf-8")
        elif block.action == "add":
            path.write_text(_added(block, path.read_text(encoding="utf-8")), encoding="utf-8")
        elif block.action == "more":
            text = path.read_text(encoding="utf-8").removesuffix("\n\n}\n")
            path.write_text(f"{text}\n\n{block.text}\n\n}}\n", encoding="utf-8")
        else:
            assert block.action == "check", f"{block.page}: no action {block.action}"

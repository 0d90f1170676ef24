"""The binary interface of C stays as it was recorded: each struct's bytes, each value, each call.

A change that is meant: make it, then `python tests/lint/test_c_abi.py --write`. A struct may grow
in the end, and so may an enumeration; all else breaks programs that were compiled before.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "cpp/include"
RECORD = ROOT / "tests/c/abi.txt"


def code_of(header: str) -> str:
    text = re.sub(
        r"/\*.*?\*/|//[^\n]*", " ", (INCLUDE / "pariskv" / header).read_text(), flags=re.S
    )
    return " ".join(re.sub(r"^#.*$", "", text, flags=re.M).split())


def structs() -> dict[str, dict[str, str]]:
    """The fields of each struct, in order, with their declarations."""
    found = {}
    for body, struct in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", code_of("c_types.h")):
        fields = {}
        for declared in filter(None, map(str.strip, body.split(";"))):
            name = re.search(r"\(\*(\w+)\)|(\w+)(?:\[\d+\])?$", declared)
            assert name, declared
            fields[name[1] or name[2]] = declared
        found[struct] = fields
    return found


def values() -> list[str]:
    return [
        value
        for body in re.findall(r"enum \w+ \{(.*?)\};", code_of("c_types.h"))
        for value in re.findall(r"(PARISKV_\w+)", body)
    ]


def calls() -> list[str]:
    """What the library defines, and what it calls."""
    types = re.findall(r"typedef [^;{}]*\(\*\w+\)\([^;]*\);", code_of("c_types.h"))
    return types + sorted(
        " ".join(found.split())
        for found in re.findall(r"PARISKV_API ([^;]*?\([^;]*\));", code_of("c.h"))
    )


def layout() -> str:
    """Offsets, sizes and values as the compiler of this machine has them."""
    lines = []
    for struct, fields in structs().items():
        lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
        lines += [
            f'printf("{struct}.{field} %zu %zu {declared}\\n", offsetof({struct}, {field}), '
            f"sizeof((({struct}*)0)->{field}));"
            for field, declared in fields.items()
        ]
    lines += [f'printf("{value} %d\\n", (int)({value}));' for value in values()]
    program = '#include <stdio.h>\n#include "pariskv/c.h"\nint main(void) {%s return 0; }\n'
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "layout.c")
        source.write_text(program % "\n".join(lines))
        flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]
        subprocess.run(["cc", *flags, source, "-o", source.with_suffix("")], check=True)
        return subprocess.run(
            [source.with_suffix("")], capture_output=True, text=True, check=True
        ).stdout


def interface() -> str:
    return layout() + "\n".join(calls()) + "\n"


def test_the_interface_is_the_recorded_one() -> None:
    assert interface() == RECORD.read_text(), (
        "programs that were compiled before may break; if that is meant: "
        "python tests/lint/test_c_abi.py --write"
    )


def test_structs_have_no_padding() -> None:
    """So that a new field makes a struct longer, and its size tells whether a program has it."""
    sizes: dict[str, int] = {}
    ends: dict[str, int] = {}
    for line in layout().splitlines():
        name, *numbers = line.split()
        struct, _, field = name.partition(".")
        if field:
            offset, size = map(int, numbers[:2])
            assert offset == ends.get(struct, 0), f"padding before {name}"
            ends[struct] = offset + size
        elif name.startswith("pariskv_"):
            sizes[name] = int(numbers[0])
    assert sizes == ends


def test_every_struct_but_an_array_element_begins_with_its_size() -> None:
    without = {struct for struct, fields in structs().items() if next(iter(fields)) != "size"}
    assert without == {"pariskv_schedule_step"}


def test_every_call_of_a_cache_is_there_in_c() -> None:
    text = (INCLUDE / "pariskv/cache.h").read_text()
    body = text[text.index("class PARISKV_API Cache {") : text.index("  class PARISKV_LOCAL Impl;")]
    of_cpp = set(re.findall(r"^  \w[\w:<>&* ]* (\w+)\(", body, re.M)) - {"Cache"}
    of_c = {found[1] for call in calls() if (found := re.search(r"pariskv_cache_(\w+)\(", call))}
    assert of_cpp - of_c == {"batch"}, "batch: pariskv_batch_create"
    assert of_c - of_cpp == {"create", "destroy"}


if __name__ == "__main__" and "--write" in sys.argv:
    RECORD.write_text(interface())

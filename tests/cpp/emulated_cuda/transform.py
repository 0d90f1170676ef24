"""One CUDA source as C++ for the emulator: `transform.py SOURCE TARGET`.

CUDA's own syntax becomes calls of device.h: launches, variables in shared memory. Everything else
stays as it is, line by line, so that the compiler's messages and a debugger name the source. Inline
PTX is in cpp/cuda/device/ptx.cuh only, and this folder has its own version of that header.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

STRING = r'"(?:\\.|[^"\\])*"'


def characters(text: str, start: int = 0) -> Iterator[tuple[int, str, int]]:
    """Where, what and how deep in brackets: the characters outside of string literals."""
    depth = 0
    for found in re.finditer(rf"{STRING}|.", text[start:], re.S):
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if not found[0].startswith('"'):
            yield start + found.start(), found[0], depth


def closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` is closed."""
    return next(at for at, _, depth in characters(text, opening) if depth == 0)


def replace_launches(text: str) -> str:
    """Kernel<<<grid, block, shared bytes, stream>>>(arguments)."""
    while found := re.search(r"([\w.:]+(?:<[\w:, ]*>)?)<<<", text):
        end = text.index(">>>", found.end())
        last = closing(text, end + 3) + 1
        name, arguments = found[1], text[end + 3 : last]
        launch = f"{{{text[found.end() : end]}}}, [&] {{ {name}{arguments}; }}"
        text = f'{text[: found.start()]}::emulator::launch("{name}", {launch}){text[last:]}'
    return text


def replace_shared(text: str) -> str:
    """Every block has its own; a variable is known by its place in the source."""
    attributes = r"(?:__align__\(\d+\)\s+)?"
    text = re.sub(
        rf"extern\s+__shared__\s+{attributes}([\w ]+?)\s+(\w+)\[\];",
        r"auto* \2 = reinterpret_cast<\1*>(::emulator::dynamic_shared());",
        text,
    )
    return re.sub(
        r"__shared__\s+([^;=]+?)\s+(\w+)((?:\[[^;]*?\])*);",
        r"static const char \2_key = 0; auto& \2 = ::emulator::static_shared<\1\3>(&\2_key);",
        text,
    )


def transform(text: str, name: str) -> str:
    # Such a parameter lies with the launch, which keeps a copy, and not with the thread.
    text = re.sub(r"const\s+__grid_constant__\s+(\w+)\s+(\w+)", r"const \1& \2", text)
    text = replace_shared(replace_launches(text))
    # The compiler need not warn of what nvcc looks after; in a source, -w says so.
    quiet = "#pragma GCC system_header\n" if name.endswith(".cuh") else ""
    return f'{quiet}#include "device.h"\n#line 1 "{name}"\n{text}'


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(transform(source.read_text(), str(source)))


if __name__ == "__main__":
    main()

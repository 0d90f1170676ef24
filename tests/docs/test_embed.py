"""Programs of the page on embedding compile, without a warning, as what they say they are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/embed.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```(c|cpp)\n(.*?)```", PAGE, re.DOTALL)
COMPILERS = {"c": ["cc", "-std=c11", "-pedantic"], "cpp": ["c++", "-std=c++17"]}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def test_there_are_programs_of_both_languages() -> None:
    assert sorted(language for language, _ in PROGRAMS) == ["c", "c", "c", "cpp", "cpp"]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_compiles(number: int, tmp_path: Path) -> None:
    language, text = PROGRAMS[number]
    source = tmp_path / f"program.{language}"
    source.write_text(text, encoding="utf-8")
    command = [*COMPILERS[language], *WARNINGS, f"-I{ROOT / 'cpp/include'}", "-fsyntax-only"]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_of_errors_has_every_status() -> None:
    header = (ROOT / "cpp/include/pariskv/c_types.h").read_text(encoding="utf-8")
    [values] = re.findall(r"enum pariskv_status_code \{(.*?)\};", header, re.DOTALL)
    statuses = set(re.findall(r"PARISKV_\w+(?= =)", values)) - {"PARISKV_OK"}
    assert statuses == set(re.findall(r"^\| `(PARISKV_\w+)` \|", PAGE, re.MULTILINE))

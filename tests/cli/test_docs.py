"""What docs/cli.md shows is what the commands print, where that does not depend on the machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pariskv_core.cli import _COMMANDS, _parser, main

PAGE = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text(encoding="utf-8")
# A prompt, a command and what it prints.
SHOWN = re.findall(r"```\n\$ pariskv (.*)\n((?:.*\n)*?)```", PAGE)


def test_every_command_has_a_section_and_an_example():
    assert re.findall(r"^## (.*)$", PAGE, re.M) == list(_COMMANDS)
    assert {command.split()[0] for command, _ in SHOWN} == set(_COMMANDS)
    for name in _COMMANDS:
        assert re.search(rf"^\| `{name}` \|", PAGE, re.M)


@pytest.mark.parametrize("command", [command for command, _ in SHOWN])
def test_an_example_is_a_command_that_is_understood(command: str):
    assert _parser().parse_args(shlex.split(command)).command in _COMMANDS


def test_options_named_on_the_page_exist(capsys):
    known = set()
    for name in _COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert set(re.findall(r"`(--[\w-]+)", PAGE)) <= known


def test_plan_prints_what_the_page_shows(capsys):
    [(command, shown)] = [pair for pair in SHOWN if pair[0].startswith("plan ")]
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown

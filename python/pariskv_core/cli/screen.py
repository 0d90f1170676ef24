"""Where commands write: tables in a terminal, plain columns in a pipe, or one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pariskv_core.cli.failures import need

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pariskv_core.cli.progress import Stages

PIPED_WIDTH = 100  # unless COLUMNS says otherwise


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else PIPED_WIDTH


class Screen:
    """rich is loaded when something is first drawn: --json works without it."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        if self._console is None:
            need("rich")
            from rich.console import Console

            console = Console(quiet=self.as_json)
            if not console.is_terminal:
                console = Console(width=_piped_width(), quiet=self.as_json)
            self._console = console
        return self._console

    @property
    def live(self) -> bool:
        """Whether lines can be drawn over."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, *renderables: RenderableType) -> None:
        """Text is taken as it is, without markup."""
        if self.as_json:
            return
        from rich.text import Text

        for each in renderables:
            drawn = Text(each) if isinstance(each, str) else each
            if self.console.is_terminal:
                self.console.print(drawn)
                continue
            with self.console.capture() as captured:
                self.console.print(drawn)
            lines = captured.get().splitlines()
            self.write("".join(line.rstrip() + "\n" for line in lines))

    def say(self, text: str = "", style: str = "") -> None:
        if not self.as_json:
            from rich.text import Text

            self.show(Text(text, style=style))

    def write(self, text: str) -> None:
        """At once, and without a line's end of its own: text that comes piece by piece."""
        if not self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def table(
        self,
        rows: Sequence[Sequence[Any]],
        header: Sequence[str] = (),
        *,
        title: str = "",
        right: Sequence[int] = (),
    ) -> None:
        """`right`: columns of numbers."""
        if self.as_json:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        terminal = self.console.is_terminal
        if title:
            self.say(title, style="bold")
        table = Table(
            box=box.SIMPLE_HEAD if terminal else None,
            show_header=bool(header),
            pad_edge=terminal,
            padding=(0, 2, 0, 0),
            header_style="dim",
        )
        columns = len(header or rows[0])
        for i in range(columns):
            table.add_column(
                header[i] if header else "",
                justify="right" if i in right else "left",
                style="bold" if i == 0 else "",
                overflow="fold",
                no_wrap=i in right,
            )
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
        self.show(table)
        self.say()

    def stages(self) -> AbstractContextManager[Stages]:
        from pariskv_core.cli.progress import Stages

        return Stages(self)

    def record(self, found: dict[str, Any]) -> None:
        """What a command found, for programs."""
        if self.as_json:
            sys.stdout.write(json.dumps(found, indent=2, default=float) + "\n")

"""Stages of a long run: bars in a terminal, a few plain lines in a file, nothing in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from pariskv_core.cli.screen import Screen

_TITLE_WIDTH = 32


class Stages:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._bars: Progress | None = None

    def __enter__(self) -> Stages:
        if not self._screen.as_json and self._screen.live:
            self._bars = self._made()
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _made(self) -> Progress:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        return Progress(
            TextColumn(f"{{task.description:<{_TITLE_WIDTH}}}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._screen.console,
            # Drawing takes time from what is being timed.
            refresh_per_second=4,
        )

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called with each piece of `total` that is done."""
        begin = time.perf_counter()
        if self._bars is not None:
            bars, task = self._bars, self._bars.add_task(title, total=total)
            yield lambda done: bars.advance(task, done)
            bars.update(task, completed=total)
            return
        yield lambda done: None
        seconds = time.perf_counter() - begin
        self._screen.say(f"{title:<{_TITLE_WIDTH}} {seconds:6.1f} s")

"""Stages of a long run: bars in a terminal, a few plain lines in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_TITLE_WIDTH = 32


class Stages:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._bars = Progress(
            TextColumn(f"{{task.description:<{_TITLE_WIDTH}}}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            # Drawing takes time from what is being timed.
            refresh_per_second=4,
        )

    def __enter__(self) -> Stages:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called with each piece of `total` that is done."""
        begin = time.perf_counter()
        if self._live:
            task = self._bars.add_task(title, total=total)
            yield lambda done: self._bars.advance(task, done)
            self._bars.update(task, completed=total)
            return
        yield lambda done: None
        seconds = time.perf_counter() - begin
        self._console.print(f"{title:<{_TITLE_WIDTH}} {seconds:6.1f} s", highlight=False)

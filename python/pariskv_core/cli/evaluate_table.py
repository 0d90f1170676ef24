"""What `eval` shows of a result: a line for each setting, a table of tasks, and what was lost."""

from __future__ import annotations

from collections.abc import Sequence

from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count
from pariskv_core.evaluation.record import AVERAGE, Cell, Loss, Result

_LOSSES = 10  # shown; the JSON has all
_CHARACTERS = 60  # of an answer


def show(screen: Screen, result: Result) -> None:
    if screen.as_json:
        return
    cells = result.cells()
    compared = any(cell.same is not None for cell in cells)
    for length in result.lengths:
        here = [cell for cell in cells if cell.length == length]
        header = ["", "score", "95 %"]
        header += ["less full", "same", "lost", "gained", "text"] if compared else []
        header += ["error", "at most", "worst"]
        rows, before = [], ""
        for cell in here:
            if cell.task != before:
                rows.append([cell.task, *[""] * (len(header) - 1)])
            rows.append(_row(cell, compared))
            before = cell.task
        samples = max((cell.count for cell in here if cell.task != AVERAGE), default=0)
        screen.table(
            rows,
            header,
            title=f"{length:,} tokens, {count(samples, 'sample')} a task",
            right=range(1, len(header) - 1),
        )
    _summary(screen, result, cells)
    _rights(screen, result, cells)
    _losses(screen, result.losses())
    silent = _silent(result)
    if silent:
        screen.say(
            f"Nothing was searched at {silent}: texts so short are attended to in full, "
            "so settings do not differ there.",
            style="yellow",
        )


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _row(cell: Cell, compared: bool) -> list[str]:
    found = [f"  {cell.setting}", percent(cell.score), _within(cell.within)]
    if compared:
        if cell.same is None or cell.agreement is None:
            found += [""] * 5
        else:
            same = f"{100 * cell.same / cell.compared:.0f} ({_within(cell.agreement)})"
            counts = [str(cell.lost), str(cell.gained), str(cell.equal)]
            assert cell.beside is not None and cell.beside_within is not None
            found += [points(cell.beside, cell.beside_within), same, *counts]
    errors = (cell.mean_error, cell.worst_error)
    found += ["–" if error is None else f"{error:.2g}" for error in errors]
    worst = cell.worst
    if worst is None or worst.score == 1:
        return [*found, ""]
    # Of all tasks it is one that a line above names.
    return [*found, "" if cell.task == AVERAGE else f"#{worst.index}: {100 * worst.score:.0f}"]


def points(mean: float, within: Sequence[float], between: str = "±") -> str:
    """As -0.2±0.4, of a mean and its interval."""
    # Plus nothing: -0 is 0 then.
    return f"{round(100 * mean, 1) + 0.0:+.1f}{between}{100 * (within[1] - mean):.1f}"


def _within(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * low:.0f}–{100 * high:.0f}"


def _summary(screen: Screen, result: Result, cells: list[Cell]) -> None:
    """Scores by length, where there are several lengths."""
    if len(result.lengths) < 2:
        return
    task = AVERAGE if len(result.tasks) > 1 else result.tasks[0]
    own = {(cell.setting, cell.length): cell for cell in cells if cell.task == task}
    rows = []
    for setting in result.settings:
        row = [setting]
        for length in result.lengths:
            cell = own.get((setting, length))
            row.append(f"{percent(cell.score)} ({_within(cell.within)})" if cell else "–")
        rows.append(row)
    header = ["", *(f"{length:,}" for length in result.lengths)]
    screen.table(rows, header, title=f"Score by tokens, {task}", right=range(1, len(header)))


def _rights(screen: Screen, result: Result, cells: list[Cell]) -> None:
    """Of what full attention answers rightly, how much is lost."""
    for setting in result.settings:
        own = [
            cell
            for cell in cells
            if cell.setting == setting and cell.right and cell.task != AVERAGE
        ]
        right, lost = sum(cell.right for cell in own), sum(cell.right_lost for cell in own)
        if right:
            screen.say(
                f"{setting} loses {lost:,} of {right:,} samples that full attention has right "
                f"({percent(lost / right)} %)"
            )


def _losses(screen: Screen, losses: list[Loss]) -> None:
    if not losses:
        return
    screen.say(f"{count(len(losses), 'sample')} lost: full attention's score is higher", "bold")
    for loss in losses[:_LOSSES]:
        own, full = loss.answer, loss.full
        error = "no error reported"
        if own.mean_error is not None and own.worst_error is not None:
            error = f"reported error {own.mean_error:.2g}, worst {own.worst_error:.2g}"
        screen.say(
            f"{own.task} #{own.index} at {own.length:,}, {own.setting}: "
            f"{100 * own.score:.0f} in place of {100 * full.score:.0f}; {error}"
        )
        screen.say(f"  expected  {_cut(', '.join(own.expected))}")
        screen.say(f"  full      {_cut(full.answer)}")
        screen.say(f"  setting   {_cut(own.answer)}")
    if len(losses) > _LOSSES:
        screen.say(f"and {len(losses) - _LOSSES} more, in the JSON")
    screen.say()


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CHARACTERS else line[: _CHARACTERS - 1] + "…"


def _silent(result: Result) -> str:
    """Lengths at which the engine answered and no step searched."""
    searched: dict[int, set[bool]] = {}
    for each in result.answers:
        if each.setting != result.baseline and each.searched is not None:
            searched.setdefault(each.length, set()).add(each.searched)
    return ", ".join(
        f"{length:,} tokens" for length in sorted(searched) if searched[length] == {False}
    )

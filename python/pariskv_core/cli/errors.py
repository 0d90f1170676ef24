"""The error that a step predicts for its outputs, beside its distance from full attention.

Both are shares of the spread of values: how far a kv head's values are from their mean.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pariskv_core.cli.sparse_run import Query, Run

LEAST, MOST = 0.5, 2.0  # a prediction between these times the true error holds
# By rounding alone, relative: two outputs in 16 bits differ by .24 to .3 of their type's eps (root
# mean square of normal numbers), and sums in 32 bits by less than this.
_PART_OF_EPS, _SUMS = 0.3, 1e-5
_CHUNK = 8192  # tokens read at a time


@dataclass(frozen=True)
class Errors:
    """Root mean squares over searches: steps, layers and kv heads."""

    predicted: float
    true: float
    relative: float  # the distance over the length of full attention's output
    rounding: float  # what `true` may be without any estimate
    searches: int

    @property
    def ratio(self) -> float | None:
        """Predicted over true; None where there is nothing but rounding."""
        return None if self.exact or self.true == 0 else self.predicted / self.true

    @property
    def exact(self) -> bool:
        return max(self.predicted, self.true) <= self.rounding

    @property
    def holds(self) -> bool | None:
        """None: there is nothing but rounding."""
        return None if self.exact else LEAST * self.true <= self.predicted <= MOST * self.true

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "holds": self.holds}


@dataclass
class Tally:
    """Errors of searches as they come, as squares."""

    _squares: list[NDArray[np.float64]] = field(default_factory=list)  # each (kv_heads, 4)

    def add(
        self, predicted: Any, out: torch.Tensor, full: torch.Tensor, spread: torch.Tensor
    ) -> None:
        """Of one step in one layer.

        predicted  (kv_heads), as a step returns it
        out, full  (query_heads, value_dim): the step's output, and full attention's
        spread     (kv_heads): of the values
        """
        off, length = (
            rows.double().square().reshape(len(spread), -1).mean(dim=1)
            for rows in (out.double() - full.double(), full)
        )
        unit = spread.double().square()
        rounding = max(_PART_OF_EPS * torch.finfo(out.dtype).eps, _SUMS)
        parts = torch.stack([off / unit, off / length, length / unit * rounding**2], dim=1)
        squares = np.square(np.asarray(predicted, np.float64))
        self._squares.append(np.concatenate([squares[:, None], parts.cpu().numpy()], axis=1))

    def join(self, other: Tally) -> None:
        self._squares += other._squares

    def together(self) -> Errors | None:
        """None: nothing was estimated. Searches without a finite error are left out."""
        squares = np.concatenate([np.empty((0, 4)), *self._squares])
        squares = squares[np.isfinite(squares).all(axis=1)]
        if len(squares) == 0:
            return None
        predicted, true, relative, rounding = np.sqrt(squares.mean(axis=0)).tolist()
        return Errors(predicted, true, relative, rounding, len(squares))


@dataclass
class _Sums:
    rows: int
    values: torch.Tensor  # (kv_heads, value_dim) float64
    squares: torch.Tensor


@dataclass
class Watched:
    """The errors of a watched run's steps; rows of a layer are read once for all steps."""

    tally: Tally = field(default_factory=Tally)
    _sums: dict[int, _Sums] = field(default_factory=dict)  # by layer of the engine

    def add(self, run: Run) -> None:
        """Those of the last step, in every layer."""
        for query in run.queries.values():
            why = run.engine.explain(
                query.engine_layer, run.sequence, query.rows, **query.logits.options()
            )
            self.add_layer(run, query, why)

    def add_layer(self, run: Run, query: Query, why: Any) -> None:
        """`why`: what the engine explains of this query."""
        predicted = getattr(why.details, "error", None)  # other policies predict none
        if not why.searched or predicted is None or len(predicted) == 0:
            return
        full = run.engine.attend(
            query.engine_layer, [run.sequence], query.rows[None], **query.logits.options()
        )
        self.tally.add(predicted, query.out, full[0], self._spread(run, query))

    def _spread(self, run: Run, query: Query) -> torch.Tensor:
        """(kv_heads): of the values that there are, as a root mean square."""
        engine, layer, config = run.engine, query.engine_layer, run.engine.config
        zeros = torch.zeros(
            config.kv_heads, config.value_dim, dtype=torch.float64, device=query.rows.device
        )
        sums = self._sums.setdefault(layer, _Sums(0, zeros, zeros.clone()))
        length = engine.length(run.sequence, layer)
        while sums.rows < length:
            end = min(sums.rows + _CHUNK, length)
            k, v = (
                query.rows.new_empty((end - sums.rows, config.kv_heads, dim))
                for dim in (config.head_dim, config.value_dim)
            )
            engine.read(layer, run.sequence, sums.rows, end, out=(k, v))
            sums.values += v.double().sum(dim=0)
            sums.squares += v.double().square().sum(dim=0)
            sums.rows = end
        mean = sums.values / length
        return (sums.squares / length - mean.square()).mean(dim=-1).clamp(min=0).sqrt()


def sentence(errors: Errors, subject: str) -> str:
    """For people. `subject`: what has the errors, as "The step"."""
    said = (
        f"{subject} predicts an error of {errors.predicted:.2g} of the spread of values; the true "
        f"one is {errors.true:.2g}, or {errors.relative:.1%} of the output's length"
    )
    if errors.exact:
        return f"{said}: nothing but rounding."
    times = "" if errors.ratio is None else f"predicted is {errors.ratio:.2f} times true, "
    return f"{said}: {times}{'within' if errors.holds else 'not within'} {LEAST:g} to {MOST:g}."

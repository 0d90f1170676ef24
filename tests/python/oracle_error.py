"""The error that a sample adds to a step, and a budget by it, in NumPy: docs/search.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
from oracle import Summary

LEAST_ROWS = 16
NOISE = 0.0184  # of an estimated logit, for each unit of a query's length and a key's weight


def spreads(summary: Summary, chosen: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(queries, chosen): how far estimated logits are off. `lengths`: of queries that are balanced
    as keys are, times the scale of a logit."""
    heaviest = summary.weights[chosen].max(axis=1).astype(np.float64)
    return NOISE * lengths[:, None] * heaviest


def mean_squares(estimates: np.ndarray, off: np.ndarray, everything: np.ndarray) -> np.ndarray:
    """Mean over the group of squared shares, for logits that may be off: at most 1 of a head.
    Heads without a finite L_h do not count."""
    heard = np.isfinite(everything)
    raised = estimates[heard] + off[heard] ** 2 - everything[heard, None]
    return np.exp(2 * np.minimum(raised, 0)).mean(axis=0)


@dataclass
class HeadError:
    """Of one kv head."""

    weight: float  # keys that a row of the sample stands for
    squares: np.ndarray  # of candidates that are left once 0, 1, 2, … of the best rows are taken
    rest: float  # of keys that are no candidates
    logits: np.ndarray  # (group, rows of the tail), those of the copies
    tail: np.ndarray  # (rows of the tail) positions
    best: np.ndarray  # positions of the best rows
    worth: np.ndarray  # of these
    exact: np.ndarray  # (group, best): logits of these
    resident: np.ndarray  # (group) log-sum-exp of the resident rows

    @property
    def left(self) -> np.ndarray:
        """The error that the sample adds for candidates, before it is known which are drawn."""
        return np.sqrt(self.squares * max(self.weight - 1, 0))

    def allowed(self, error: float) -> float:
        """Of the budget, what may be left to candidates: no row takes away the rest. Where that
        has more than half of the budget, as much may be left."""
        rest = min(self.rest * max(self.weight - 1, 0), error**2)
        return float(np.sqrt(max(error**2 - rest, rest)))

    def rows(self, error: float | None) -> int:
        if error is None:
            return len(self.best)
        return rows_within(self.left, self.allowed(error), worth_bins(self.worth))

    def told(self, taken: np.ndarray) -> float:
        """The error of a step that has taken these rows, the first of the best ones."""
        count = len(taken)
        sampled = self.logits[:, ~np.isin(self.tail, taken)]
        heads = [self.exact[:, :count], sampled + np.log(self.weight), self.resident[:, None]]
        everything = oracle.log_sum_exp(np.concatenate(heads, axis=1))
        heard = np.isfinite(everything)
        shares = self.weight * np.exp(sampled[heard] - everything[heard, None])
        drawn = np.square(shares).sum(axis=1).mean()
        squares = max(drawn, self.squares[count])
        return float(np.sqrt(min(squares, 1.0) * max(1 - 1 / self.weight, 0)))


def squares_left(squares: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Once 0, 1, 2, … of the best are taken."""
    taken = np.concatenate([[0], np.cumsum(squares[best])])
    return np.maximum(squares.sum() - taken, 0)


def worth_bins(worth: np.ndarray) -> np.ndarray:
    """Eighths of octaves from 2^-16 to 1; 0: less than that."""
    bits = worth.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.clip((bits >> 20) - ((127 - 16) << 3) + 1, 0, 127)


def rows_within(errors: np.ndarray, allowed: float, bins: np.ndarray) -> int:
    """How many rows until no more than that is left, a bin at a time, and the first bin's as many
    as there are; 16 at least.

    errors  that 0, 1, 2, … rows leave
    """
    most, enough = len(bins), np.flatnonzero(errors <= allowed)
    if not len(enough) or enough[0] > (bins > 0).sum():
        return most
    first = int(enough[0])
    needed = 0 if first == 0 else int((bins >= bins[first - 1]).sum())
    return min(most, max(LEAST_ROWS, needed))

"""Intervals of means, without a package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959964  # standard deviations of a normal number to either side of 95 %


class Interval(NamedTuple):
    low: float
    high: float


def interval(mean: float, count: int) -> Interval:
    """95 % for the mean of numbers from 0 to 1: Wilson's.

    A bootstrap of equal scores has no width, and all right or all wrong is what most cells are.
    Scores between 0 and 1 vary less than rights and wrongs of their mean: for them it is wide.
    """
    if count < 1:
        return Interval(0.0, 1.0)
    square = _Z * _Z
    centre = mean + square / (2 * count)
    half = _Z * math.sqrt(max(mean * (1 - mean), 0.0) / count + square / (4 * count * count))
    whole = 1 + square / count
    low, high = (centre - half) / whole, (centre + half) / whole
    # Rounding must not leave a mean of 0 or 1 outside.
    return Interval(max(min(low, mean), 0.0), min(max(high, mean), 1.0))


def of_mean(values: Sequence[float]) -> Interval:
    """95 % for the mean of numbers of any size, as differences of paired scores are: a normal's.

    Of many numbers, most of which are 0: of equal ones it has no width.
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Interval(-math.inf, math.inf)
    variance = sum((each - mean) ** 2 for each in values) / (len(values) - 1)
    half = _Z * math.sqrt(variance / len(values))
    return Interval(mean - half, mean + half)


def share_below(value: float, values: Sequence[float]) -> float:
    """The share of `values` that are smaller, and half of those that are equal."""
    smaller = sum(each < value for each in values)
    return (smaller + 0.5 * sum(each == value for each in values)) / len(values)

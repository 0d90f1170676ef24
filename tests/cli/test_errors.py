"""Predicted errors beside true ones: how they are put together, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pariskv_core.cli.errors import Errors, Tally, sentence


def tally_of(predicted: list[float], off: float, spread: float = 2.0) -> Tally:
    """Two kv heads of two query heads, whose outputs have length 1 in each dimension."""
    full = torch.ones(4, 8)
    signs = torch.tensor([1.0, -1.0] * 4)
    tally = Tally()
    tally.add(predicted, full + off * signs, full, torch.full((2,), spread))
    return tally


def errors_of(**fields: float) -> Errors:
    known = {"predicted": 0.01, "true": 0.01, "relative": 0.02, "rounding": 1e-5, "searches": 4}
    return Errors(**{**known, **fields})


def test_errors_are_shares_of_the_spread_and_of_the_length():
    found = tally_of([0.03, 0.05], off=0.1).together()
    assert found is not None and found.searches == 2
    assert found.predicted == pytest.approx(np.sqrt((0.03**2 + 0.05**2) / 2))
    assert found.true == pytest.approx(0.1 / 2, rel=1e-5)
    assert found.relative == pytest.approx(0.1, rel=1e-5)
    assert found.ratio == pytest.approx(found.predicted / 0.05, rel=1e-5)
    assert found.holds


def test_steps_are_put_together_by_their_squares():
    tally = tally_of([0.1, 0.1], off=0.2)
    tally.join(tally_of([0.1, 0.3], off=0.6))
    found = tally.together()
    assert found is not None and found.searches == 4
    assert found.predicted == pytest.approx(np.sqrt((3 * 0.1**2 + 0.3**2) / 4))
    assert found.true == pytest.approx(np.sqrt((0.1**2 + 0.3**2) / 2), rel=1e-5)


def test_searches_without_a_finite_error_are_left_out():
    assert Tally().together() is None
    assert tally_of([np.nan, np.nan], off=0.1).together() is None
    found = tally_of([np.nan, 0.05], off=0.1).together()
    assert found is not None
    assert (found.searches, found.predicted) == (1, pytest.approx(0.05))


@pytest.mark.parametrize(
    ("predicted", "holds"), [(0.0049, False), (0.0051, True), (0.0199, True), (0.0201, False)]
)
def test_a_prediction_holds_within_a_factor_of_two(predicted: float, holds: bool):
    errors = errors_of(predicted=predicted)
    assert errors.holds is holds
    assert sentence(errors, "The step").endswith(f"{'within' if holds else 'not within'} 0.5 to 2.")
    assert errors.record()["holds"] is holds


def test_rounding_says_nothing_of_a_prediction():
    exact = tally_of([0.0, 0.0], off=1e-6).together()
    assert exact is not None
    assert exact.ratio is exact.holds is None
    assert sentence(exact, "The step").endswith("nothing but rounding.")
    foreseen = tally_of([0.0, 0.0], off=0.1).together()  # an error that nothing has predicted
    assert foreseen is not None and foreseen.holds is False
    feared = tally_of([0.1, 0.1], off=1e-6).together()
    assert feared is not None and feared.holds is False
    none = errors_of(true=0.0, relative=0.0)
    assert none.ratio is None and none.holds is False
    assert sentence(none, "The step").endswith("0.0% of the output's length: not within 0.5 to 2.")


def test_rounding_is_that_of_the_outputs():
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    full, out = rows.bfloat16(), (rows * (1 + 1e-3 * torch.randn_like(rows))).bfloat16()
    tally = Tally()
    tally.add([0.0], out, full, torch.ones(1))
    found = tally.together()
    assert found is not None and found.rounding == pytest.approx(0.3 * 2**-7, rel=0.1)
    assert 0.5 * found.rounding < found.true < 1.1 * found.rounding

"""Errors on held-out points: right in number, and of points that the fit has not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.profiles.fit import (
    FitError,
    FittedLatency,
    all_together,
    held_out_errors,
    relative_errors,
)
from tests.planner.profiles.test_fit import ROOFLINE, T4, grid, row


def test_rows_of_a_law_are_foretold() -> None:
    errors = held_out_errors(grid(), ROOFLINE, T4, "float16")
    assert [(each.bits, each.phase) for each in errors] == [(16, "prefill"), (16, "decode")]
    assert all((each.fitted, len(each.errors)) == (9, 3) for each in errors)
    assert all_together(errors).most < 0.02


def test_a_held_out_row_does_not_enter_the_fit() -> None:
    """One wrong row in four: its own error is what it is wrong by, the others have hardly any."""
    rows = list(grid())
    ordered = sorted(
        (each for each in rows if each.phase == "decode"),
        key=lambda each: (each.batch_size * each.context_length, each.batch_size),
    )
    wrong = ordered[2]
    rows[rows.index(wrong)] = replace(wrong, seconds=2 * wrong.seconds)
    found = {each.phase: each for each in held_out_errors(rows, ROOFLINE, T4, "float16")}
    assert found["decode"].errors[0] == pytest.approx(0.5, abs=0.01)
    assert max(found["decode"].errors[1:]) < 0.02


def test_relative_errors_and_their_summary() -> None:
    model = FittedLatency(grid(), ROOFLINE)
    doubled = [replace(each, seconds=2 * each.seconds) for each in grid()]
    errors = relative_errors(model, T4, doubled, "float16")
    assert errors == pytest.approx([0.5] * len(doubled), abs=0.01)
    error = FitError(16, "decode", 3, (0.0, 0.1, 0.2))
    assert (error.mean, error.most) == pytest.approx((0.1, 0.2))
    assert error.percentile_95 == pytest.approx(float(np.quantile([0, 0.1, 0.2], 0.95)))


def test_too_few_rows_have_no_error() -> None:
    assert held_out_errors((row("decode", 1, 64),), ROOFLINE, T4, "float16") == ()

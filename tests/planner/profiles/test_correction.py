"""The correction of fitted times: it finds what is smooth, and makes nothing of noise."""

from __future__ import annotations

import numpy as np
import pytest

from planner.profiles.layer_fit import NO_CORRECTION, fit_correction

GRID = [(batch, length) for batch in (1, 3, 8, 20) for length in (16, 60, 250, 1000)]


def departure(batch: int, length: int) -> float:
    """A kernel that loses up to 30 % with the batch, less for long prompts."""
    return 1.0 + 0.3 * np.tanh(np.log(batch) - 1.0) / (1.0 + length / 500)


def test_a_smooth_departure_is_foretold_between_the_points() -> None:
    found = fit_correction(GRID, np.array([departure(*each) for each in GRID]))
    for unseen in ((2, 30), (5, 120), (12, 500), (6, 700)):
        assert found.factor(*unseen) == pytest.approx(departure(*unseen), rel=0.03)
        assert abs(departure(*unseen) - 1) < 0.3


def test_far_from_every_point_the_terms_stand_alone() -> None:
    found = fit_correction(GRID, np.full(len(GRID), 1.2))
    assert found.factor(4, 100) == pytest.approx(1.2, rel=0.02)
    assert found.factor(10**9, 10**9) == pytest.approx(1.0, abs=1e-6)


def test_noise_hardly_moves_anything() -> None:
    draw = np.random.default_rng(0)
    moved = []
    for _ in range(20):
        found = fit_correction(GRID, np.exp(draw.normal(0, 0.05, len(GRID))))
        moved.append(np.mean([abs(found.factor(b + 1, s + 9) - 1) for b, s in GRID]))
    assert np.mean(moved) < 0.02


def test_few_points_or_equal_ones_give_none() -> None:
    assert fit_correction(GRID[:7], np.full(7, 1.3)) is NO_CORRECTION
    assert fit_correction(GRID, np.ones(len(GRID))) is NO_CORRECTION
    assert NO_CORRECTION.factor(3, 0) == 1.0

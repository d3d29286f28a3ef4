"""One programme after the other from the last basis, against scipy's own solves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from planner.optimiser.relaxation import LinearModel


@pytest.mark.parametrize("seed", range(3))
def test_every_objective_and_limit_in_turn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 6, (5, 7)).astype(float)
    least, most = np.full(5, -np.inf), rng.uniform(4, 20, 5)
    least[-1] = most[-1]  # an equation
    bounds = np.zeros(7), rng.uniform(1, 6, 7)
    model = LinearModel(rows, least, most, bounds)
    for limit in (1e3, 12.0, 3.0, -40.0, 5.0):
        model.limit_row(0, limit)
        upper = np.where(np.arange(4) == 0, limit, most[:4])
        for cost in rng.normal(size=(3, 7)):
            found = model.minimum(cost)
            expected = linprog(
                cost, rows[:4], upper, rows[4:], most[4:], list(zip(*bounds, strict=True))
            )
            assert found.infeasible == (expected.status == 2)
            assert (found.point is None) == (expected.x is None)
            if found.point is not None:
                assert found.value == pytest.approx(expected.fun, abs=1e-7)
                assert found.marginals[:4] == pytest.approx(expected.ineqlin.marginals, abs=1e-7)

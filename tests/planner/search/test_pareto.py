"""The front and bounded choices against exhaustive search over random sets of pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from planner.search.pareto import ThetaPoint, fastest_within, finest_within, front
from quant.common.errors import InfeasibleError

Pairs = list[tuple[float, float]]


class Attainable:
    """A finite set of (latency, omega), solved for any theta by looking at all of it."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        latency = generator.uniform(1, 10, 60)
        omega = np.maximum(0, 12 / latency + generator.uniform(0, 3, 60))
        self.pairs: Pairs = list(zip(latency.tolist(), omega.tolist(), strict=True))
        self.solves = 0

    def __call__(self, theta: float) -> ThetaPoint[int]:
        self.solves += 1
        costs = [latency + theta * omega for latency, omega in self.pairs]
        best = int(np.argmin(costs))
        latency, omega = self.pairs[best]
        return ThetaPoint(theta, latency, omega, costs[best], best, latency)


def hull(pairs: Pairs) -> set[tuple[float, float]]:
    """Pairs that are optimal for some theta, by trying the slope of every two of them."""
    slopes = {0.0, 1e9}
    for a in pairs:
        for b in pairs:
            if a[1] != b[1] and (b[0] - a[0]) / (a[1] - b[1]) > 0:
                slopes.add((b[0] - a[0]) / (a[1] - b[1]))
    ordered = sorted(slopes)
    thetas = [(x + y) / 2 for x, y in pairwise(ordered)] + [1e10, 1e-9]
    return {min(pairs, key=lambda p, t=t: p[0] + t * p[1]) for t in thetas}  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(3))
def test_front_is_the_lower_hull(seed: int) -> None:
    attainable = Attainable(seed)
    points = front(attainable, most_points=50)
    assert {(p.latency_s, p.omega) for p in points} == hull(attainable.pairs)
    latencies = [p.latency_s for p in points]
    assert latencies == sorted(latencies)
    assert attainable.solves <= 3 * len(points) + 3


def test_a_short_front_keeps_the_ends() -> None:
    attainable = Attainable(3)
    points = front(attainable, most_points=3)
    assert len(points) <= 3
    assert points[0].latency_s == min(latency for latency, _ in attainable.pairs)
    assert points[-1].omega == min(omega for _, omega in attainable.pairs)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_kept_and_gaps_are_true(seed: int) -> None:
    attainable = Attainable(seed)
    for share in (0.1, 0.4, 0.8):
        omegas = sorted(omega for _, omega in attainable.pairs)
        most = omegas[int(share * len(omegas))]
        point, gap = fastest_within(attainable, most)
        best = min(latency for latency, omega in attainable.pairs if omega <= most)
        assert point.omega <= most * (1 + 1e-6)
        assert point.latency_s * (1 - gap) <= best + 1e-9
        limit = sorted(latency for latency, _ in attainable.pairs)[int(share * len(omegas))]
        point, gap = finest_within(attainable, limit)
        finest = min(omega for latency, omega in attainable.pairs if latency <= limit)
        assert point.latency_s <= limit
        assert point.omega * (1 - gap) <= finest + 1e-9


def test_bounds_that_nothing_meets() -> None:
    attainable = Attainable(1)
    with pytest.raises(InfeasibleError, match="best found"):
        fastest_within(attainable, min(omega for _, omega in attainable.pairs) / 2)
    with pytest.raises(InfeasibleError, match="the fastest of"):
        finest_within(attainable, min(latency for latency, _ in attainable.pairs) / 2)


def test_a_best_quality_that_is_the_fastest_too() -> None:
    """Within its gap a solver may give the better plan of two for the greater theta alone."""
    thetas = []

    def solve(theta: float) -> ThetaPoint[str]:
        thetas.append(theta)
        if theta < 1:
            return ThetaPoint(theta, 1.0 + 5e-5, 2.0, 1.0, "fastest", 1.0 + 5e-5)
        return ThetaPoint(theta, 1.0, 1.5, 1.0, "finest", 1.0)

    assert [point.plan for point in front(solve)] == ["finest"]
    assert min(thetas) >= 0


def test_one_plan_only() -> None:
    single = ThetaPoint(0.0, 2.0, 0.0, 2.0, "only", 2.0)
    assert front(lambda _: single) == (single,)
    assert fastest_within(lambda _: single, 0.0)[0] == single
    assert finest_within(lambda _: single, 2.0)[0] == single

"""Predicting a plan's perplexity from its summed sensitivity. The rise above 16 bit is fitted as a
power of the sensitivity by least squares of logarithms. The bound is conservative: raised by the
prediction interval, above every measured point, never beyond the largest sensitivity measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.plan.parts import DivergenceScale, PerplexityForecast, QualityForecast
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import Omega, WeighedPoint
from quant.common.errors import SpecError

CONFIDENCE = 0.95
"""One-sided confidence: one plan in twenty may cost more than the upper end says."""

LEAST_POINTS = 3
_STANDARD_ERRORS = 2.0
"""Least increase, in its standard errors, of a point that is fitted."""

_CORNERS, _LEAST_SHARE = 25, 1e-4
"""Of a fit that is kept as straight lines: at most 2 % off between two."""

_EXPONENTS = (0.5, 2.0)
"""Range of the exponent around 1, that of small noise, as few points close together say little."""


@dataclass(frozen=True)
class PerplexityFit:
    """increase = `coefficient` * omega ^ `exponent`, within a factor `spread` either way, below
    `envelope` times it at every measured point, up to `largest_omega`.
    """

    baseline: float
    coefficient: float
    exponent: float
    spread: float
    envelope: float
    largest_omega: float
    points: int

    def forecast(self, omega: float) -> tuple[float, float, float]:
        """Return the expected increase at a summed sensitivity, and the ends of its interval."""
        increase = self.coefficient * omega**self.exponent
        return increase, increase / self.spread, increase * self._upper

    def omega_within(self, max_increase: float) -> float:
        """The largest summed sensitivity whose upper end stays within `max_increase`."""
        ratio = max_increase / (self.coefficient * self._upper)
        return float(min(ratio ** (1 / self.exponent), self.largest_omega))

    def bound_for(self, omega: float) -> float:
        """The least `max_increase` that allows a summed sensitivity; infinite where none does."""
        return self.forecast(omega)[2] if omega <= self.largest_omega else math.inf

    @property
    def _upper(self) -> float:
        return max(self.spread, self.envelope)


def fit_perplexity(points: Sequence[WeighedPoint], source: str) -> PerplexityFit:
    """Fit one point at 16 bit and three or more above it by more than their error; or SpecError."""
    full = [point.perplexity for point in points if point.omega == 0]
    if not full:
        raise SpecError(
            f"{source} holds no perplexities measured at 16 bit and below, so an increase of "
            "perplexity cannot be bounded; make it with: llmpq indicator --perplexity TEXT"
        )
    baseline = full[0]
    above = [
        (point.omega, point.perplexity - baseline)
        for point in points
        if point.omega > 0
        and point.perplexity - baseline > max(_STANDARD_ERRORS * point.error, 0.0)
    ]
    if len({omega for omega, _ in above}) < LEAST_POINTS:
        raise SpecError(
            f"{source}: {len(above)} of {len(points)} measured perplexities lie above that at 16 "
            f"bit by more than their error, {LEAST_POINTS} are needed; measure on a longer text or "
            "with lower bitwidths"
        )
    from scipy.special import stdtrit  # slow to import, and few plans need it

    x, y = np.log(np.array(above)).T
    slope = float(((x - x.mean()) * y).sum() / np.square(x - x.mean()).sum())
    exponent = float(np.clip(slope, *_EXPONENTS))
    intercept = float(y.mean() - exponent * x.mean())
    residuals = y - intercept - exponent * x
    freedom = len(x) - 2
    deviation = math.sqrt(float(np.square(residuals).sum()) / freedom)
    margin = float(stdtrit(freedom, CONFIDENCE)) * deviation * math.sqrt(1 + 1 / len(x))
    return PerplexityFit(
        baseline=baseline,
        coefficient=math.exp(intercept),
        exponent=exponent,
        spread=math.exp(margin),
        envelope=math.exp(float(residuals.max())),
        largest_omega=max(omega for omega, _ in above),
        points=len(x),
    )


def perplexity_bound(omega: Omega) -> PerplexityFit:
    """What turns a bound on perplexity into one on `omega`; SpecError where too little was
    measured.
    """
    return fit_perplexity(omega.points, f"sensitivity {omega.source}")


def with_quality(
    plan: PlanSpec, omega: Omega, summed: float, max_increase: float | None
) -> PlanSpec:
    """The plan with what its bits, of sensitivity `summed`, are expected to cost."""
    fit, scale = _fit_of(omega), omega.scale
    if fit is not None:
        increase, low, high = fit.forecast(summed)
        perplexity = PerplexityForecast(
            baseline=fit.baseline,
            increase=increase,
            low=low,
            high=high,
            points=fit.points,
            max_increase=max_increase,
            max_omega=None if max_increase is None else fit.omega_within(max_increase),
        )
        expected, low, high = (math.log1p(each / fit.baseline) for each in (increase, low, high))
        quality = QualityForecast(expected, low, high, _fitted_scale(fit, summed, omega.source))
        return replace(plan, perplexity=perplexity, quality=quality)
    if scale is None:
        return plan
    nats = scale.at(summed)
    margin = scale.margin if nats else 0.0
    low, high = max(0.0, nats / scale.factor - margin), nats * scale.factor + margin
    return replace(plan, quality=QualityForecast(nats, low, high, scale))


def expected_divergence(omega: Omega, summed: float) -> float | None:
    """What bits of sensitivity `summed` are expected to cost, in nats a token, if it is known."""
    fit = _fit_of(omega)
    if fit is not None:
        return math.log1p(fit.forecast(summed)[0] / fit.baseline)
    return None if omega.scale is None else omega.scale.at(summed)


def _fit_of(omega: Omega) -> PerplexityFit | None:
    try:
        return fit_perplexity(omega.points, omega.source)
    except SpecError:  # no points, or too few
        return None


def _fitted_scale(fit: PerplexityFit, summed: float, source: str) -> DivergenceScale:
    """The curve as straight lines, with a corner where the plan is."""
    shares = np.geomspace(_LEAST_SHARE, 1, _CORNERS)
    sums = sorted({summed, *(shares * fit.largest_omega).tolist()} - {0.0})
    points = [(each, math.log1p(fit.forecast(each)[0] / fit.baseline)) for each in sums]
    return DivergenceScale(
        tuple(points), max(fit.spread, fit.envelope), 0.0, "perplexities", source
    )

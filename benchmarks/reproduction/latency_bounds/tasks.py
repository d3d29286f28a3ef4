"""The tasks of ExeGPT's table 3: lengths of prompts and outputs, as truncated normals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.stats import skewnorm

from planner.length_distribution import LengthDistribution, RequestLengths

WIDEST = 8.0
"""Deviations of a normal before it is cut, in multiples of the longest length: all but uniform."""


@dataclass(frozen=True)
class Stated:
    """A column of table 3: mean, deviation and longest in tokens, and the 99th percentile of
    outputs.
    """

    mean: float
    deviation: float
    longest: int
    quantile_99: int | None = None

    @property
    def cut(self) -> LengthDistribution:
        """The truncated normal with this mean and deviation after it is cut; where the deviation is
        more than any has on these lengths, the nearest, which is all but uniform.
        """
        return truncated_normal_of(self.mean, self.deviation, self.longest)

    @property
    def uncut(self) -> LengthDistribution:
        """The truncated normal with this mean and deviation before it is cut."""
        return LengthDistribution.truncated_normal(self.mean, self.deviation, self.longest)


@dataclass(frozen=True)
class Task:
    """A task by its letter in table 3."""

    name: str
    prompts: Stated
    outputs: Stated

    @property
    def lengths(self) -> RequestLengths:
        """Its lengths, as all simulations here have them."""
        return RequestLengths(self.prompts.cut, self.outputs.cut)


TASKS = {
    task.name: task
    for task in (
        Task("S", Stated(256, 252, 512), Stated(32, 13, 80, 63)),
        Task("T", Stated(128, 81, 256), Stated(128, 68, 320, 292)),
        Task("G", Stated(64, 23, 128), Stated(192, 93, 480, 417)),
        Task("C1", Stated(256, 115, 512), Stated(64, 30, 160, 137)),
        Task("C2", Stated(512, 252, 1024), Stated(256, 134, 640, 579)),
    )
}


@cache
def truncated_normal_of(mean: float, deviation: float, longest: int) -> LengthDistribution:
    """The truncated normal on 1 to `longest` tokens whose own mean and deviation come nearest."""

    def made(centre: float, scale: float) -> LengthDistribution:
        return LengthDistribution.truncated_normal(centre, scale, longest)

    return _fitted(made, mean, deviation, longest)


def skewed_normal_of(
    mean: float, deviation: float, longest: int, skewness: float
) -> LengthDistribution:
    """The skew normal distribution of this skewness before it is cut to 1 to `longest` tokens,
    whose own mean and deviation come nearest.
    """
    share = abs(skewness) ** (2 / 3)
    ratio = share / (share + ((4 - math.pi) / 2) ** (2 / 3))
    delta = math.copysign(math.sqrt(math.pi / 2 * ratio), skewness)
    shape = delta / math.sqrt(1 - delta**2)

    def made(centre: float, scale: float) -> LengthDistribution:
        edges = skewnorm.cdf(np.arange(longest + 1) + 0.5, shape, centre, scale)
        chances = np.diff(edges)
        kept = np.flatnonzero(chances > 0)
        shares = chances[kept] / chances[kept].sum()
        return LengthDistribution(tuple((kept + 1).tolist()), tuple(shares.tolist()))

    return _fitted(made, mean, deviation, longest)


def _fitted(
    made: Callable[[float, float], LengthDistribution], mean: float, deviation: float, longest: int
) -> LengthDistribution:
    """The distribution that is made of a centre and a scale so that its own mean and deviation come
    nearest to these.
    """

    def errors(parameters: npt.NDArray[np.float64]) -> list[float]:
        centre, logarithm = parameters.tolist()
        found = made(centre, math.exp(logarithm))
        return [found.mean / mean - 1, math.sqrt(found.variance) / deviation - 1]

    bounds = ([0.0, 0.0], [float(longest), math.log(WIDEST * longest)])
    best = least_squares(errors, [mean, math.log(deviation)], bounds=bounds).x
    return made(float(best[0]), math.exp(best[1]))


def tasks_table() -> Iterator[str]:
    """Yield the lines of a table: mean, deviation and 99th percentile of table 3, and of truncated
    normals that have its figures after or before they are cut.
    """
    yield "| task | | table 3 | figures after the cut | figures before the cut |"
    yield "|---" * 5 + "|"
    for task in TASKS.values():
        for what, stated in (("prompts", task.prompts), ("outputs", task.outputs)):
            cells = [_figures(each) for each in (stated.cut, stated.uncut)]
            quantile = "" if stated.quantile_99 is None else f", {stated.quantile_99}"
            paper = f"{stated.mean:.0f}, {stated.deviation:.0f}{quantile}"
            yield f"| {task.name} | {what} | {paper} | {cells[0]} | {cells[1]} |"


def _figures(found: LengthDistribution) -> str:
    return f"{found.mean:.0f}, {math.sqrt(found.variance):.0f}, {found.quantile(0.99)}"

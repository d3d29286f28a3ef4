"""Random boxes of two to four controls, for branch and bound beside exhaustive search.

Throughput and latency are random functions that rise with each control, half of them with noise
within the tolerance: services that saturate as schedules do, powers, and sums of jumps. The bound
is a random quantile of the latencies of the box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.latency_bound.branch_and_bound import ControlPoint, Evaluations, Tolerance, best_within
from planner.latency_bound.timeline import Performance

FloatArray = npt.NDArray[np.float64]

SIZES = {2: (128, 96), 3: (64, 48, 8), 4: (48, 32, 8, 6)}
"""Values of each control: newcomers, decode steps, micro-batches of either phase."""

TOLERANCE = Tolerance()


@dataclass(frozen=True, eq=False)
class Case:
    """The performance of every point of a box, and a bound on latency."""

    name: str
    requests_per_s: FloatArray
    latency_s: FloatArray
    bound_s: float

    @property
    def ranges(self) -> tuple[range, ...]:
        """The box; controls count from 1."""
        return tuple(range(1, size + 1) for size in self.latency_s.shape)

    def performance(self, point: ControlPoint) -> Performance:
        """The performance of a point."""
        at = tuple(value - 1 for value in point)
        return Performance(float(self.requests_per_s[at]), float(self.latency_s[at]))

    @property
    def best(self) -> float | None:
        """Requests per second of the best point within the bound, by looking at all of them."""
        within = self.latency_s <= self.bound_s
        return float(self.requests_per_s[within].max()) if within.any() else None


@dataclass(frozen=True)
class Outcome:
    """The share of a box that was evaluated, and the throughput found over the best there is (1
    where there is none).
    """

    name: str
    controls: int
    evaluated: float
    reached: float


def outcome_of(case: Case, tolerance: Tolerance = TOLERANCE) -> Outcome:
    """Search a case, and compare with all of its points."""
    evaluated = Evaluations(case.performance, case.bound_s)
    found = best_within(case.ranges, evaluated, tolerance)
    best, reached = case.best, 1.0
    if best is not None:
        reached = 0.0 if found is None else evaluated(found).requests_per_s / best
    size = case.latency_s.size
    return Outcome(case.name, case.latency_s.ndim, evaluated.count / size, reached)


def random_cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yield so many random cases."""
    generator = np.random.default_rng(seed)
    kinds = tuple(KINDS.items())
    for number in range(count):
        name, make = kinds[number // len(SIZES) % len(kinds)]
        sizes = SIZES[2 + number % len(SIZES)]
        throughput, latency_s = make(sizes, generator)
        noisy = generator.random() < 0.5
        throughput, latency_s = (
            values * _noise(sizes, share * noisy, generator)
            for values, share in (
                (throughput, TOLERANCE.throughput),
                (latency_s, TOLERANCE.latency),
            )
        )
        bound_s = float(np.quantile(latency_s, generator.uniform(0.01, 0.99)))
        yield Case(name, throughput, latency_s, bound_s)


def _noise(sizes: Sequence[int], share: float, generator: np.random.Generator) -> FloatArray:
    """Factors by which no point falls behind one below it by more than `share`."""
    half = share / (2 + share)
    return generator.uniform(1 - half, 1 + half, sizes)


def _saturating(
    sizes: Sequence[int], generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Throughput that saturates in each control, and latency that is affine in powers of them."""
    throughput, latency_s = np.ones(sizes), np.ones(sizes)
    for share in _shares(sizes):
        throughput = throughput * share / (share + generator.uniform(0.02, 2))
        weight = generator.uniform(0.01, 1) * generator.uniform(0.5, 20)
        latency_s = latency_s + weight * share ** generator.uniform(0.5, 2)
    return throughput, latency_s


def _powers(sizes: Sequence[int], generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Products of powers of the controls."""
    throughput, latency_s = np.ones(sizes), np.ones(sizes)
    for share in _shares(sizes):
        throughput = throughput * share ** generator.uniform(0, 1)
        latency_s = latency_s * share ** generator.uniform(0.05, 1.5)
    return throughput, latency_s


def _jumps(sizes: Sequence[int], generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Sums of jumps at random places, and of ones that belong to two controls together."""
    return _sum_of_jumps(sizes, generator), _sum_of_jumps(sizes, generator)


def _sum_of_jumps(sizes: Sequence[int], generator: np.random.Generator) -> FloatArray:
    total = np.ones(sizes)
    for control, size in enumerate(sizes):
        jumps = generator.gamma(0.3, 1, size) * generator.uniform(0.1, 3)
        shape = [size if other == control else 1 for other in range(len(sizes))]
        total = total + np.cumsum(jumps).reshape(shape)
    joint = generator.gamma(0.05, 1, sizes) / np.prod(sizes) * 5
    for control in range(len(sizes)):
        joint = np.cumsum(joint, axis=control)
    return np.asarray(total + joint)


def _shares(sizes: Sequence[int]) -> Iterable[FloatArray]:
    """The share of its most that each control has in every point of a box."""
    return np.meshgrid(*(np.arange(1, size + 1) / size for size in sizes), indexing="ij")


KINDS: dict[str, Callable[[Sequence[int], np.random.Generator], tuple[FloatArray, FloatArray]]] = {
    "saturating": _saturating,
    "powers": _powers,
    "jumps": _jumps,
}

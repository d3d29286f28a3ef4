"""Fits of a layer's seconds at one bitwidth and phase, corrected by what was measured nearby.

Where attention was measured apart, attention and the rest are fitted each to its own seconds, and
experts by the tokens of a pass and by how many of them these ask. What few terms cannot express
varies smoothly with the logarithms of batch and length: near measured workloads a Gaussian process
predicts it, and far from them the terms stand alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np
import numpy.typing as npt

from planner.costs.latency_model import LayerSeconds
from planner.profiles.layer_terms import (
    ATTENTION_TERMS,
    LayerTerms,
    Vector,
    attention_features,
    experts_features,
    layer_features,
    rest_features,
)
from planner.profiles.rows import ProfileRow
from planner.scheduling import Phase

Workload = tuple[int, int]
"""Requests and the length of each; for what goes by tokens alone, 1 and the tokens."""

_LEAST_SHARE = 1e-3
"""Of the seconds of a rest those without experts, however long an estimate has these."""


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer as it is fitted; `workload` is that by which it is corrected."""

    features: Callable[[Phase, LayerTerms, int, int, float], Vector]
    seconds_of: Callable[[LayerSeconds], float]
    workload: Callable[[Phase, int, int], Workload]


def _requests_and_length(phase: Phase, batch_size: int, length: int) -> Workload:
    return batch_size, length


def _tokens(phase: Phase, batch_size: int, length: int) -> Workload:
    return 1, batch_size * length if phase == "prefill" else batch_size


WHOLE = LayerPart(layer_features, lambda parts: parts.whole_s, _requests_and_length)
ATTENTION = LayerPart(attention_features, lambda parts: parts.attention_s, _requests_and_length)
REST = LayerPart(
    rest_features,
    lambda parts: max(parts.rest_s - parts.experts_s, _LEAST_SHARE * parts.rest_s),
    _tokens,
)
EXPERTS = LayerPart(experts_features, lambda parts: parts.experts_s, _tokens)


Matrix = npt.NDArray[np.float64]

# With fewer workloads a residual cannot be told from noise.
LEAST_POINTS = 8
# In natural logarithms: workloads within a factor of 2, 4 or 12 of each other behave alike.
_LENGTH_SCALES = (0.7, 1.4, 2.5)
# Variance of the measurements' noise, relative to that of the residual.
_NOISES = (0.02, 0.1, 0.4, 1.5)


@dataclass(frozen=True)
class Correction:
    """A correction factor by batch size and length: `points` [n, 2], logarithms; `weights` [n]."""

    points: Matrix
    weights: Vector
    length_scale: float

    def factor(self, batch_size: int, length: int) -> float:
        """The factor for the fitted time; 1 far from every point."""
        if not len(self.weights):
            return 1.0
        kernel = _kernel(_logarithms([(batch_size, length)]), self.points, self.length_scale)
        return float(np.exp(kernel[0] @ self.weights))


NO_CORRECTION = Correction(np.empty((0, 2)), np.empty(0), 1.0)


def fit_correction(workloads: Sequence[tuple[int, int]], ratios: Vector) -> Correction:
    """Fit a correction to `ratios` [n] of measured to fitted time, by what predicts each point best
    from the others; none where that is better.
    """
    if len(workloads) < LEAST_POINTS:
        return NO_CORRECTION
    points, residuals = _logarithms(workloads), np.log(ratios)
    best, least = NO_CORRECTION, float(np.mean(residuals**2))
    for length_scale in _LENGTH_SCALES:
        kernel = _kernel(points, points, length_scale)
        for noise in _NOISES:
            inverse = np.linalg.inv(kernel + noise * np.eye(len(points)))
            weights = np.asarray(inverse @ residuals, dtype=np.float64)
            left_out = float(np.mean((weights / np.diag(inverse)) ** 2))
            if left_out < least:
                best, least = Correction(points, weights, length_scale), left_out
    return best


def _logarithms(workloads: Sequence[tuple[int, int]]) -> Matrix:
    """The logarithms `[n, 2]`; a length of 0, before the first token of an answer, counts as 1."""
    return np.log(np.maximum(np.array(workloads, dtype=np.float64), 1.0))


def _kernel(left: Matrix, right: Matrix, length_scale: float) -> Matrix:
    """The similarity `[left, right]` of workloads, 1 where they are equal."""
    squares = ((left[:, None] - right[None]) ** 2).sum(axis=-1)
    return np.asarray(np.exp(-squares / (2 * length_scale**2)))


# Weight of the prior, the datasheet's proportions, against one measured row: it decides only what
# the rows do not (one length, or fewer rows than terms), and hardly changes what they determine.
_PRIOR_WEIGHT = 1e-3
# Where the datasheet's times are sampled to find their proportions: batch sizes, tokens.
_PRIOR_BATCHES = (1, 2, 4, 8, 16, 32)
_PRIOR_LENGTHS = (64, 128, 256, 512, 1024, 2048)


LayerFit = Callable[[LayerTerms, int, int], LayerSeconds]
"""Seconds of a layer at one bitwidth and phase, by batch size and length."""


@dataclass(frozen=True)
class PartFit:
    """The time of a layer or of a part of it: coefficients of its terms, and a correction."""

    part: LayerPart
    phase: Phase
    coefficients: Vector
    tokens_at_once: float
    correction: Correction = NO_CORRECTION

    def by_term(self, layer: LayerTerms, batch_size: int, length: int) -> Vector:
        """The seconds that each term adds [terms]."""
        terms = self.part.features(self.phase, layer, batch_size, length, self.tokens_at_once)
        return self.coefficients * terms * self._factor(batch_size, length)

    def seconds(self, layer: LayerTerms, batch_size: int, length: int) -> float:
        terms = self.part.features(self.phase, layer, batch_size, length, self.tokens_at_once)
        return float(self.coefficients @ terms) * self._factor(batch_size, length)

    def _factor(self, batch_size: int, length: int) -> float:
        return self.correction.factor(*self.part.workload(self.phase, batch_size, length))


@dataclass(frozen=True)
class FitTask:
    """A fit to `rows` of one bitwidth and phase. `estimate`: seconds of a layer by batch size and
    length, whose proportions count where rows do not determine terms. `is_same`: rows are of that
    very layer, and correct the fit. `tokens_at_once`: tokens of prefill that pass at once.
    `experts_s`: seconds of experts by tokens, where the layer has some and they are measured apart.
    """

    rows: tuple[ProfileRow, ...]
    phase: Phase
    layer: LayerTerms
    estimate: Callable[[int, int], LayerSeconds]
    is_same: bool
    tokens_at_once: float
    experts_s: Callable[[int], float] | None = None

    def fit(self) -> LayerFit:
        """Fit the parts by the rows that have them apart, if most have; else the whole layer."""
        experts_s = self.experts_s
        apart = [
            row
            for row in self.rows
            if row.attention_s is not None and (row.experts_s is not None or experts_s is None)
        ]
        if 2 * len(apart) <= len(self.rows):
            whole = self.part(WHOLE, self.rows)

            def divided(layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds:
                by_term = whole.by_term(layer, batch_size, length)
                attention_s = float(by_term @ ATTENTION_TERMS[self.phase])
                return LayerSeconds(attention_s, float(by_term.sum()) - attention_s)

            return divided
        attention, rest = self.part(ATTENTION, apart), self.part(REST, apart)

        def together(layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds:
            workload = layer, batch_size, length
            own_s = 0.0
            if experts_s is not None:
                own_s = experts_s(batch_size * (length if self.phase == "prefill" else 1))
            rest_s = rest.seconds(*workload) + own_s
            return LayerSeconds(attention.seconds(*workload), rest_s, own_s)

        return together

    def part(self, part: LayerPart, rows: Sequence[ProfileRow]) -> PartFit:
        seconds = np.array([part.seconds_of(parts_of(row)) for row in rows])
        features = np.stack(
            [self._features(part, row.layer, row.batch_size, row_length(row)) for row in rows]
        )
        coefficients = _fit(features, seconds, self._proportions(part))
        plain = PartFit(part, self.phase, coefficients, self.tokens_at_once)
        if not self.is_same:
            return plain
        ratios = medians(
            (part.workload(self.phase, row.batch_size, row_length(row)), ratio)
            for row, ratio in zip(rows, seconds / (features @ coefficients), strict=True)
        )
        correction = fit_correction(tuple(ratios), np.array(list(ratios.values())))
        return replace(plain, correction=correction)

    @cached_property
    def _estimates(self) -> list[tuple[Workload, LayerSeconds]]:
        points = [(batch, length) for batch in _PRIOR_BATCHES for length in _PRIOR_LENGTHS]
        return [(point, self.estimate(*point)) for point in points]

    def _proportions(self, part: LayerPart) -> Vector:
        seconds = np.array([part.seconds_of(each) for _, each in self._estimates])
        points = [point for point, _ in self._estimates]
        features = np.stack([self._features(part, self.layer, *point) for point in points])
        relative = features / seconds[:, None]
        units = _units(relative)
        return np.asarray(_least_squares(relative * units, np.ones(len(points))) * units)

    def _features(self, part: LayerPart, layer: LayerTerms, batch_size: int, length: int) -> Vector:
        return part.features(self.phase, layer, batch_size, length, self.tokens_at_once)


def fit_experts(
    rows: Sequence[ProfileRow],
    layer: LayerTerms,
    estimate: Callable[[int], float],
    tokens_at_once: float,
) -> Callable[[int], float]:
    """Fit seconds of experts by the tokens of a pass to `rows` of that very layer and one bitwidth
    which have them apart: prompts and decode steps together, as experts see nothing but tokens.
    """
    by_tokens = [
        replace(
            row,
            phase="prefill",
            batch_size=row.batch_size * row.prompt_length,
            prompt_length=1,
            context_length=0,
        )
        for row in rows
    ]

    def estimated(batch_size: int, length: int) -> LayerSeconds:
        own_s = estimate(batch_size * length)
        return LayerSeconds(0.0, own_s, own_s)

    task = FitTask(tuple(by_tokens), "prefill", layer, estimated, True, tokens_at_once)
    fitted = task.part(EXPERTS, by_tokens)
    return lambda tokens: fitted.seconds(layer, tokens, 1)


def parts_of(row: ProfileRow) -> LayerSeconds:
    """The measured seconds of each part; where they are not apart, all of them as the rest."""
    attention_s = row.attention_s or 0.0
    return LayerSeconds(attention_s, row.seconds - attention_s, row.experts_s or 0.0)


def medians(values: Iterable[tuple[Workload, float]]) -> dict[Workload, float]:
    """Median by workload, in the order in which these come."""
    found: dict[Workload, list[float]] = {}
    for workload, value in values:
        found.setdefault(workload, []).append(value)
    return {workload: median(each) for workload, each in found.items()}


def row_length(row: ProfileRow) -> int:
    """The length of the prompts in prefill, of the context in decode."""
    return row.prompt_length if row.phase == "prefill" else row.context_length


def _fit(features: Matrix, seconds: Vector, prior: Vector) -> Vector:
    """Fit non-negative coefficients [terms] to `seconds` [rows] by relative errors; `prior` [terms]
    has proportions to keep.
    """
    scaled_prior = prior * np.median(seconds / (features @ prior))
    relative = features / seconds[:, None]
    units = _units(relative)
    weight = np.sqrt(_PRIOR_WEIGHT)
    matrix = np.vstack([relative * units, weight * np.eye(len(units))])
    target = np.concatenate([np.ones(len(seconds)), weight * scaled_prior / units])
    return np.asarray(_least_squares(matrix, target) * units)


def _units(relative: Matrix) -> Vector:
    """Coefficients with which each term alone makes up a row's time; 1 where no row has it."""
    mean = relative.mean(axis=0)
    return np.where(mean > 0, 1.0 / np.where(mean > 0, mean, 1.0), 1.0)


def _least_squares(matrix: Matrix, target: Vector) -> Vector:
    from scipy.optimize import nnls  # slow to import, and not every command plans

    solution, _ = nnls(matrix, target)
    return np.asarray(solution)

"""Fits of a layer's seconds at one bitwidth and phase, corrected by what was measured nearby.

Where attention was measured apart, attention and the rest are fitted each to its own seconds. What
few terms cannot express varies smoothly with the logarithms of batch and length: near measured
workloads a Gaussian process predicts it, and far from them the terms stand alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median

import numpy as np
import numpy.typing as npt

from planner.costs.latency_model import LayerSeconds
from planner.profiles.rows import LayerTerms, ProfileRow
from planner.scheduling import Phase

Vector = npt.NDArray[np.float64]
Workload = tuple[int, int]
"""Requests and the length of each; for what goes by tokens alone, 1 and the tokens."""

# Rows from which kernels restore weights instead of multiplying them packed: 24 at 8 bit, 96 at 3
# and 4 bit on CPUs, 25 or 129 on GPUs; other products are below their full rate up to these.
_KERNEL_ROWS = (24, 96)
# Elements of hidden states that fill, with the intermediate results of a layer, the caches of a
# processor: with more, rows took a fifth longer (hidden size 1024, 16 and 4 bit, 32 MiB of
# last-level cache).
_CACHED_ELEMENTS = 2**20


def layer_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer's time: float64 [terms], in the paper's symbols: v requests of a
    micro-batch, s prompt tokens, t + s context tokens. Prefill has terms in v, s, vs, vs^2 and a
    constant (hidden states, lengths, products, attention, weights read), in rows up to those at
    which kernels change and beyond caches, for each pass of `tokens_at_once`. Decode: v, v(t+s),
    t+s and a constant.
    """
    if phase == "decode":
        v, s = float(batch_size), float(length)
        terms = [
            v * layer.linear_parameters,
            v * s * layer.kv_width,
            s * layer.hidden_size,
            float(layer.linear_parameters),
        ]
        return np.array(terms)

    def one_pass(requests: int) -> Vector:
        v, s = float(requests), float(length)
        terms = [
            v * layer.hidden_size,
            s * layer.hidden_size,
            v * s * layer.linear_parameters,
            v * s * s * layer.query_width,
            *_weight_terms(layer, v * s),
        ]
        return np.array(terms)

    return _in_passes(one_pass, batch_size, length, tokens_at_once)


ATTENTION_TERMS: Mapping[Phase, Vector] = {
    "prefill": np.array([1.0, 1, 0, 1, 0, 0, 0, 0]),
    "decode": np.array([0.0, 1, 1, 0]),
}
"""1 for the terms of `layer_features` that are attention's: those that tokens alone do not say."""


def attention_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of attention's time: float64 [terms]; prefill in a constant a pass, v, vs
    and vs^2, decode in a constant, v, t+s and v(t+s).
    """
    v, s, width = float(batch_size), float(length), float(layer.query_width)
    if phase == "decode":
        return np.array([width, v * width, s * width, v * s * layer.kv_width])

    def one_pass(requests: int) -> Vector:
        v = requests * width
        return np.array([width, v, v * s, v * s * s])

    return _in_passes(one_pass, batch_size, length, tokens_at_once)


def rest_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer without attention, by tokens of each pass: float64 [terms]."""

    def one_pass(tokens: float) -> Vector:
        return np.array([tokens * layer.linear_parameters, *_weight_terms(layer, tokens)])

    if phase == "decode":
        return one_pass(float(batch_size))
    return _in_passes(lambda v: one_pass(float(v * length)), batch_size, length, tokens_at_once)


def _weight_terms(layer: LayerTerms, tokens: float) -> list[float]:
    return [
        float(layer.linear_parameters),
        *(min(tokens, rows) * layer.linear_parameters for rows in _KERNEL_ROWS),
        max(0.0, tokens - _CACHED_ELEMENTS / layer.hidden_size) * layer.linear_parameters,
    ]


def _in_passes(
    one_pass: Callable[[int], Vector], batch_size: int, length: int, tokens_at_once: float
) -> Vector:
    if batch_size * length <= tokens_at_once:
        return one_pass(batch_size)
    together = int(min(max(tokens_at_once / length, 1), batch_size))
    full, rest = divmod(batch_size, together)
    terms_of_full = full * one_pass(together)
    return terms_of_full + one_pass(rest) if rest else terms_of_full


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
REST = LayerPart(rest_features, lambda parts: parts.rest_s, _tokens)


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
    """

    rows: tuple[ProfileRow, ...]
    phase: Phase
    layer: LayerTerms
    estimate: Callable[[int, int], LayerSeconds]
    is_same: bool
    tokens_at_once: float

    def fit(self) -> LayerFit:
        """Fit both parts by the rows that have them apart, if most have; else the whole layer."""
        apart = [row for row in self.rows if row.attention_s is not None]
        if 2 * len(apart) <= len(self.rows):
            whole = self._part(WHOLE, self.rows)

            def divided(layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds:
                by_term = whole.by_term(layer, batch_size, length)
                attention_s = float(by_term @ ATTENTION_TERMS[self.phase])
                return LayerSeconds(attention_s, float(by_term.sum()) - attention_s)

            return divided
        attention, rest = self._part(ATTENTION, apart), self._part(REST, apart)
        return lambda *workload: LayerSeconds(attention.seconds(*workload), rest.seconds(*workload))

    def _part(self, part: LayerPart, rows: Sequence[ProfileRow]) -> PartFit:
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


def parts_of(row: ProfileRow) -> LayerSeconds:
    """The measured seconds of both parts; where they are not apart, all of them as the rest."""
    attention_s = row.attention_s or 0.0
    return LayerSeconds(attention_s, row.seconds - attention_s)


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

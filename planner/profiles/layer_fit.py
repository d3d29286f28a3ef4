"""Fits of a layer's seconds at one bitwidth and phase: non-negative coefficients of its terms.

Where attention was measured apart, attention and the rest are fitted each to its own seconds; else
the terms of a fit to the whole layer are divided between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.costs.latency_model import LayerSeconds
from planner.phases import Phase
from planner.profiles.correction import NO_CORRECTION, Correction, fit_correction
from planner.profiles.layer_terms import (
    ATTENTION,
    ATTENTION_TERMS,
    REST,
    WHOLE,
    LayerPart,
    Vector,
    Workload,
)
from planner.profiles.rows import LayerTerms, ProfileRow

Matrix = npt.NDArray[np.float64]

# Weight of the prior, the datasheet's proportions, against one measured row: it decides only what
# the rows do not (one length, or fewer rows than terms), and hardly changes what they determine.
_PRIOR_WEIGHT = 1e-3
# Where the datasheet's times are sampled to find their proportions: batch sizes, tokens.
_PRIOR_BATCHES = (1, 2, 4, 8, 16, 32)
_PRIOR_LENGTHS = (64, 128, 256, 512, 1024, 2048)


class LayerFit(Protocol):
    def seconds(self, layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds: ...


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
        """Seconds of one pass through that part of `layer`."""
        terms = self.part.features(self.phase, layer, batch_size, length, self.tokens_at_once)
        return float(self.coefficients @ terms) * self._factor(batch_size, length)

    def _factor(self, batch_size: int, length: int) -> float:
        return self.correction.factor(*self.part.workload(self.phase, batch_size, length))


@dataclass(frozen=True)
class DividedTerms:
    """A fit to whole layers: some of its terms are attention's."""

    whole: PartFit

    def seconds(self, layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds:
        by_term = self.whole.by_term(layer, batch_size, length)
        attention_s = float(by_term @ ATTENTION_TERMS[self.whole.phase])
        return LayerSeconds(attention_s, float(by_term.sum()) - attention_s)


@dataclass(frozen=True)
class PartsApart:
    attention: PartFit
    rest: PartFit

    def seconds(self, layer: LayerTerms, batch_size: int, length: int) -> LayerSeconds:
        workload = layer, batch_size, length
        return LayerSeconds(self.attention.seconds(*workload), self.rest.seconds(*workload))


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
            return DividedTerms(self._part(WHOLE, self.rows))
        return PartsApart(self._part(ATTENTION, apart), self._part(REST, apart))

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

"""Latency models from measured layer times: fitted (LLM-PQ section 4.1), or the measured times.

Beside the paper's terms a fit of prefill has a constant (weights are read, and restored by some
kernels, once in each pass) and breakpoints at some numbers of rows. For a layer that was itself
measured, the fit is corrected (`planner.profiles.correction`).

Names for the paper's symbols: v requests of a micro-batch, s prompt tokens, t + s context tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

import numpy as np
import numpy.typing as npt

from planner.cluster.device import CPU_TOKENS_AT_ONCE, Device
from planner.costs.latency_model import LatencyModel
from planner.model.finding import ModelShape
from planner.phases import Phase
from planner.profiles.correction import NO_CORRECTION, Correction, fit_correction
from planner.profiles.row_selection import TimeQuery, describe_selections, select_all, select_rows
from planner.profiles.rows import LayerTerms, ProfileRow, read_profiles, write_profiles

__all__ = [
    "FittedLatency",
    "ProfileRow",
    "ProfiledLatency",
    "read_profiles",
    "write_profiles",
]

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
Precision = tuple[Device, int, str, Phase]

# Weight of the prior, the datasheet's proportions, against one measured row: it decides only what
# the rows do not (one length, or fewer rows than terms), and hardly changes what they determine.
_PRIOR_WEIGHT = 1e-3
# Rows from which kernels restore weights instead of multiplying row by row: 24 at 8 bit, 96 at 3
# and 4 bit on CPUs, 25 on GPUs; other products are below their full rate up to these.
_KERNEL_ROWS = (24, 96)
# Elements of hidden states that fill, with the intermediate results of a layer, the caches of a
# processor: with more, rows took a fifth longer (hidden size 1024, 16 and 4 bit, 32 MiB of
# last-level cache).
_CACHED_ELEMENTS = 2**20
# Where the datasheet's times are sampled to find their proportions: batch sizes, tokens.
_PRIOR_BATCHES = (1, 2, 4, 8, 16, 32)
_PRIOR_LENGTHS = (64, 128, 256, 512, 1024, 2048)


def layer_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer's time, each scaled by what it counts: float64 [terms].

    Prefill has terms in v, s, vs, vs^2 and a constant: hidden states, lengths, products with
    weights, attention, weights read; in the rows up to those at which kernels change their method,
    and in those whose hidden states do not fit into caches; all of it for as many passes as
    `tokens_at_once` requires. Decode has terms in v, v(t+s), t+s and a constant: products, keys and
    values read, lengths, weights read.
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
    together = int(min(max(tokens_at_once / length, 1), batch_size))
    full, rest = divmod(batch_size, together)
    terms_of_full = full * _pass_features(layer, together, length)
    return terms_of_full + (_pass_features(layer, rest, length) if rest else 0.0)


def _pass_features(layer: LayerTerms, batch_size: int, length: int) -> Vector:
    """Compute the terms of one pass of prefill."""
    v, s = float(batch_size), float(length)
    terms = [
        v * layer.hidden_size,
        s * layer.hidden_size,
        v * s * layer.linear_parameters,
        v * s * s * layer.query_width,
        float(layer.linear_parameters),
        *(min(v * s, rows) * layer.linear_parameters for rows in _KERNEL_ROWS),
        max(0.0, v * s - _CACHED_ELEMENTS / layer.hidden_size) * layer.linear_parameters,
    ]
    return np.array(terms)


@dataclass(frozen=True)
class LayerFit:
    """The time of a layer at one bitwidth and phase: coefficients of terms, and a correction."""

    phase: Phase
    coefficients: Vector
    correction: Correction
    tokens_at_once: float = inf

    def seconds(self, layer: LayerTerms, batch_size: int, length: int) -> float:
        """The seconds of one pass through `layer`."""
        terms = layer_features(self.phase, layer, batch_size, length, self.tokens_at_once)
        return float(self.coefficients @ terms) * self.correction.factor(batch_size, length)


@dataclass(frozen=True)
class FittedLatency:
    """Layer times fitted to `profiles` by device, bitwidth and phase; else those of `fallback`.

    The fit is non-negative least squares of relative errors over `layer_features`, so that a
    profile of one model can be scaled to another. Rows of the very shape are used alone where there
    are any, and then with a correction. What the rows do not determine keeps the proportions of
    `fallback`, scaled to the rows.
    """

    profiles: tuple[ProfileRow, ...]
    fallback: LatencyModel
    _fits: dict[Precision, LayerFit | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shape(self) -> ModelShape:
        return self.fallback.shape

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        fit = self._fit(device, bits, dtype, "prefill")
        if fit is None:
            return self.fallback.layer_prefill_s(device, bits, micro_batch, prompt_length, dtype)
        return fit.seconds(LayerTerms.of(self.shape), micro_batch, prompt_length)

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        fit = self._fit(device, bits, dtype, "decode")
        if fit is None:
            return self.fallback.layer_decode_s(device, bits, micro_batch, context_length, dtype)
        return fit.seconds(LayerTerms.of(self.shape), micro_batch, context_length)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self.fallback.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self.fallback.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Says which bitwidths and phases were fitted to how many rows, and why others were not."""
        return self.described("fitted to", device, dtype, bits)

    def described(self, verb: str, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """The provenance, with `verb` in place of "fitted to"."""
        found = select_all(self.profiles, device, dtype, LayerTerms.of(self.shape), bits)
        return describe_selections(verb, found, self.fallback.provenance(device, dtype, bits))

    def _fit(self, device: Device, bits: int, dtype: str, phase: Phase) -> LayerFit | None:
        key = (device, bits, dtype, phase)
        if key not in self._fits:
            layer = LayerTerms.of(self.shape)
            used = select_rows(self.profiles, TimeQuery(device, dtype, layer, bits, phase))
            self._fits[key] = None
            if used.rows:
                prior = _proportions(self.fallback, device, bits, dtype, phase)
                at_once = _tokens_at_once(device)
                coefficients = fit_rows(used.rows, phase, prior, at_once)
                plain = LayerFit(phase, coefficients, NO_CORRECTION, at_once)
                same = () if used.problem else used.rows
                self._fits[key] = replace(plain, correction=_correction(plain, layer, same))
        return self._fits[key]


@dataclass(frozen=True)
class ProfiledLatency:
    """The median of the times measured for this very layer and workload, else the fit."""

    fitted: FittedLatency
    _times: dict[Precision, dict[tuple[int, int], float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def shape(self) -> ModelShape:
        return self.fitted.shape

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        found = self._measured(device, bits, dtype, "prefill", micro_batch, prompt_length)
        if found is not None:
            return found
        return self.fitted.layer_prefill_s(device, bits, micro_batch, prompt_length, dtype)

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        found = self._measured(device, bits, dtype, "decode", micro_batch, context_length)
        if found is not None:
            return found
        return self.fitted.layer_decode_s(device, bits, micro_batch, context_length, dtype)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self.fitted.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self.fitted.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Says which bitwidths and phases were measured, and why others were not."""
        return self.fitted.described("measured in", device, dtype, bits)

    def _measured(
        self, device: Device, bits: int, dtype: str, phase: Phase, batch_size: int, length: int
    ) -> float | None:
        key = (device, bits, dtype, phase)
        if key not in self._times:
            self._times[key] = self._medians(key)
        return self._times[key].get((batch_size, length))

    def _medians(self, key: Precision) -> dict[tuple[int, int], float]:
        """Measured seconds of this layer by batch size and length."""
        device, bits, dtype, phase = key
        wanted = TimeQuery(device, dtype, LayerTerms.of(self.shape), bits, phase)
        used = select_rows(self.fitted.profiles, wanted)
        return {} if used.problem else medians(used.rows)


def medians(rows: Iterable[ProfileRow]) -> dict[tuple[int, int], float]:
    """Median seconds by batch size and length; rows of the same workload count as one."""
    times: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        times.setdefault((row.batch_size, row_length(row)), []).append(row.seconds)
    return {workload: median(found) for workload, found in times.items()}


def row_length(row: ProfileRow) -> int:
    """The length of a row's workload: of the prompts in prefill, of the context in decode."""
    return row.prompt_length if row.phase == "prefill" else row.context_length


def fit_rows(
    rows: Sequence[ProfileRow], phase: Phase, prior: Vector, tokens_at_once: float = inf
) -> Vector:
    """Fit non-negative coefficients [terms] of `layer_features` with least squared relative error.

    `prior` [terms]: proportions to keep in directions that the rows do not determine.
    """
    seconds = np.array([row.seconds for row in rows])
    features = np.stack(
        [
            layer_features(phase, row.layer, row.batch_size, row_length(row), tokens_at_once)
            for row in rows
        ]
    )
    scaled_prior = prior * np.median(seconds / (features @ prior))
    relative = features / seconds[:, None]
    units = _units(relative)
    weight = np.sqrt(_PRIOR_WEIGHT)
    matrix = np.vstack([relative * units, weight * np.eye(len(units))])
    target = np.concatenate([np.ones(len(rows)), weight * scaled_prior / units])
    return np.asarray(_least_squares(matrix, target) * units)


def _tokens_at_once(device: Device) -> float:
    """Tokens of prefill that the runtime passes through a layer of a stage at once."""
    return CPU_TOKENS_AT_ONCE if device.accelerator.is_cpu else inf


def _correction(plain: LayerFit, layer: LayerTerms, rows: Sequence[ProfileRow]) -> Correction:
    """Fit the correction to `rows` of that very `layer`."""
    measured = medians(rows)
    ratios = [seconds / plain.seconds(layer, *workload) for workload, seconds in measured.items()]
    return fit_correction(tuple(measured), np.array(ratios))


def _units(relative: Matrix) -> Vector:
    """Coefficients with which each term alone makes up a row's time; 1 where no row has the
    term.
    """
    mean = relative.mean(axis=0)
    return np.where(mean > 0, 1.0 / np.where(mean > 0, mean, 1.0), 1.0)


def _proportions(
    model: LatencyModel, device: Device, bits: int, dtype: str, phase: Phase
) -> Vector:
    """Fit coefficients of `layer_features` to the times of `model`."""
    time = model.layer_prefill_s if phase == "prefill" else model.layer_decode_s
    points = [(batch, length) for batch in _PRIOR_BATCHES for length in _PRIOR_LENGTHS]
    layer = LayerTerms.of(model.shape)
    seconds = np.array([time(device, bits, batch, length, dtype) for batch, length in points])
    at_once = _tokens_at_once(device)
    features = np.stack([layer_features(phase, layer, *point, at_once) for point in points])
    relative = features / seconds[:, None]
    units = _units(relative)
    return np.asarray(_least_squares(relative * units, np.ones(len(points))) * units)


def _least_squares(matrix: Vector, target: Vector) -> Vector:
    """The non-negative solution."""
    from scipy.optimize import nnls  # slow to import, and not every command plans

    solution, _ = nnls(matrix, target)
    return np.asarray(solution)

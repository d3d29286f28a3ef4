"""Latency models from measured layer times: fitted (LLM-PQ section 4.1), or the measured times.

Beside the paper's terms a fit of prefill has a constant (weights are read, and restored by some
kernels, once in each pass) and breakpoints at some numbers of rows (`layer_features`).
For a layer that was itself measured, the fit is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from planner.cluster.device import CPU_TOKENS_AT_ONCE, Device
from planner.costs.hosting import host_cpu, host_dtype
from planner.costs.latency_model import (
    DerivedLatency,
    HostedSeconds,
    LatencyModel,
    LayerSeconds,
)
from planner.costs.roofline import RooflineLatency
from planner.profiles.layer_fit import (
    REST,
    FitTask,
    LayerFit,
    Workload,
    fit_experts,
    medians,
    parts_of,
    row_length,
)
from planner.profiles.layer_terms import HEAD, LayerTerms, kind_words
from planner.profiles.rows import ProfileRow
from planner.profiles.selection import (
    SelectedRows,
    TimeQuery,
    applies,
    describe_selections,
    measured_bits,
    select_all,
    select_rows,
)
from planner.scheduling import PHASES, Phase
from quant.backends.table import HOST_BACKENDS
from quant.scheme import BITWIDTHS, FULL_BITS

Precision = tuple[Device, int, str, Phase]


class FittedLatency(DerivedLatency):
    """Layer times fitted to `profiles`; else, and in the proportions that rows do not determine,
    those of `fallback`. It is non-negative least squares of relative errors over a layer's sizes,
    so that one model's profile scales to another; rows of the very shape are used alone, with a
    correction.
    """

    def __init__(self, profiles: tuple[ProfileRow, ...], fallback: LatencyModel) -> None:
        super().__init__(fallback)
        self.profiles = profiles
        self._layer = LayerTerms.of(self.shape)
        self._fits: dict[Precision, LayerFit | None] = {}
        self._experts: dict[TimeQuery, Callable[[int], float] | None] = {}
        self._heads: dict[tuple[Device, str], Callable[[int], float]] = {}
        self._plain = _of_plain_layer(profiles, fallback)

    def fitted_of_kind(self, kind: int) -> FittedLatency:
        return FittedLatency(self.profiles, self.model.of_kind(kind))

    _of_kind = fitted_of_kind

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        fit = self._fit(device, bits, dtype, phase)
        if fit is not None:
            return fit(self._layer, micro_batch, length)
        workload = device, bits, phase, micro_batch, length, dtype
        estimate = self.model.layer_seconds(*workload)
        if self._plain is None:
            return estimate
        measured, modelled = (
            each.layer_seconds(*workload).rest_s for each in (self._plain, self._plain.model)
        )
        factor = measured / modelled
        return LayerSeconds(factor * estimate.attention_s, factor * estimate.rest_s)

    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        measured = self._experts_fit(device, bits, dtype)
        return (measured or partial(self._estimated_experts_s, device, bits, dtype))(tokens)

    def hosted_experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> HostedSeconds:
        """Where experts of this very layer were measured on a CPU of as many threads as the device
        has of its host, with the kernels of hosts, their products are as measured.
        """
        found = self.model.hosted_experts_s(device, bits, tokens, dtype)
        own = host_dtype(ProfileRow.timed_dtype(device, dtype))
        measured = self._experts_fit(host_cpu(device), bits, own, HOST_BACKENDS.get(bits))
        return found if measured is None else found._replace(computed_s=measured(tokens))

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """As measured of this LM head or, in proportion to its size, of another one; where none of
        its bits was, by one of 16 and the share of that which the datasheet gives it.
        """
        if (device, dtype) not in self._heads:
            self._heads[device, dtype] = self._head_fit(device, dtype)
        return self._heads[device, dtype](rows)

    def _head_rows(self, device: Device, dtype: str) -> SelectedRows:
        """Heads as layers of no kind, of which those of other models may be taken: of its bits, or
        of 16 where only these are of this very head.
        """
        heads = tuple(
            replace(row, layer=replace(row.layer, kind=""))
            for row in self.profiles
            if row.layer.kind == HEAD
        )
        layer = replace(LayerTerms.of_head(self.shape), kind="")
        found = [
            select_rows(heads, TimeQuery(device, dtype, layer, bits, "decode"))
            for bits in (self.shape.head_bits, FULL_BITS)
        ]
        return min(found, key=lambda used: (not used.rows, used.problem is not None))

    def _head_fit(self, device: Device, dtype: str) -> Callable[[int], float]:
        used = self._head_rows(device, dtype)
        if not used.rows:
            return lambda rows: self.model.final_s(device, rows, dtype)
        layer = used.wanted.layer
        measured = RooflineLatency(self.shape.with_all(head_bits=used.wanted.bits))

        def estimated(rows: int, _: int) -> LayerSeconds:
            return LayerSeconds(0.0, measured.final_s(device, rows, dtype))

        at_once = _tokens_at_once(device)
        task = FitTask(used.rows, "decode", layer, estimated, not used.problem, at_once)
        fitted = task.part(REST, used.rows)

        def seconds(rows: int) -> float:
            share = self.model.final_s(device, rows, dtype)
            share /= measured.final_s(device, rows, dtype)
            return share * fitted.seconds(layer, rows, 0)

        return seconds

    def _estimated_experts_s(self, device: Device, bits: int, dtype: str, tokens: int) -> float:
        return self.model.experts_s(device, bits, tokens, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return self.described("fitted to", device, dtype, bits)

    def spread(self, device: Device, dtype: str, bits: Sequence[int]) -> float:
        """That of the rows that are used, in the median."""
        used = select_all(self.profiles, device, dtype, self._layer, bits)
        known = [row.spread for each in used for row in each.rows if row.spread is not None]
        return float(np.median(known)) if known else 0.0

    def described(self, verb: str, device: Device, dtype: str, bits: Sequence[int]) -> str:
        if self.shape.kinds:
            kinds = map(self.fitted_of_kind, range(len(self.shape.kinds)))
            texts = dict.fromkeys(each.described(verb, device, dtype, bits) for each in kinds)
            return "; ".join(sorted(texts, key=lambda text: text.startswith("estimated")))
        found = select_all(self.profiles, device, dtype, self._layer, bits)
        estimate = self.model.provenance(device, dtype, bits)
        if self._plain is None or not all(used.problem for used in found):
            has_head = bool(self._head_rows(device, dtype).rows)
            measured = measured_bits(self.profiles, device, dtype, self._layer)
            lacking = {*BITWIDTHS} - {*bits} - measured
            return describe_selections(verb, found, estimate, has_head, lacking)
        scaled = select_all(self.profiles, device, dtype, self._plain._layer, bits)
        if not any(used.rows for used in scaled):
            return estimate
        what = describe_selections(verb, scaled, estimate)
        return f"{estimate}, in proportion to a layer of attention and one MLP {what}"

    def _fit(self, device: Device, bits: int, dtype: str, phase: Phase) -> LayerFit | None:
        key = (device, bits, dtype, phase)
        if key not in self._fits:
            layer = self._layer
            used = select_rows(self.profiles, TimeQuery(device, dtype, layer, bits, phase))
            self._fits[key] = None
            if used.rows and not (used.problem and self._plain):
                self._fits[key] = FitTask(
                    rows=used.rows,
                    phase=phase,
                    layer=layer,
                    estimate=partial(self._estimate, device, bits, dtype, phase),
                    is_same=not used.problem,
                    tokens_at_once=_tokens_at_once(device),
                    experts_s=self._experts_fit(device, bits, dtype),
                ).fit()
        return self._fits[key]

    def _estimate(
        self, device: Device, bits: int, dtype: str, phase: Phase, batch_size: int, length: int
    ) -> LayerSeconds:
        found = self.model.layer_seconds(device, bits, phase, batch_size, length, dtype)
        if self._layer.experts is None:
            return found
        tokens = batch_size * (length if phase == "prefill" else 1)
        return replace(found, experts_s=self.model.experts_s(device, bits, tokens, dtype))

    def _experts_fit(
        self, device: Device, bits: int, dtype: str, backend: str | None = None
    ) -> Callable[[int], float] | None:
        """Seconds of experts by tokens; None where they were not measured apart in this layer."""
        key = TimeQuery(device, dtype, self._layer, bits, PHASES[0], backend)
        if key not in self._experts:
            wanted = (replace(key, phase=phase) for phase in PHASES)
            found = [select_rows(self.profiles, each) for each in wanted if self._layer.experts]
            rows = [
                row
                for used in found
                for row in used.rows
                if not used.problem and row.experts_s is not None
            ]
            estimate = partial(self._estimated_experts_s, device, bits, dtype)
            self._experts[key] = (
                fit_experts(rows, self._layer, estimate, _tokens_at_once(device)) if rows else None
            )
        return self._experts[key]


def _tokens_at_once(device: Device) -> float:
    return CPU_TOKENS_AT_ONCE if device.accelerator.is_cpu else inf


def _of_plain_layer(
    profiles: tuple[ProfileRow, ...], fallback: LatencyModel
) -> FittedLatency | None:
    """The times of a layer with attention to all tokens and one MLP in place of what layers with
    experts, a mixer or a window have, by whose distance from estimates theirs are scaled; None for
    others.
    """
    shape = fallback.shape
    if shape.kinds or not kind_words(shape):
        return None
    width = shape.intermediate_size
    if shape.experts is not None:
        width = shape.experts.per_token * shape.experts.width + shape.experts.shared_width
    plain = replace(
        shape,
        experts=None,
        delta=None,
        sliding_window=None,
        intermediate_size=width,
        gated_mlp=shape.gated_mlp or shape.experts is not None,
    )
    return FittedLatency(profiles, RooflineLatency(plain))


class ProfiledLatency(DerivedLatency):
    """The median measured for this very layer and workload, else the fit, also for attention."""

    def __init__(self, fitted: FittedLatency) -> None:
        super().__init__(fitted)
        self._fitted = fitted
        self._times: dict[Precision, dict[Workload, float]] = {}
        self._shares: dict[Precision, dict[Workload, float]] = {}

    def _of_kind(self, kind: int) -> LatencyModel:
        return ProfiledLatency(self._fitted.fitted_of_kind(kind))

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        key, workload = (device, bits, dtype, phase), (micro_batch, length)
        if key not in self._times:
            self._read(key)
        measured_s = self._times[key].get(workload)
        share = self._shares[key].get(workload)
        if measured_s is not None and share is not None:
            return LayerSeconds(share * measured_s, (1 - share) * measured_s)
        fitted = self._fitted.layer_seconds(device, bits, phase, micro_batch, length, dtype)
        if measured_s is None:
            return fitted
        attention_s = measured_s * (fitted.attention_s / fitted.whole_s)
        return LayerSeconds(attention_s, measured_s - attention_s)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return self._fitted.described("measured in", device, dtype, bits)

    def _read(self, key: Precision) -> None:
        device, bits, dtype, phase = key
        wanted = TimeQuery(device, dtype, LayerTerms.of(self.shape), bits, phase)
        used = select_rows(self._fitted.profiles, wanted)
        rows = [] if used.problem else [((r.batch_size, row_length(r)), r) for r in used.rows]
        self._times[key] = medians((workload, row.seconds) for workload, row in rows)
        self._shares[key] = medians(
            (workload, parts_of(row).attention_s / row.seconds)
            for workload, row in rows
            if row.attention_s is not None
        )


# One measured point in four is left out of the fit, which then predicts it.
_LEFT_OUT = 4


@dataclass(frozen=True)
class FitError:
    """Relative errors at one bitwidth and phase (None: of all), of a fit to `fitted` points."""

    bits: int | None
    phase: Phase | None
    fitted: int
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.errors))

    @property
    def percentile_95(self) -> float:
        return float(np.quantile(self.errors, 0.95))

    @property
    def most(self) -> float:
        return float(np.max(self.errors))


def predicted_s(model: LatencyModel, device: Device, row: ProfileRow, dtype: str) -> float:
    time = model.layer_prefill_s if row.phase == "prefill" else model.layer_decode_s
    return time(device, row.bits, row.batch_size, row_length(row), dtype)


def relative_errors(
    model: LatencyModel, device: Device, rows: Iterable[ProfileRow], dtype: str
) -> tuple[float, ...]:
    """Compute `|predicted - measured| / measured` for every row."""
    pairs = [(predicted_s(model, device, row, dtype), row.seconds) for row in rows]
    return tuple(abs(predicted - measured) / measured for predicted, measured in pairs)


def held_out_errors(
    rows: Sequence[ProfileRow], fallback: LatencyModel, device: Device, dtype: str
) -> tuple[FitError, ...]:
    """Predict every fourth row, by tokens, from the others; bitwidths of too few rows are out."""
    found: list[FitError] = []
    for bits in sorted({row.bits for row in rows}):
        for phase in PHASES:
            own = [
                row
                for row in rows
                if (row.bits, row.phase) == (bits, phase) and applies(row, device, dtype)
            ]
            own = sorted(own, key=lambda row: (row.batch_size * row_length(row), row.batch_size))
            held = own[_LEFT_OUT // 2 :: _LEFT_OUT]
            kept = tuple(row for row in own if row not in held)
            if held and kept:
                errors = relative_errors(FittedLatency(kept, fallback), device, held, dtype)
                found.append(FitError(bits, phase, len(kept), errors))
    return tuple(found)


def all_together(errors: Sequence[FitError]) -> FitError:
    together = tuple(value for each in errors for value in each.errors)
    return FitError(None, None, sum(each.fitted for each in errors), together)

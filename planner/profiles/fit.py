"""Latency models from measured layer times: fitted (LLM-PQ section 4.1), or the measured times.

Beside the paper's terms a fit of prefill has a constant (weights are read, and restored by some
kernels, once in each pass) and breakpoints at some numbers of rows (`layer_features`).
For a layer that was itself measured, the fit is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from planner.cluster.device import CPU_TOKENS_AT_ONCE, Device
from planner.costs.latency_model import DerivedLatency, LatencyModel, LayerSeconds
from planner.costs.roofline import RooflineLatency
from planner.profiles.layer_fit import FitTask, LayerFit, Workload, medians, parts_of, row_length
from planner.profiles.rows import LayerTerms, ProfileRow
from planner.scheduling import PHASES, Phase
from quant.backends.table import backend_name
from quant.common.errors import SpecError
from quant.scheme import DTYPE_BYTES


@dataclass(frozen=True)
class TimeQuery:
    device: Device
    dtype: str
    layer: LayerTerms
    bits: int
    phase: Phase

    @property
    def threads(self) -> int:
        return self.device.threads or 1

    def backend_of(self, row: ProfileRow) -> str:
        """The kernel backend timed for a micro-batch like `row`, also where a CPU emulates."""
        dtype = ProfileRow.timed_dtype(self.device, self.dtype)
        rows = row.batch_size if self.phase == "decode" else 0
        processor = self.device.accelerator.processor
        return backend_name(processor, self.bits, dtype, decode_rows=rows)

    def dtype_of(self, row: ProfileRow) -> str:
        return row.dtype or self.device.default_dtype


@dataclass(frozen=True)
class Condition:
    holds: Callable[[TimeQuery, ProfileRow], bool]
    problem: Callable[[TimeQuery, Sequence[ProfileRow]], str]


CONDITIONS = (
    Condition(
        lambda wanted, row: row.device == wanted.device.accelerator.name,
        lambda wanted, rows: f"taken on {_listed(row.device for row in rows)}",
    ),
    Condition(
        lambda wanted, row: row.threads in (None, wanted.threads),
        lambda wanted, rows: (
            f"taken at a thread count of {_listed(str(row.threads) for row in rows)}, not "
            f"{wanted.threads}"
        ),
    ),
    Condition(
        lambda wanted, row: DTYPE_BYTES[wanted.dtype_of(row)] == DTYPE_BYTES[wanted.dtype],
        lambda wanted, rows: (
            f"taken in {_listed(wanted.dtype_of(row) for row in rows)}, not {wanted.dtype}"
        ),
    ),
    Condition(lambda wanted, row: row.bits == wanted.bits, lambda wanted, rows: "no rows"),
    Condition(lambda wanted, row: row.phase == wanted.phase, lambda wanted, rows: "no rows"),
    Condition(
        lambda wanted, row: row.backend in (None, wanted.backend_of(row)),
        lambda wanted, rows: (
            f"taken with the kernel {_listed(row.backend or '' for row in rows)}, not "
            f"{_listed(map(wanted.backend_of, rows))}"
        ),
    ),
)
"""The conditions, in the order in which messages say what is missing."""


def applies(row: ProfileRow, device: Device, dtype: str) -> bool:
    """Whether a row was measured on such a device and precision, with the kernel used now."""
    wanted = TimeQuery(device, dtype, row.layer, row.bits, row.phase)
    return all(condition.holds(wanted, row) for condition in CONDITIONS)


@dataclass(frozen=True)
class SelectedRows:
    wanted: TimeQuery
    rows: tuple[ProfileRow, ...]
    problem: str | None


def select_rows(profiles: Sequence[ProfileRow], wanted: TimeQuery) -> SelectedRows:
    """Select rows of the very layer where there are any, else those of other models."""
    left = profiles
    for condition in CONDITIONS:
        kept = [row for row in left if condition.holds(wanted, row)]
        if not kept:
            return SelectedRows(wanted, (), condition.problem(wanted, left) if left else "no rows")
        left = kept
    same = tuple(row for row in left if row.layer == wanted.layer)
    if same:
        return SelectedRows(wanted, same, None)
    return SelectedRows(wanted, tuple(left), f"scaled from {_listed(row.model for row in left)}")


def select_all(
    profiles: Sequence[ProfileRow],
    device: Device,
    dtype: str,
    layer: LayerTerms,
    bits: Iterable[int],
) -> list[SelectedRows]:
    return [
        select_rows(profiles, TimeQuery(device, dtype, layer, each, phase))
        for each in bits
        for phase in PHASES
    ]


def describe_selections(verb: str, found: Sequence[SelectedRows], estimate: str) -> str:
    """Describe from which rows times are taken (`verb` them); else `estimate` and the reason."""
    rows = [row for used in found for row in used.rows]
    missing = [used for used in found if not used.rows]
    scaled = [used for used in found if used.rows and used.problem]
    parts = []
    if rows:
        sources = _listed(row.source for row in rows)
        kernels = {f"{r.backend} {r.backend_version or ''}".strip() for r in rows if r.backend}
        bits = ", ".join(map(str, sorted({row.bits for row in rows})))
        inner = "; ".join((f"bits {bits}", *sorted(kernels), *_problems(scaled)))
        of = f" of {sources}" if sources else ""
        parts.append(f"{verb} {len(rows)} profile rows{of} ({inner})")
    if missing:
        parts.append(f"{estimate} ({'; '.join(_problems(missing))})")
    if rows:
        parts.append(f"embedding and LM head {estimate}")
    return "; ".join(parts)


def refuse_estimates(
    profiles: Sequence[ProfileRow],
    layer: LayerTerms,
    devices: Iterable[tuple[Device, str]],
    bits: Sequence[int],
    path: str,
) -> None:
    """Raise SpecError for the first device and compute type without a time of this very layer."""
    for device, dtype in devices:
        lacking = [
            used for used in select_all(profiles, device, dtype, layer, bits) if used.problem
        ]
        if lacking:
            raise SpecError(
                f"strict_profiles: {path} has not all times of {device.name}: "
                f"{'; '.join(_problems(lacking))}; measure them with llmpq profile, leave those "
                "bits out (--bits), or plan without --strict_profiles"
            )


def _problems(found: Sequence[SelectedRows]) -> Iterator[str]:
    for problem in dict.fromkeys(used.problem for used in found):
        by_bits = {
            bits: tuple(
                u.wanted.phase for u in found if (u.problem, u.wanted.bits) == (problem, bits)
            )
            for bits in sorted({used.wanted.bits for used in found if used.problem == problem})
        }
        for phases in dict.fromkeys(by_bits.values()):
            bits = ", ".join(str(each) for each, of in by_bits.items() if of == phases)
            which = "" if phases == PHASES else f"{phases[0]} of "
            yield f"{which}bits {bits}: {problem}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))


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

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return self.described("fitted to", device, dtype, bits)

    def described(self, verb: str, device: Device, dtype: str, bits: Sequence[int]) -> str:
        if self.shape.kinds:
            kinds = map(self.fitted_of_kind, range(len(self.shape.kinds)))
            texts = dict.fromkeys(each.described(verb, device, dtype, bits) for each in kinds)
            return "; ".join(sorted(texts, key=lambda text: text.startswith("estimated")))
        found = select_all(self.profiles, device, dtype, self._layer, bits)
        estimate = self.model.provenance(device, dtype, bits)
        if self._plain is None or not all(used.problem for used in found):
            return describe_selections(verb, found, estimate)
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
                    estimate=lambda batch, length: self.model.layer_seconds(
                        device, bits, phase, batch, length, dtype
                    ),
                    is_same=not used.problem,
                    tokens_at_once=CPU_TOKENS_AT_ONCE if device.accelerator.is_cpu else inf,
                ).fit()
        return self._fits[key]


def _of_plain_layer(
    profiles: tuple[ProfileRow, ...], fallback: LatencyModel
) -> FittedLatency | None:
    """The times of a layer with attention and one MLP in place of what layers with experts or a
    mixer have, by whose distance from estimates theirs are scaled; None for others.
    """
    shape = fallback.shape
    if shape.experts is None and shape.delta is None:
        return None
    width = shape.intermediate_size
    if shape.experts is not None:
        width = shape.experts.per_token * shape.experts.width + shape.experts.shared_width
    plain = replace(shape, experts=None, delta=None, intermediate_size=width, gated_mlp=True)
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

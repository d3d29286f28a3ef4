"""The errors of fitted layer times against measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cluster.device import Device
from planner.costs.latency_model import LatencyModel
from planner.phases import PHASES, Phase
from planner.profiles.fit import FittedLatency
from planner.profiles.fitting.layer_fit import row_length
from planner.profiles.row_selection import applies
from planner.profiles.rows import ProfileRow

# One measured point in four is left out of the fit, which then predicts it.
_LEFT_OUT = 4


@dataclass(frozen=True)
class FitError:
    """Relative errors at one bitwidth and phase, of a fit to `fitted` points."""

    bits: int | None
    phase: Phase | None
    fitted: int
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the absolute relative errors."""
        return float(np.mean(self.errors))

    @property
    def percentile_95(self) -> float:
        """The 95th percentile of the absolute relative errors."""
        return float(np.quantile(self.errors, 0.95))

    @property
    def most(self) -> float:
        """The largest absolute relative error."""
        return float(np.max(self.errors))


def predicted_s(model: LatencyModel, device: Device, row: ProfileRow, dtype: str) -> float:
    """The seconds that `model` predicts for the workload of `row`."""
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
    """Predict every fourth row, by tokens, from the others, for each bitwidth and phase.

    Bitwidths and phases with too few rows to leave one out are not in the answer.
    """
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
    """Join the errors of all bitwidths and phases."""
    together = tuple(value for each in errors for value in each.errors)
    return FitError(None, None, sum(each.fitted for each in errors), together)

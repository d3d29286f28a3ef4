"""Measured latencies of requests beside the bound that was planned for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.latency_counts import LatencyCounts
from llmpq.report.formatting import seconds, whole_percent

MEDIAN = 0.5


@dataclass(frozen=True)
class PlannedLatency:
    """The latency that a share `quantile` of all requests should have at most, as forecast, and the
    bound that was asked for, if any; both in seconds of the run.
    """

    quantile: float
    planned_s: float
    bound_s: float | None


@dataclass(frozen=True)
class LatencyFigures:
    """Latencies of so many requests, from the submission of their prefill to their last token: the
    median, and what a share `quantile` has at most, beside what was planned of it.
    """

    requests: int
    median_s: float
    quantile: float
    quantile_s: float
    planned_s: float
    bound_s: float | None

    @classmethod
    def of(cls, counts: Sequence[LatencyCounts], planned: PlannedLatency) -> LatencyFigures | None:
        """The figures of all these counts together; None where no request has ended."""
        together = LatencyCounts()
        for each in counts:
            together = together.plus(each)
        median_s, quantile_s = map(together.quantile_s, (MEDIAN, planned.quantile))
        if median_s is None or quantile_s is None:
            return None
        return cls(
            together.requests,
            median_s,
            planned.quantile,
            quantile_s,
            planned.planned_s,
            planned.bound_s,
        )

    def __str__(self) -> str:
        """The figures in words."""
        beside = f"planned {seconds(self.planned_s)}"
        if self.bound_s is not None:
            kept = "within" if self.quantile_s <= self.bound_s else "above"
            beside += f", {kept} the bound of {seconds(self.bound_s)}"
        return (
            f"{whole_percent(self.quantile)} within {seconds(self.quantile_s)} ({beside}), "
            f"half within {seconds(self.median_s)}"
        )

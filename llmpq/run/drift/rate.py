"""Generated tokens per second while all slots are in use, as measured and as planned."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from llmpq.report.measured_latency import PlannedLatency
from planner.plan.simulate import time_scale
from planner.plan.spec import PlanSpec

LEAST_ROWS = 64
"""Rows that must end within a window: their tokens per second vary by a few per cent."""

LEAST_S = 10.0
"""Seconds of a window: stages are asked about once a second."""


def planned_tokens_per_s(plan: PlanSpec) -> float | None:
    """Generated tokens per second of `plan` when it is run; None where some emulated device has no
    time scale and so follows no plan.
    """
    if any(stage.emulated for stage in plan.stages) and not plan.time_scale:
        return None
    planned = plan.predicted.tokens_per_s
    if plan.job is not None:
        planned = plan.job.tokens_per_s
    elif plan.latency is not None:
        planned = plan.latency.tokens_per_s
    return planned / time_scale(plan)


def settled_tokens_per_s(plan: PlanSpec) -> float | None:
    """Planned tokens per second while all slots are in use, where the plan says that, else of the
    whole job; None as `planned_tokens_per_s`.
    """
    rate = planned_tokens_per_s(plan)
    if rate is None or plan.latency is None:
        return rate
    return plan.latency.tokens_per_s / time_scale(plan)


def planned_latency(plan: PlanSpec) -> PlannedLatency | None:
    """The latency that `plan` forecasts when it is run, and its bound; None where it has none, or
    is not followed.
    """
    if plan.latency is None or planned_tokens_per_s(plan) is None:
        return None
    scale, bound_s = time_scale(plan), plan.latency.bound_s
    return PlannedLatency(
        plan.latency.quantile,
        scale * plan.latency.latency_s,
        None if bound_s is None else scale * bound_s,
    )


@dataclass(frozen=True)
class _Mark:
    at_s: float
    tokens: int
    ended: int


class RateWindow:
    """Measures tokens per second over the latest turn of `slots` rows, or `LEAST_ROWS`.

    The first turn fills the slots and does not count; nor does time in which there were fewer
    requests than slots, as at the end of a job or where prompts come slowly. The thread that looks
    at the stages adds to it while the run asks for the rate.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._marks: deque[_Mark] = deque()
        self._settled_at: int | None = None
        self._lock = threading.Lock()

    def add(self, at_s: float, tokens: int, ended: int, in_flight: int) -> None:
        """Note the tokens and the rows that `ended` until `at_s`, and the requests in flight."""
        with self._lock:
            if self._settled_at is None:
                self._settled_at = ended + self._slots
            if in_flight < self._slots or ended < self._settled_at:
                self._marks.clear()
                return
            self._marks.append(_Mark(at_s, tokens, ended))
            while len(self._marks) > 2 and self._is_enough(self._marks[1]):
                self._marks.popleft()

    def clear(self) -> None:
        """Begin again, as after a fault: with slots that are filled anew."""
        with self._lock:
            self._marks.clear()
            self._settled_at = None

    @property
    def tokens_per_s(self) -> float | None:
        """The measured rate; None while too few rows have ended."""
        with self._lock:
            if not self._marks or not self._is_enough(self._marks[0]):
                return None
            first, last = self._marks[0], self._marks[-1]
        return (last.tokens - first.tokens) / (last.at_s - first.at_s)

    def _is_enough(self, first: _Mark) -> bool:
        last = self._marks[-1]
        rows = last.ended - first.ended
        return rows >= max(self._slots, LEAST_ROWS) and last.at_s - first.at_s >= LEAST_S

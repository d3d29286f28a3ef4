"""What the driver of a run tells Prometheus, through Ray: rows, errors by kind, faults, and what
the plan predicts, beside which the stages' own metrics are read.
"""

from __future__ import annotations

import sys
from collections import Counter
from threading import Lock

from llmpq.jobs import journal
from quant.common.text import in_ascii

OTHERS = "others"

_RUN = "run"


class _Instruments:
    """The metrics themselves, all with the tag `run`."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self.planned = Gauge("llmpq_planned_tokens_per_s", "Tokens/s by the plan", (_RUN,))
        self.left = Gauge("llmpq_seconds_to_go", "Until all rows are done; 0: not known", (_RUN,))
        self.rows = Gauge("llmpq_rows", "Rows of the job", (_RUN, "state"))
        kinds = (_RUN, "kind")
        self.errors = Gauge("llmpq_row_errors", "Rows of the session in error, by kind", kinds)
        self.events = Gauge("llmpq_events", "Faults and repairs of the session", kinds)
        self.lost = Gauge("llmpq_lost_seconds", "Seconds that they cost", kinds)
        for metric in vars(self).values():
            metric.set_default_tags({_RUN: in_ascii(run)})


class RunMetrics:
    """Publishes what a job's journal is told, from any thread.

    From the first point of the journal on, all of it is told every time: what Ray's agent was told
    before it had begun is forgotten, so that counts could not be added up there, and so is a gauge
    that is not told again within 20 s.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: _Instruments | None = None
        self._start: journal.SessionStart | None = None
        self._point: journal.ProgressPoint | None = None
        self._planned: float | None = None
        self._errors: dict[str, int] = {}
        self._events: Counter[str] = Counter()
        self._lost_s: dict[str, float] = {}
        self._lock = Lock()

    def note(self, entry: journal.Entry) -> None:
        with self._lock:
            self._keep(entry)
        self.refresh()

    def refresh(self, state: object = None) -> None:
        """Tell all of it again, whatever the `state` of the run."""
        with self._lock:
            if self._point is not None and _has_ray():
                self._made = self._made or _Instruments(self._run)
                self._publish(self._point, self._made)

    def _keep(self, entry: journal.Entry) -> None:
        if isinstance(entry, journal.SessionStart):
            self._start = entry
        if isinstance(entry, journal.SessionStart | journal.PlanChange):
            self._planned = entry.plan.tokens_per_s
        elif isinstance(entry, journal.ProgressPoint):
            self._point = entry
        elif isinstance(entry, journal.ErrorNote):
            self._errors[entry.what] = entry.count
        elif isinstance(entry, journal.EventNote):
            self._events[entry.event] += 1
            self._lost_s[entry.event] = self._lost_s.get(entry.event, 0.0) + entry.lost_s
        elif isinstance(entry, journal.MoreEvents):
            self._events[OTHERS] = entry.count

    def _publish(self, point: journal.ProgressPoint, made: _Instruments) -> None:
        start = self._start
        if start is not None:  # what sessions before this one have done, counts
            made.rows.set(start.rows, {"state": "all"})
            made.rows.set(start.resumed + point.rows, {"state": "done"})
            made.rows.set(start.resumed_errors + point.errors, {"state": "errors"})
        if self._planned is not None:
            made.planned.set(self._planned)
        made.left.set(point.left_s or 0.0)
        told = ((made.errors, self._errors), (made.events, self._events), (made.lost, self._lost_s))
        for gauge, values in told:
            for kind, value in values.items():
                gauge.set(value, {"kind": in_ascii(kind)})


def _has_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())

"""Looking at the stages of a run from the driver, without ever harming it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from actors.processes.handle import StageHandle
from actors.processes.meter import Spans
from actors.processes.request_log import RequestTimes
from actors.stage_figures import LayersLoaded, StageStats

T = TypeVar("T")

PINGS = 5
POLL_S = 5.0  # a stage whose control thread does not answer for so long is not waited for
LOADING_S = 0.5  # for stages whose processes are only starting
COLLECT_S = 30.0  # 5 MB of every stage


@dataclass(frozen=True)
class ClockOffset:
    """A stage's clock minus the driver's, exact to `error_s`: half of the time there and back."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, eq=False)
class StageTrace:
    """Times of a stage's micro-batches, and how its clock differs from the driver's."""

    spans: Spans
    clock: ClockOffset


class Observer:
    """Asks the control threads of `stages`, which stand in the plan's order and answer while they
    compute; a process behind one may change.

    What a stage does not answer, because it died or is slow, is None; nothing is raised.
    """

    def __init__(
        self, stages: Sequence[StageHandle], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._stages = stages
        self._clock = clock
        self._clocks: dict[int, ClockOffset] = {}

    def figures(self) -> tuple[StageStats, ...] | None:
        """Return the figures of every stage; None unless all answer."""
        stats = _answer(lambda: ray.get([each.stats() for each in self._stages], timeout=POLL_S))
        return tuple(stats) if stats else None

    def loading(self) -> tuple[LayersLoaded | None, ...]:
        """Return how far each stage is with loading; None where its process has not come up."""
        try:
            asked = [each.layers_loaded() for each in self._stages]
        except RuntimeError:  # not all are started
            return (None,) * len(self._stages)
        found = _answer(lambda: ray.wait(asked, num_returns=len(asked), timeout=LOADING_S)[0])
        return tuple(_got(each) if each in (found or ()) else None for each in asked)

    def align(self) -> None:
        """Estimate how the stages' clocks differ from this process's."""
        for index, stage in enumerate(self._stages):
            pings = [self._ping(stage) for _ in range(PINGS)]
            found = [ping for ping in pings if ping is not None]
            if found:
                self._note(index, min(found, key=lambda ping: ping.error_s))

    def _ping(self, stage: StageHandle) -> ClockOffset | None:
        before_s = self._clock()
        shown_s = _answer(lambda: ray.get(stage.clock_s(), timeout=POLL_S))
        after_s = self._clock()
        if shown_s is None:
            return None
        return ClockOffset(shown_s - (before_s + after_s) / 2, (after_s - before_s) / 2)

    def _note(self, stage: int, found: ClockOffset) -> None:
        """Keep the surer of two estimates; the later one where they contradict each other."""
        known = self._clocks.get(stage)
        if known is not None:
            agree = abs(known.offset_s - found.offset_s) <= known.error_s + found.error_s
            if agree and known.error_s < found.error_s:
                return
        self._clocks[stage] = found

    def traces(self) -> tuple[StageTrace | None, ...]:
        """Return every stage's micro-batches, with clocks compared once more."""
        self.align()
        return tuple(self._trace(index, stage) for index, stage in enumerate(self._stages))

    def take_requests(self, custom_ids: Sequence[str]) -> tuple[dict[str, RequestTimes], ...]:
        """Return what each stage has kept of requests that have ended, by this process's clock."""
        if len(self._clocks) < len(self._stages):
            self.align()
        asked = [_answer(partial(stage.take_requests, custom_ids)) for stage in self._stages]
        return tuple(
            self._shifted(index, {} if one is None else _got(one) or {})
            for index, one in enumerate(asked)
        )

    def _shifted(self, stage: int, found: dict[str, RequestTimes]) -> dict[str, RequestTimes]:
        clock = self._clocks.get(stage)
        if clock is None:
            return {}
        return {
            name: {phase: each.shifted(clock.offset_s) for phase, each in times.items()}
            for name, times in found.items()
        }

    def _trace(self, index: int, stage: StageHandle) -> StageTrace | None:
        spans = _answer(lambda: ray.get(stage.spans(), timeout=COLLECT_S))
        clock = self._clocks.get(index)
        return None if spans is None or clock is None else StageTrace(spans, clock)


def _answer(ask: Callable[[], T]) -> T | None:
    """Return what `ask` does, None where Ray has no answer."""
    try:
        return ask()
    except RayError:
        return None


def _got(reference: ObjectRef[T]) -> T | None:
    """Return an answer that has come, None where it is an error of Ray's."""
    return _answer(lambda: ray.get(reference, timeout=POLL_S))

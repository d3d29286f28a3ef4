"""Looking at the stages of a run from the driver, without ever harming it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.messages import StageStats
from actors.telemetry.meter import Spans

T = TypeVar("T")

PINGS = 5
POLL_S = 5.0  # a stage whose control thread does not answer for so long is not waited for
COLLECT_S = 30.0  # 5 MB of every stage


@dataclass(frozen=True)
class ClockOffset:
    """A stage's clock minus the driver's, right to `error_s`: half the way there and back."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, eq=False)
class StageTrace:
    """When a stage computed what, and how its clock goes."""

    spans: Spans
    clock: ClockOffset


class Observer:
    """Asks the control threads of the `actors` that a run has at the time, in stage order.

    What a stage does not answer, because it died or is slow, is None; nothing is raised.
    """

    def __init__(
        self, actors: Callable[[], Sequence[Any]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._actors = actors
        self._clock = clock
        self._clocks: dict[int, ClockOffset] = {}

    def figures(self) -> tuple[StageStats, ...] | None:
        """Figures of every stage; None unless all answer."""
        stats: tuple[StageStats, ...] | None = _answer(
            lambda: tuple(ray.get([a.stats.remote() for a in self._actors()], timeout=POLL_S))
        )
        return stats or None

    def align(self) -> None:
        """Estimate how the stages' clocks differ from this process's."""
        for stage, actor in enumerate(self._actors()):
            pings = [self._ping(actor) for _ in range(PINGS)]
            found = [ping for ping in pings if ping is not None]
            if found:
                self._note(stage, min(found, key=lambda ping: ping.error_s))

    def _ping(self, actor: Any) -> ClockOffset | None:
        before_s = self._clock()
        shown_s = _answer(lambda: float(ray.get(actor.clock_s.remote(), timeout=POLL_S)))
        after_s = self._clock()
        if shown_s is None:
            return None
        return ClockOffset(shown_s - (before_s + after_s) / 2, (after_s - before_s) / 2)

    def _note(self, stage: int, found: ClockOffset) -> None:
        """Of two estimates the surer one; the later one where they contradict each other, as after
        a restart on another node.
        """
        known = self._clocks.get(stage)
        if known is not None:
            agree = abs(known.offset_s - found.offset_s) <= known.error_s + found.error_s
            if agree and known.error_s < found.error_s:
                return
        self._clocks[stage] = found

    def traces(self) -> tuple[StageTrace | None, ...]:
        """Every stage's micro-batches; clocks are compared again."""
        self.align()
        return tuple(self._trace(stage, actor) for stage, actor in enumerate(self._actors()))

    def _trace(self, stage: int, actor: Any) -> StageTrace | None:
        spans: Spans | None = _answer(lambda: ray.get(actor.spans.remote(), timeout=COLLECT_S))
        clock = self._clocks.get(stage)
        return None if spans is None or clock is None else StageTrace(spans, clock)


def _answer(ask: Callable[[], T]) -> T | None:
    """What `ask` returns, None where Ray has no answer."""
    try:
        return ask()
    except RayError:
        return None

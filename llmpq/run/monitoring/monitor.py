"""Monitoring a run: a thread asks the stages about once a second how far they are, and a trace of
their micro-batches is written at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from actors.live_group import LiveGroup
from actors.stage_figures import StageStats
from llmpq.run.monitoring.meter import INTERVAL_S, RunMeter, RunState
from llmpq.run.monitoring.trace import save_trace
from planner.plan.spec import PlanSpec
from quant.common.errors import HeadLostError, InputError

WAIT_AT_END_S = 10.0  # for a poll in progress, which waits 5 s for the stages


class Monitor:
    """Context manager that calls `poll` every `interval_s` and then each of `show` with the state.

    `poll` returns None where the stages do not answer; the run never waits for either of them.
    """

    def __init__(
        self,
        meter: RunMeter,
        poll: Callable[[], Sequence[StageStats] | None],
        show: Sequence[Callable[[RunState], None]] = (),
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._meter, self._poll, self._show = meter, poll, tuple(show)
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._meter.begin()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(WAIT_AT_END_S)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.poll_once()

    def poll_once(self) -> None:
        """Ask the stages once and show the state."""
        stages = self._poll()
        if stages is not None:
            self._meter.add(stages)
        if not self._ended.is_set():
            state = self._meter.state()
            for show in self._show:
                show(state)


@contextmanager
def monitored(
    group: LiveGroup,
    plan: PlanSpec,
    meter: RunMeter,
    show: Sequence[Callable[[RunState], None]],
    trace: Path | None,
) -> Iterator[Callable[[], tuple[StageStats, ...] | None]]:
    """Monitor a run while it generates: the functions in `show` are called with the state about
    once a second, and the trace is written however the run ends, unless Ray itself is lost.

    Gives the figures of the stages, without those of runs before it.
    """
    figures = partial(_figures_since, group.observer.figures(), group)
    if trace is not None:
        group.observer.align()
    try:
        with Monitor(meter, figures, show):
            yield figures
        last = figures()  # what ended since the thread asked
        if last is not None:
            meter.add(last)
    except HeadLostError:  # the stages are lost with it
        raise
    except BaseException:
        if trace is not None:
            with suppress(InputError):  # the error that ended the run matters more
                save_trace(trace, plan, group.observer.traces())
        raise
    if trace is not None:
        save_trace(trace, plan, group.observer.traces())


def _figures_since(
    earlier: Sequence[StageStats] | None, group: LiveGroup
) -> tuple[StageStats, ...] | None:
    """The figures of the stages of `group` without those that they had `earlier`."""
    found = group.observer.figures()
    if found is None or earlier is None:
        return found
    return tuple(now.since(then) for now, then in zip(found, earlier, strict=True))

"""Threads that ask the stages of a run about once a second how far they are, while they load and
while they generate; a trace of their micro-batches is written at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from actors.stage_figures import LayersLoaded, StageStats
from llmpq.run.meter import INTERVAL_S, RunMeter, RunState
from planner.plan.simulate import MeasuredStage, run_trace
from planner.plan.spec import PlanSpec
from quant.common.errors import HeadLostError, InputError
from quant.common.files import write_text

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from actors.processes.observer import StageTrace

T = TypeVar("T")

WAIT_AT_END_S = 10.0  # for a poll in progress, which waits 5 s for the stages


class Watch(Generic[T]):
    """Context manager that calls `ask` every `interval_s`, and each of `show` with what it says, in
    a thread; nobody waits for either, but at the end for a call in progress.
    """

    def __init__(
        self,
        ask: Callable[[], T],
        show: Sequence[Callable[[T], None]],
        name: str,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._ask, self._show, self._interval_s = ask, tuple(show), interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"llmpq-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(WAIT_AT_END_S)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            said = self._ask()
            if not self._ended.is_set():
                for show in self._show:
                    show(said)


def monitor(
    meter: RunMeter,
    poll: Callable[[], Sequence[StageStats] | None],
    show: Sequence[Callable[[RunState], None]] = (),
    interval_s: float = INTERVAL_S,
) -> Watch[RunState]:
    """Count in `meter` what `poll` returns (None: no answer), and show its state."""

    def ask() -> RunState:
        stages = poll()
        if stages is not None:
            meter.add(stages)
        return meter.state()

    meter.begin()
    return Watch(ask, show, "monitor", interval_s)


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
        with monitor(meter, figures, show):
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


@dataclass(frozen=True)
class LoadingState:
    """What all stages do together: `done` of `layers`; None before their processes have begun."""

    what: str | None
    done: int
    layers: int

    @classmethod
    def of(cls, stages: Sequence[LayersLoaded | None], layers: int) -> LoadingState:
        """The state of stages that have `layers` together, None for one that does not answer yet.

        Importance is measured by one stage after another, and by all before one loads.
        """
        known = [stage for stage in stages if stage is not None and stage.what is not None]
        kinds = {stage.what for stage in known}
        if not kinds:
            return cls(None, 0, layers)
        what = "weights" if "weights" in kinds else "importance"
        done = sum(stage.done for stage in known if stage.what == what)
        return cls(what, done, layers)

    def __str__(self) -> str:
        if self.what is None:
            return "starting stages"
        kind = "loading" if self.what == "weights" else "measuring importance"
        return f"{kind}: {self.done} of {self.layers} layers"


def loading_watch(
    group: LiveGroup, show: Sequence[Callable[[LoadingState], None]], interval_s: float = INTERVAL_S
) -> AbstractContextManager[object]:
    """Ask the stages of `group` how far they are with loading, where anybody is told."""
    if not show:
        return nullcontext()
    layers = sum(len(stage.layers) for stage in group.plan.stages)
    observer = group.observer
    return Watch(lambda: LoadingState.of(observer.loading(), layers), show, "loading", interval_s)


def save_trace(path: str | Path, plan: PlanSpec, traces: Sequence[StageTrace | None]) -> None:
    """Write the run beside the plan's simulation; raises InputError where that is not possible."""
    stages = [None if trace is None else measured(trace) for trace in traces]
    write_text(Path(path), run_trace(plan, stages))


def measured(trace: StageTrace) -> MeasuredStage:
    """Turn a stage's times into the driver's clock."""
    rows, clock = trace.spans.rows, trace.clock
    return MeasuredStage(
        began_s=rows["began_s"] - clock.offset_s,
        ended_s=rows["ended_s"] - clock.offset_s,
        sent_s=rows["sent_s"] - clock.offset_s,
        requests=rows["requests"].astype(np.int64),
        decode_requests=rows["decode_requests"].astype(np.int64),
        tokens=rows["tokens"].astype(np.int64),
        context_length=rows["context"].astype(np.int64),
        dropped=trace.spans.dropped,
        clock_offset_s=clock.offset_s,
        clock_error_s=clock.error_s,
    )

"""What is done beside a run for those who look on: progress, and a trace at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.stage_group import StageGroup
from llmpq.run.monitor import Monitor, RunMeter, RunState
from llmpq.run.trace import save_trace
from planner.plan.plan import Plan
from quant.common.errors import HeadLostError, InputError


@contextmanager
def watching(
    group: StageGroup,
    plan: Plan,
    meter: RunMeter,
    show: Sequence[Callable[[RunState], None]],
    trace: Path | None,
) -> Iterator[None]:
    """Around generating: `show` is told the state about once a second, and the trace is written
    however the run ends, but for the loss of Ray itself.
    """
    if trace is not None:
        group.observer.align()
    try:
        with Monitor(meter, group.observer.figures, show):
            yield
    except HeadLostError:  # the stages have gone with it, or are on their way
        raise
    except BaseException:
        if trace is not None:
            with suppress(InputError):  # what ended the run matters more
                save_trace(trace, plan, group.observer.traces())
        raise
    if trace is not None:
        save_trace(trace, plan, group.observer.traces())

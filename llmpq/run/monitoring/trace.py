"""Writing the trace file of a run from the times that its stages recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.telemetry.observer import StageTrace
from planner.plan.run_trace import MeasuredStage, write_run_trace
from planner.plan.spec import PlanSpec


def save_trace(path: str | Path, plan: PlanSpec, traces: Sequence[StageTrace | None]) -> None:
    """Write the run beside the plan's simulation; raises InputError where that is not possible."""
    write_run_trace(path, plan, [None if trace is None else measured(trace) for trace in traces])


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

"""The Chrome trace of a real run (Perfetto opens it too), beside that of the simulated batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.optimiser.problem import FloatArray, IntArray
from planner.plan.simulate import APPROXIMATION, is_approximate, simulate_plan, time_scale
from planner.plan.spec import PlanSpec
from planner.simulation.pictures import MICROSECONDS, named_tracks, simulated_events, write_text
from quant.common.errors import InputError
from quant.common.files import names_a_file

RUN_PROCESS, FIRST_SIMULATED_PROCESS = 0, 1

SHOWN_S = 2e-5  # waits and sends that are shorter are in the numbers of their micro-batch only


@dataclass(frozen=True, eq=False)
class MeasuredStage:
    """Micro-batches of a stage in order `[M]`, in seconds of one clock: computed from `began_s` to
    `ended_s`, passed on until `sent_s`; `dropped` came later. `clock_error_s`: how far the stage
    may be shifted.
    """

    began_s: FloatArray
    ended_s: FloatArray
    sent_s: FloatArray
    requests: IntArray
    decode_requests: IntArray
    tokens: IntArray
    context_length: IntArray
    dropped: int
    clock_offset_s: float
    clock_error_s: float


def run_trace(plan: PlanSpec, stages: Sequence[MeasuredStage | None]) -> str:
    """JSON in Chrome's trace format; None: a stage that did not answer. Run and simulation begin at
    0.
    """
    labels = [stage.label for stage in plan.stages]
    starts = [s.began_s[0] for s in stages if s is not None and len(s.began_s)]
    zero_s = float(min(starts, default=0.0))
    events = [*named_tracks(RUN_PROCESS, "run", labels)]
    for index, stage in enumerate(stages):
        if stage is not None:
            events += _events(index, stage, zero_s)
    scale = time_scale(plan)
    title = "simulated" if scale == 1.0 else f"simulated (time scale {scale:g})"
    events += simulated_events(simulate_plan(plan), labels, title, FIRST_SIMULATED_PROCESS)
    content = {"displayTimeUnit": "ms", "otherData": _notes(plan, stages), "traceEvents": events}
    return json.dumps(content, separators=(",", ":"))


def check_trace_path(path: Path, taken: Sequence[Path] = ()) -> None:
    """Raise InputError before a run whose trace could not be written, or would replace `taken`."""
    if path.resolve() in [other.resolve() for other in taken]:
        raise InputError(f"the trace would replace {str(path)!r}; give it a file of its own")
    if not names_a_file(path):
        raise InputError(
            f"cannot write the trace to {str(path)!r}; give a file in a folder that exists"
        )


def write_run_trace(
    path: str | Path, plan: PlanSpec, stages: Sequence[MeasuredStage | None]
) -> None:
    write_text(Path(path), run_trace(plan, stages))


def _notes(plan: PlanSpec, stages: Sequence[MeasuredStage | None]) -> dict[str, object]:
    return {
        "simulated": APPROXIMATION if is_approximate(plan) else "the plan's modelled times",
        "stages": [
            "did not answer"
            if stage is None
            else {
                "micro_batches": len(stage.began_s),
                "micro_batches_dropped": stage.dropped,
                "clock_offset_s": stage.clock_offset_s,
                "clock_error_s": stage.clock_error_s,
            }
            for stage in stages
        ],
    }


def _events(index: int, stage: MeasuredStage, zero_s: float) -> Iterator[dict[str, object]]:
    free_s = zero_s
    numbers: Counter[str] = Counter()
    columns = (stage.began_s, stage.ended_s, stage.sent_s, stage.decode_requests, stage.requests)
    rows = (*columns, stage.tokens, stage.context_length)
    for began_s, ended_s, sent_s, decodes, *sizes in zip(
        *(column.tolist() for column in rows), strict=True
    ):
        kind = ("decode" if decodes == sizes[0] else "mixed") if decodes else "prefill"
        details = dict(zip(("requests", "tokens", "context_length"), sizes, strict=True))
        details |= {"wait_ms": (began_s - free_s) * 1e3, "send_ms": (sent_s - ended_s) * 1e3}
        if began_s - free_s >= SHOWN_S:
            yield _span(index, "wait", "wait", free_s - zero_s, began_s - zero_s)
        name = f"{kind} {numbers[kind]}"
        yield _span(index, name, kind, began_s - zero_s, ended_s - zero_s) | {"args": details}
        if sent_s - ended_s >= SHOWN_S:
            yield _span(index, "send", "send", ended_s - zero_s, sent_s - zero_s)
        numbers[kind] += 1
        free_s = sent_s


def _span(thread: int, name: str, category: str, start_s: float, end_s: float) -> dict[str, object]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": RUN_PROCESS,
        "tid": thread,
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
    }

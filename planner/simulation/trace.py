"""A simulated batch as a Chrome trace, which Perfetto opens too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.schedule.static import Pass
from planner.simulation.simulation import Simulated
from quant.common.errors import InputError, SpecError
from quant.common.files import write_whole

MICROSECONDS = 1e6  # Chrome's trace format counts in them
STAGES_PROCESS, LINKS_PROCESS = 0, 1


def chrome_trace(simulated: Simulated, labels: Sequence[str]) -> str:
    """A simulated batch as JSON in Chrome's trace event format; SpecError unless `labels` has one a
    stage.
    """
    check_labels(simulated, labels)
    events = simulated_events(simulated, labels)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def simulated_events(
    simulated: Simulated, labels: Sequence[str], title: str = "", first_process: int = 0
) -> list[dict[str, object]]:
    """Chrome's events of a batch, of two processes numbered from `first_process` and named with
    `title`.
    """
    names = _thread_names(labels, title, first_process)
    return [*names, *_complete_events(simulated, first_process)]


def write_chrome_trace(path: str | Path, simulated: Simulated, labels: Sequence[str]) -> None:
    write_text(Path(path), chrome_trace(simulated, labels))


def _thread_names(
    labels: Sequence[str], title: str, first_process: int
) -> Iterator[dict[str, object]]:
    hops = [f"{label} to {labels[(j + 1) % len(labels)]}" for j, label in enumerate(labels)]
    yield from named_tracks(first_process + STAGES_PROCESS, f"{title} stages".strip(), labels)
    yield from named_tracks(first_process + LINKS_PROCESS, f"{title} links".strip(), hops)


def named_tracks(process: int, name: str, labels: Sequence[str]) -> Iterator[dict[str, object]]:
    """Chrome's events that name a process and, in this order, its threads."""
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for thread, label in enumerate(labels):
        where: dict[str, object] = {"ph": "M", "pid": process, "tid": thread}
        yield {"name": "thread_name", **where, "args": {"name": f"{thread}: {label}"}}
        yield {"name": "thread_sort_index", **where, "args": {"sort_index": thread}}


def _complete_events(simulated: Simulated, first_process: int) -> Iterator[dict[str, object]]:
    spans = (
        (STAGES_PROCESS, simulated.stage_start_s.tolist(), simulated.stage_end_s.tolist()),
        (LINKS_PROCESS, simulated.link_start_s.tolist(), simulated.link_end_s.tolist()),
    )
    for process, starts, ends in spans:
        for each, begins, finishes in zip(simulated.passes, starts, ends, strict=True):
            for stage, (start_s, end_s) in enumerate(zip(begins, finishes, strict=True)):
                if process == STAGES_PROCESS or end_s > start_s:
                    yield {
                        "name": f"{each.phase} {each.index}",
                        "cat": each.phase,
                        "ph": "X",
                        "pid": first_process + process,
                        "tid": stage,
                        "ts": start_s * MICROSECONDS,
                        "dur": (end_s - start_s) * MICROSECONDS,
                        "args": _details(each),
                    }


def _details(each: Pass) -> dict[str, int]:
    return {
        "step": each.step,
        "requests": each.requests,
        "tokens": each.tokens,
        "context_length": each.context_length,
    }


def check_labels(simulated: Simulated, labels: Sequence[str]) -> None:
    if len(labels) != simulated.stages:
        raise SpecError(
            f"{len(labels)} labels for {simulated.stages} stages; give one name for each stage"
        )


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all; raises InputError where that is not possible."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error

"""Journals of jobs that nobody ran."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.jobs.journal import (
    JOURNAL_VERSION,
    Entry,
    ErrorNote,
    EventNote,
    Loaded,
    PlannedStage,
    PlanNote,
    ProgressPoint,
    SessionEnd,
    SessionStart,
    StageRecord,
    WorkDone,
    line_of,
)
from llmpq.jobs.store import JOURNAL

BEGAN = 1.7e9
STAGES = (
    PlannedStage("old/T4-16GB:0", (0, 2), "8x2", 0.02, 0.01),
    PlannedStage("new/V100-SXM2-32GB:0", (2, 6), "4x1 16x3", 0.03, 0.02),
)
PLAN = PlanNote("0123456789ab", "fake-model", "left-overs", 8, 100, 50.0, 40.0, STAGES)
START = SessionStart(
    journal=JOURNAL_VERSION,
    at=BEGAN,
    llmpq="0.1.0",
    host=os.uname().nodename,
    pid=1,
    command="llmpq run --plan plan.json --input in.jsonl --output out.jsonl",
    rows=100,
    resumed=0,
    resumed_errors=0,
    anew=False,
    after=None,
    plan_file="plan.json",
    plan=PLAN,
)


def session(
    at: float = BEGAN,
    rows: int = 40,
    seconds: int = 20,
    load_s: int = 10,
    **changes: Any,
) -> list[Entry]:
    """A session that loads and then finishes `rows` rows of 20 tokens, evenly, a point a second."""
    loaded = at + load_s
    points = (
        ProgressPoint(
            loaded + second, rows * second // seconds, 0, 20 * rows * second // seconds, 40.0, 9.0
        )
        for second in range(1, seconds + 1)
    )
    work = StageRecord(seconds / 2, 0.5, 0.025, True, 0.012, False, 99)
    return [
        replace(START, at=at, **changes),
        Loaded(loaded),
        *points,
        WorkDone(loaded + seconds, (work, work)),
    ]


def died(at: float, text: str = "stage 1 died; replaced") -> EventNote:
    """The death of a stage."""
    return EventNote(at, "died", 1, 2.5, text)


def failed_rows(at: float, count: int, error: str = "row is longer than …") -> ErrorNote:
    """Rows in error."""
    return ErrorNote(at, error, count, "q7", error)


def ended(at: float, how: str = "done", text: str = "") -> SessionEnd:
    """The end of a session."""
    return SessionEnd(at, how, text)


def write_journal(folder: Path, entries: Iterable[Entry], beat_at: float | None = None) -> Path:
    """The journal in the folder of a job; `beat_at`: its time."""
    path = folder / JOURNAL
    path.write_bytes(b"".join(map(line_of, entries)))
    if beat_at is not None:
        os.utime(path, (beat_at, beat_at))
    return path


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a journal."""
    return iter(path.read_bytes().splitlines(keepends=True))

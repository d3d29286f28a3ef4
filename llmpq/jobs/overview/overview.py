"""A job at one look: its state, how far it is, how fast, what went wrong, and what was planned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmpq.jobs.journal.error_kinds import ErrorKind
from llmpq.jobs.overview.figures import (
    SessionFigures,
    latency_figures,
    planned_rate,
    planned_seconds,
    session_figures,
)
from llmpq.jobs.overview.known_rows import (
    JobRecords,
    KnownErrors,
    RowCounts,
    read_records,
    rows_and_errors,
)
from llmpq.jobs.overview.places import JobPlace
from llmpq.jobs.overview.series import JobEvent, SessionSeries, job_events, session_series
from llmpq.report.measured_latency import LatencyFigures
from quant.common.errors import InputError

JobState = Literal["running", "stopped", "done"]


@dataclass(frozen=True)
class JobOverview:
    """A job at the time `at`. What is not known is None.

    `rows` of the input, of which `done` have results, `errors` of these in error; `error_kinds` are
    of all of them, unless `error_rows_read` of the rows were read. `tokens` were generated in all,
    `tokens_per_s` of the seconds that stages generated, `now_tokens_per_s` just now. `planned_s`:
    predicted for all rows. `latency`: that of requests, where a plan says something of it.
    """

    output: Path
    at: float
    state: JobState
    model: str | None
    rows: int | None
    done: int | None
    errors: int | None
    error_kinds: tuple[ErrorKind, ...]
    error_rows_read: int | None
    tokens: int | None
    tokens_per_s: float | None
    now_tokens_per_s: float | None
    planned_tokens_per_s: float | None
    planned_s: float | None
    left_s: float | None
    last_at: float | None
    sessions: tuple[SessionFigures, ...]
    series: tuple[SessionSeries, ...]
    events: tuple[JobEvent, ...]
    more_events: int
    remarks: tuple[str, ...]
    latency: LatencyFigures | None = None

    @property
    def left(self) -> int | None:
        """Rows to do."""
        if self.rows is None or self.done is None:
            return None
        return max(0, self.rows - self.done)

    @property
    def seconds(self) -> float:
        """Seconds of all sessions."""
        return sum(session.seconds for session in self.sessions)

    @property
    def generated_s(self) -> float:
        """Seconds of all sessions in which stages generated."""
        return sum(session.generated_s for session in self.sessions)

    @property
    def command(self) -> str | None:
        """The command that goes on."""
        return self.sessions[-1].command if self.sessions else None


def overview_of(place: JobPlace, now: float | None = None, look: bool = True) -> JobOverview:
    """The job at `place` as it is now; with `look`, results are read where nothing else tells the
    errors.

    Raises `InputError` where its records cannot be read.
    """
    now = time.time() if now is None else now
    try:
        records = read_records(place, now)
    except OSError as error:
        raise InputError(f"cannot look at {place.folder}: {error.strerror}") from error
    journal, runs = records.journal, records.runs
    sessions = session_figures(journal, runs, now)
    rows, errors = rows_and_errors(records, look)
    generated_s = sum(session.generated_s for session in sessions)
    tokens = sum(session.tokens for session in sessions)
    return JobOverview(
        output=place.output,
        at=now,
        state="running" if runs else "done" if records.is_done else "stopped",
        model=_model(records),
        rows=rows.rows,
        done=rows.done,
        errors=rows.errors,
        error_kinds=errors.kinds,
        error_rows_read=errors.rows_read,
        tokens=tokens if sessions else None,
        tokens_per_s=tokens / generated_s if generated_s and tokens else None,
        now_tokens_per_s=_now_rate(records, now),
        planned_tokens_per_s=planned_rate(sessions),
        planned_s=planned_seconds(sessions, rows.rows),
        left_s=_left_s(records, rows, generated_s, now),
        last_at=_last_at(records),
        sessions=sessions,
        series=session_series(journal, sessions),
        events=job_events(journal, sessions),
        more_events=sum(session.more_events for session in journal.sessions),
        remarks=_remarks(records, errors),
        latency=latency_figures(journal),
    )


def _model(records: JobRecords) -> str | None:
    if records.manifest is not None:
        return records.manifest.model_name
    return records.last.start.plan.model if records.last is not None else None


def _now_rate(records: JobRecords, now: float) -> float | None:
    last = records.last
    if not records.runs or last is None or last.end is not None or not last.points:
        return None
    return last.points[-1].tokens_per_s


def _left_s(records: JobRecords, rows: RowCounts, generated_s: float, now: float) -> float | None:
    """Seconds to go: as the run itself estimated last, of a stopped job by its rows so far."""
    last = records.last
    if records.is_done or last is None or rows.rows is None or rows.done is None:
        return None
    if records.runs:
        if last.end is not None or not last.points or last.points[-1].left_s is None:
            return None
        point = last.points[-1]
        return max(0.0, (point.left_s or 0.0) - (now - point.at))
    made = sum(session.rows for session in records.journal.sessions)
    return max(0, rows.rows - rows.done) * generated_s / made if made and generated_s else None


def _last_at(records: JobRecords) -> float | None:
    """When something was written last."""
    times = [records.journal.beat_at or 0.0]
    paths = [records.place.manifest, *(shard.path for shard in records.shards[-1:])]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times) or None


def _remarks(records: JobRecords, errors: KnownErrors) -> tuple[str, ...]:
    remarks = list(records.journal.remarks)
    if records.last is None and not remarks:
        remarks.append(
            "the job has no journal, as an older llmpq ran it or it has only begun: speed, times "
            "and events are not known"
        )
    elif records.last is not None and records.journal.sessions[0].start.resumed:
        remarks.append(
            f"{records.journal.sessions[0].start.resumed:,} rows were done before the journal "
            "begins"
        )
    if errors.counted and errors.kinds:
        remarks.append(
            "errors are those that the runs have counted; of rows that a kill has cost, some may "
            "be counted twice"
        )
    return tuple(remarks)

"""A job at one look: its state, how far it is, how fast, what went wrong, and what was planned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmpq.jobs.journal.error_kinds import ErrorCounts, ErrorKind
from llmpq.jobs.journal.reader import Journal, Session, read_journal
from llmpq.jobs.overview.figures import (
    SessionFigures,
    planned_rate,
    planned_seconds,
    session_figures,
)
from llmpq.jobs.overview.liveness import is_running
from llmpq.jobs.overview.places import JobPlace
from llmpq.jobs.overview.result_errors import ResultErrors, read_errors
from llmpq.jobs.overview.series import JobEvent, SessionSeries, job_events, session_series
from llmpq.jobs.records.manifest import Manifest
from llmpq.jobs.records.shards import Shard, shards_in
from quant.common.errors import InputError

JobState = Literal["running", "stopped", "done"]


@dataclass(frozen=True)
class JobOverview:
    """A job at the time `at`. What is not known is None.

    `rows` of the input, of which `done` have results, `errors` of these in error; `error_kinds` are
    of all of them, unless `error_rows_read` of the rows were read. `tokens` were generated in all,
    `tokens_per_s` of the seconds that stages generated, `now_tokens_per_s` just now. `planned_s`:
    predicted for all rows.
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


@dataclass(frozen=True)
class _Records:
    """All that is read of a job."""

    place: JobPlace
    journal: Journal
    manifest: Manifest | None
    shards: Sequence[Shard]
    runs: bool

    @property
    def last(self) -> Session | None:
        return self.journal.sessions[-1] if self.journal.sessions else None

    @property
    def is_done(self) -> bool:
        return not self.runs and self.manifest is not None and self.manifest.complete

    @property
    def has_file(self) -> bool:
        """Whether a finished file holds results of the job."""
        replaced = self.manifest is not None and self.manifest.replaces
        return not self.place.in_folder and not replaced and self.place.output.is_file()


@dataclass(frozen=True)
class _Rows:
    rows: int | None
    done: int | None
    errors: int | None


def overview_of(place: JobPlace, now: float | None = None, look: bool = True) -> JobOverview:
    """The job at `place` as it is now; with `look`, results are read where nothing else tells the
    errors.

    Raises `InputError` where its records cannot be read.
    """
    now = time.time() if now is None else now
    try:
        records = _read(place, now)
    except OSError as error:
        raise InputError(f"cannot look at {place.folder}: {error.strerror}") from error
    journal, runs = records.journal, records.runs
    sessions = session_figures(journal, runs, now)
    rows = _rows(records)
    kinds, found = _journal_kinds(journal.sessions), None
    told = sum(kind.count for kind in kinds)
    if look and rows.errors != told and (rows.errors or rows.errors is None):
        found = read_errors(place, records.shards, records.has_file)
        rows, kinds = _with_found(rows, found, kinds)
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
        error_kinds=kinds,
        error_rows_read=found.rows if found is not None and not found.is_whole else None,
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
        remarks=_remarks(records),
    )


def _read(place: JobPlace, now: float) -> _Records:
    """Read the journal first: who ends a job meanwhile writes the manifest before its end."""
    journal = read_journal(place.journal)
    runs = is_running(place, journal, now)
    manifest = Manifest.read(place.manifest)
    shards = shards_in(place.folder)
    if manifest is not None:
        shards = [shard for shard in shards if shard.generation == manifest.generation]
    return _Records(place, journal, manifest, shards, runs)


def _rows(records: _Records) -> _Rows:
    """Rows of the job: a running one tells them, of others the committed ones count."""
    last, manifest = records.last, records.manifest
    if records.is_done and manifest is not None:
        return _Rows(manifest.rows, manifest.rows, manifest.errors)
    if last is None:
        done = None if records.has_file else sum(shard.rows for shard in records.shards)
        return _Rows(None, done, None)
    start = last.start
    if records.runs:
        errors = start.resumed_errors + last.failed_rows
        return _Rows(start.rows, start.resumed + last.rows, errors)
    after = start.after or (0, -1)
    kept = sum(s.rows for s in records.shards if (s.generation, s.number) > after)
    is_all = kept == last.rows
    errors = start.resumed_errors + last.failed_rows if is_all else None
    return _Rows(start.rows, start.resumed + kept, errors)


def _with_found(
    rows: _Rows, found: ResultErrors, kinds: tuple[ErrorKind, ...]
) -> tuple[_Rows, tuple[ErrorKind, ...]]:
    """The rows by what was read of the results; of what is not read, the journal may tell more."""
    if not found.is_whole and sum(kind.count for kind in kinds) > found.errors:
        return rows, kinds
    errors = found.errors if rows.errors is None and found.is_whole else rows.errors
    done = found.rows if rows.done is None and found.is_whole else rows.done
    return _Rows(rows.rows, done, errors), found.kinds


def _journal_kinds(sessions: Sequence[Session]) -> tuple[ErrorKind, ...]:
    """Errors of all sessions since the one that ran errors again, or began anew."""
    counts = ErrorCounts()
    for session in sessions:
        if not session.start.resumed_errors:
            counts = ErrorCounts()
        for note in session.errors.values():
            counts.merge(ErrorKind(note.what, note.count, note.custom_id, note.error))
    return counts.most_first()


def _model(records: _Records) -> str | None:
    if records.manifest is not None:
        return records.manifest.model_name
    return records.last.start.plan.model if records.last is not None else None


def _now_rate(records: _Records, now: float) -> float | None:
    last = records.last
    if not records.runs or last is None or last.end is not None or not last.points:
        return None
    return last.points[-1].tokens_per_s


def _left_s(records: _Records, rows: _Rows, generated_s: float, now: float) -> float | None:
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


def _last_at(records: _Records) -> float | None:
    """When something was written last."""
    times = [records.journal.beat_at or 0.0]
    paths = [records.place.manifest, *(shard.path for shard in records.shards[-1:])]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times) or None


def _remarks(records: _Records) -> tuple[str, ...]:
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
    return tuple(remarks)

"""A job at one look: its state, how far it is, how fast, what went wrong, and what was planned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Literal

from llmpq.jobs.job_files import Shard, shards_in
from llmpq.jobs.overview.places import JobPlace, is_running
from llmpq.jobs.result_lines import ErrorCounts, ErrorKind, read_errors
from llmpq.jobs.sessions import JobSession, Journal, SessionSeries, read_journal, session_series
from llmpq.jobs.store import JOURNAL, MANIFEST, Manifest
from llmpq.report.latency import LatencyFigures, PlannedLatency
from quant.common.errors import InputError

JobState = Literal["running", "stopped", "done"]


@dataclass(frozen=True)
class JobEvent:
    number: int
    session: int  # by its number
    at: float
    at_s: float  # of the job
    kind: str
    stage: int | None
    lost_s: float
    text: str


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
    sessions: tuple[JobSession, ...]
    series: tuple[SessionSeries, ...]
    events: tuple[JobEvent, ...]
    more_events: int
    remarks: tuple[str, ...]
    latency: LatencyFigures | None = None

    @property
    def left(self) -> int | None:
        if self.rows is None or self.done is None:
            return None
        return max(0, self.rows - self.done)

    @property
    def seconds(self) -> float:
        return sum(session.seconds for session in self.sessions)

    @property
    def generated_s(self) -> float:
        return sum(session.generated_s for session in self.sessions)

    @property
    def command(self) -> str | None:  # that goes on
        return self.sessions[-1].start.command if self.sessions else None


@dataclass(frozen=True)
class _Records:
    place: JobPlace
    journal: Journal
    manifest: Manifest | None
    shards: Sequence[Shard]
    runs: bool

    @property
    def last(self) -> JobSession | None:
        return self.journal.sessions[-1] if self.journal.sessions else None

    @property
    def is_done(self) -> bool:
        return not self.runs and self.manifest is not None and self.manifest.complete

    @property
    def has_file(self) -> bool:
        replaced = self.manifest is not None and self.manifest.replaces
        return not self.place.in_folder and not replaced and self.place.output.is_file()


@dataclass(frozen=True)
class _RowCounts:
    """Rows of the input, those done, and those of them in error; None where it is not known.

    `kinds` of errors: of the first `rows_read` rows where only these were read, and no more than
    `counted` while the job ran where that is all that is known.
    """

    rows: int | None
    done: int | None
    errors: int | None
    kinds: tuple[ErrorKind, ...] = ()
    rows_read: int | None = None
    counted: bool = False


def overview_of(place: JobPlace, now: float | None = None, look: bool = True) -> JobOverview:
    """The job at `place` as it is now; `look` into results for errors, if need be."""
    now = time.time() if now is None else now
    try:
        records = _read_records(place, now)
    except OSError as error:
        raise InputError(f"cannot look at {place.folder}: {error.strerror}") from error
    sessions, runs = records.journal.sessions, records.runs
    counts = _counts_and_errors(records, look)
    generated_s = sum(session.generated_s for session in sessions)
    tokens = sum(session.tokens for session in sessions)
    latest = sessions[-1].points[-1:] if sessions and sessions[-1].runs else []
    return JobOverview(
        output=place.output,
        at=now,
        state="running" if runs else "done" if records.is_done else "stopped",
        model=_model(records),
        rows=counts.rows,
        done=counts.done,
        errors=counts.errors,
        error_kinds=counts.kinds,
        error_rows_read=counts.rows_read,
        tokens=tokens if sessions else None,
        tokens_per_s=tokens / generated_s if generated_s and tokens else None,
        now_tokens_per_s=latest[0].tokens_per_s if latest else None,
        planned_tokens_per_s=_planned_rate(sessions),
        planned_s=_planned_seconds(sessions, counts.rows),
        left_s=_left_s(records, counts, generated_s, now),
        last_at=_last_at(records),
        sessions=sessions,
        series=session_series(sessions),
        events=job_events(sessions),
        more_events=sum(session.more_events for session in sessions),
        remarks=_remarks(records, counts),
        latency=latency_figures(sessions),
    )


def _read_records(place: JobPlace, now: float) -> _Records:
    """Read all of a job, which may end meanwhile: then its journal is read once more."""
    journal = read_journal(place.folder / JOURNAL)
    runs = is_running(place, journal, now)
    if not runs and journal.sessions and journal.sessions[-1].end is None:
        journal = read_journal(place.folder / JOURNAL)
    if runs and journal.sessions and journal.sessions[-1].end is None:
        journal.sessions[-1].runs, journal.sessions[-1].last_at = True, now
    manifest = Manifest.read(place.folder / MANIFEST)
    shards = shards_in(place.folder)
    if manifest is not None:
        shards = [shard for shard in shards if shard.generation == manifest.generation]
    return _Records(place, journal, manifest, shards, runs)


def _row_counts(records: _Records) -> _RowCounts:
    """Rows of the job: a running one tells them, of others the committed ones count."""
    last, manifest = records.last, records.manifest
    if records.is_done and manifest is not None:
        return _RowCounts(manifest.rows, manifest.rows, manifest.errors)
    if last is None:
        done = None if records.has_file else sum(shard.rows for shard in records.shards)
        return _RowCounts(None, done, None)
    start = last.start
    told = start.resumed_errors + last.errors
    if records.runs:
        return _RowCounts(start.rows, start.resumed + last.rows, told)
    after = start.after or (0, -1)
    kept = sum(s.rows for s in records.shards if (s.generation, s.number) > after)
    return _RowCounts(start.rows, start.resumed + kept, told if kept == last.rows else None)


def _counts_and_errors(records: _Records, look: bool) -> _RowCounts:
    """The rows and their errors by kind.

    With `look`, results are read where nothing else tells the errors: where a kill has cost rows,
    and of jobs without a journal.
    """
    counts, kinds = _row_counts(records), _journal_kinds(records.journal.sessions)
    told = sum(kind.count for kind in kinds)
    if counts.errors == 0:
        return counts
    if counts.errors != told and look:
        file = records.place.output if records.has_file else None
        rows, found, is_whole = read_errors(file, records.shards)
        if is_whole:
            errors = sum(kind.count for kind in found) if counts.errors is None else counts.errors
            done = rows if counts.done is None else counts.done
            return _RowCounts(counts.rows, done, errors, found)
        if not kinds:
            return replace(counts, kinds=found, rows_read=rows)
    if counts.errors is None and records.last is not None:
        return replace(counts, errors=told, kinds=kinds, counted=True)
    return replace(counts, kinds=kinds)


def _journal_kinds(sessions: Sequence[JobSession]) -> tuple[ErrorKind, ...]:
    """Errors of all sessions since the one that ran errors again, or began anew."""
    counts = ErrorCounts()
    for session in sessions:
        if not session.start.resumed_errors:
            counts = ErrorCounts()
        for note in session.error_notes.values():
            counts.merge(ErrorKind(note.what, note.count, note.custom_id, note.error))
    return counts.most_first()


def _model(records: _Records) -> str | None:
    if records.manifest is not None:
        return records.manifest.model_name
    return records.last.start.plan.model if records.last is not None else None


def _planned_rate(sessions: Sequence[JobSession]) -> float | None:
    """Tokens/s of all sessions by their plans, before there are any the latest's; None without."""
    parts = [part for session in sessions for part in session.parts]
    if not parts:
        return None
    made = [part for part in parts if part.tokens] or parts[-1:]
    rates = [part.plan.tokens_per_s or 0.0 for part in made]
    return harmonic_mean(rates, [part.tokens or 1 for part in made]) or None


def _planned_seconds(sessions: Sequence[JobSession], rows: int | None) -> float | None:
    """Seconds that the latest plan predicts for so many rows, in proportion to its own."""
    if not sessions or not rows:
        return None
    plan = sessions[-1].plans[-1].plan
    return plan.seconds * rows / plan.prompts if plan.seconds is not None and plan.prompts else None


def latency_figures(sessions: Sequence[JobSession]) -> LatencyFigures | None:
    """Latencies of all sessions beside the latest plan's; None without either."""
    if not sessions:
        return None
    plan = sessions[-1].plans[-1].plan
    if plan.quantile is None or plan.latency_s is None:
        return None
    planned = PlannedLatency(plan.quantile, plan.latency_s, plan.bound_s)
    return LatencyFigures.of([session.latencies for session in sessions], planned)


def _left_s(records: _Records, counts: _RowCounts, generated_s: float, now: float) -> float | None:
    """Seconds to go: as the run itself estimated last, of a stopped job by its rows so far."""
    last = records.last
    if records.is_done or last is None or counts.rows is None or counts.done is None:
        return None
    if records.runs:
        point = last.points[-1] if last.points and last.end is None else None
        if point is None or point.left_s is None:
            return None
        return max(0.0, point.left_s - (now - point.at))
    made = sum(session.rows for session in records.journal.sessions)
    left = max(0, counts.rows - counts.done)
    return left * generated_s / made if made and generated_s else None


def _last_at(records: _Records) -> float | None:
    times = [records.journal.beat_at or 0.0]
    for path in (records.place.folder / MANIFEST, *(shard.path for shard in records.shards[-1:])):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times) or None


def _remarks(records: _Records, counts: _RowCounts) -> tuple[str, ...]:
    remarks, sessions = list(records.journal.remarks), records.journal.sessions
    if not sessions and not remarks:
        remarks.append(
            "the job has no journal, as an older llmpq ran it or it has only begun: speed, times "
            "and events are not known"
        )
    elif sessions and sessions[0].start.resumed:
        remarks.append(f"{sessions[0].start.resumed:,} rows were done before the journal begins")
    if counts.counted and counts.kinds:
        remarks.append(
            "errors are those that the runs have counted; of rows that a kill has cost, some may "
            "be counted twice"
        )
    return tuple(remarks)


def job_events(sessions: Sequence[JobSession]) -> tuple[JobEvent, ...]:
    """All events, numbered in the order of their time."""
    found: list[JobEvent] = []
    begins_s = 0.0
    for session in sessions:
        for event in sorted(session.events, key=lambda event: event.at):
            at_s = begins_s + min(max(0.0, event.at - session.began_at), session.seconds)
            told = (event.event, event.stage, event.lost_s, event.text)
            found.append(JobEvent(len(found) + 1, session.number, event.at, at_s, *told))
        begins_s += session.seconds
    return tuple(found)

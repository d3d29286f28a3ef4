"""Records of a job as they are read from outside, and the rows and errors that they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.jobs.job_files import Shard, shards_in
from llmpq.jobs.journal.error_kinds import ErrorCounts, ErrorKind
from llmpq.jobs.journal.reader import Journal, Session, read_journal
from llmpq.jobs.overview.liveness import is_running
from llmpq.jobs.overview.places import JobPlace
from llmpq.jobs.overview.result_errors import read_errors
from llmpq.jobs.store import Manifest


@dataclass(frozen=True)
class JobRecords:
    """All that is read of a job."""

    place: JobPlace
    journal: Journal
    manifest: Manifest | None
    shards: Sequence[Shard]
    runs: bool

    @property
    def last(self) -> Session | None:
        """The latest session."""
        return self.journal.sessions[-1] if self.journal.sessions else None

    @property
    def is_done(self) -> bool:
        """Whether all rows are done and no one is at work."""
        return not self.runs and self.manifest is not None and self.manifest.complete

    @property
    def has_file(self) -> bool:
        """Whether a finished file holds results of the job."""
        replaced = self.manifest is not None and self.manifest.replaces
        return not self.place.in_folder and not replaced and self.place.output.is_file()


@dataclass(frozen=True)
class RowCounts:
    """Rows of the input, those done, and those of them in error; None where it is not known."""

    rows: int | None
    done: int | None
    errors: int | None


def read_records(place: JobPlace, now: float) -> JobRecords:
    """Read all of a job, which may end meanwhile: then its journal is read once more."""
    journal = read_journal(place.journal)
    runs = is_running(place, journal, now)
    if not runs and journal.sessions and journal.sessions[-1].end is None:
        journal = read_journal(place.journal)
    manifest = Manifest.read(place.manifest)
    shards = shards_in(place.folder)
    if manifest is not None:
        shards = [shard for shard in shards if shard.generation == manifest.generation]
    return JobRecords(place, journal, manifest, shards, runs)


def row_counts(records: JobRecords) -> RowCounts:
    """Rows of the job: a running one tells them, of others the committed ones count."""
    last, manifest = records.last, records.manifest
    if records.is_done and manifest is not None:
        return RowCounts(manifest.rows, manifest.rows, manifest.errors)
    if last is None:
        done = None if records.has_file else sum(shard.rows for shard in records.shards)
        return RowCounts(None, done, None)
    start = last.start
    if records.runs:
        errors = start.resumed_errors + last.failed_rows
        return RowCounts(start.rows, start.resumed + last.rows, errors)
    after = start.after or (0, -1)
    kept = sum(s.rows for s in records.shards if (s.generation, s.number) > after)
    told = start.resumed_errors + last.failed_rows
    return RowCounts(start.rows, start.resumed + kept, told if kept == last.rows else None)


@dataclass(frozen=True)
class KnownErrors:
    """Errors by kind; of the first `rows_read` rows where only these were read, and no more than
    `counted` while the job ran where that is all that is known.
    """

    kinds: tuple[ErrorKind, ...] = ()
    rows_read: int | None = None
    counted: bool = False


def rows_and_errors(records: JobRecords, look: bool) -> tuple[RowCounts, KnownErrors]:
    """The rows and their errors by kind.

    With `look`, results are read where nothing else tells the errors: where a kill has cost rows,
    and of jobs without a journal.
    """
    rows, kinds = row_counts(records), _journal_kinds(records.journal.sessions)
    told = sum(kind.count for kind in kinds)
    if rows.errors == 0:
        return rows, KnownErrors()
    if rows.errors != told and look:
        found = read_errors(records.place, records.shards, records.has_file)
        if found.is_whole:
            errors = found.errors if rows.errors is None else rows.errors
            done = found.rows if rows.done is None else rows.done
            return RowCounts(rows.rows, done, errors), KnownErrors(found.kinds)
        if not kinds:
            return rows, KnownErrors(found.kinds, found.rows)
    if rows.errors is None and records.last is not None:
        return RowCounts(rows.rows, rows.done, told), KnownErrors(kinds, counted=True)
    return rows, KnownErrors(kinds)


def _journal_kinds(sessions: Sequence[Session]) -> tuple[ErrorKind, ...]:
    """Errors of all sessions since the one that ran errors again, or began anew."""
    counts = ErrorCounts()
    for session in sessions:
        if not session.start.resumed_errors:
            counts = ErrorCounts()
        for note in session.errors.values():
            counts.merge(ErrorKind(note.what, note.count, note.custom_id, note.error))
    return counts.most_first()

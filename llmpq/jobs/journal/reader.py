"""Reading a journal: its sessions, each with the plans that it ran and how far they came."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from actors.latency_counts import NO_LATENCIES, LatencyCounts
from llmpq.jobs.journal.entries import (
    JOURNAL_VERSION,
    End,
    Entry,
    ErrorNote,
    EventNote,
    Loaded,
    MoreEvents,
    PlanChange,
    PlanNote,
    Point,
    Start,
    UnreadableEntryError,
    Work,
    entry_of,
)

MOST_BYTES = 2**25
"""Bytes of a journal that are read: far more than a journal grows to."""

LONGEST_LOADING_S = 6 * 3600.0
LONGEST_POINT_S = 120.0
"""Seconds without an entry at most, while stages load and when they generate."""

_TORN_LINES = 8
"""Lines that kills and full disks may have cut off before a journal counts as damaged."""


@dataclass
class PlanPart:
    """The part of a session that one plan made, which began at `at` with so many `tokens`."""

    plan: PlanNote
    at: float
    tokens: int = 0
    work: Work | None = None


@dataclass
class Session:
    """A session of the job; `end` is None while it runs, and where it was killed."""

    start: Start
    parts: list[PlanPart]
    loaded: float | None = None
    points: list[Point] = field(default_factory=list)
    events: list[EventNote] = field(default_factory=list)
    more_events: int = 0
    errors: dict[str, ErrorNote] = field(default_factory=dict)
    end: End | None = None
    last_at: float = 0.0

    @property
    def rows(self) -> int:
        """Rows that it has finished."""
        return self.points[-1].rows if self.points else 0

    @property
    def failed_rows(self) -> int:
        """Those of them in error."""
        return self.points[-1].errors if self.points else 0

    @property
    def tokens(self) -> int:
        """Tokens that it has generated."""
        return self.points[-1].tokens if self.points else 0

    @property
    def latencies(self) -> LatencyCounts:
        """Latencies of its requests, where a latency was planned."""
        works = [part.work for part in self.parts if part.work is not None]
        return LatencyCounts(works[-1].latencies) if works else NO_LATENCIES


@dataclass(frozen=True)
class Journal:
    """The sessions of a journal, of those that count: since the last `--overwrite` that came to
    something. `remarks` say what could not be read; `beat_at`: the latest sign of life.
    """

    sessions: tuple[Session, ...] = ()
    remarks: tuple[str, ...] = ()
    beat_at: float | None = None


def read_journal(path: Path) -> Journal:
    """The journal at `path`, empty where there is none; what cannot be read is left out."""
    try:
        data, beat_at = _content(path)
    except FileNotFoundError:
        return Journal()
    except OSError as error:
        return Journal(remarks=(f"{path} cannot be read: {error.strerror}",))
    return _read(data, path, beat_at)


def _content(path: Path) -> tuple[bytes, float]:
    """Bytes of the journal and when it was changed; a pipe in its place is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        blocks = []
        left = MOST_BYTES
        while left and (block := os.read(descriptor, left)):
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks), found.st_mtime
    finally:
        os.close(descriptor)


def _read(data: bytes, path: Path, beat_at: float) -> Journal:
    whole, _, _ = data.rpartition(b"\n")  # the last line may be on its way
    sessions: list[Session] = []
    versions: list[object] = []
    skipped = 0
    is_known = False
    for line in whole.splitlines():
        if not line.strip():
            continue
        try:
            entry = entry_of(line)
        except UnreadableEntryError as error:
            if error.version is not None:
                versions.append(error.version)
                is_known = False
            elif is_known or not versions:
                skipped += 1
            continue
        if isinstance(entry, Start):
            is_known = True
            sessions.append(Session(entry, [PlanPart(entry.plan, entry.at)], last_at=entry.at))
        elif is_known:
            _add(sessions[-1], entry)
    if sessions and sessions[-1].end is None:
        sessions[-1].last_at = _last_sign(sessions[-1], beat_at)
    return Journal(_that_count(sessions), _remarks(path, versions, skipped), beat_at)


def _add(session: Session, entry: Entry) -> None:
    session.last_at = max(session.last_at, entry.at)
    if isinstance(entry, PlanChange):
        session.parts.append(PlanPart(entry.plan, entry.at, session.tokens))
    elif isinstance(entry, Loaded):
        session.loaded = session.loaded or entry.at
    elif isinstance(entry, Point):
        session.points.append(entry)
    elif isinstance(entry, Work):
        session.parts[-1].work = entry
    elif isinstance(entry, EventNote):
        session.events.append(entry)
    elif isinstance(entry, MoreEvents):
        session.more_events = entry.count
    elif isinstance(entry, ErrorNote):
        session.errors[entry.what] = entry
    elif isinstance(entry, End):
        session.end = entry


def _last_sign(session: Session, beat_at: float) -> float:
    """When an unfinished session was there last; the time of a file that was copied is no sign."""
    most_s = LONGEST_POINT_S if session.points else LONGEST_LOADING_S
    return beat_at if 0 < beat_at - session.last_at < most_s else session.last_at


def _that_count(sessions: list[Session]) -> tuple[Session, ...]:
    first = 0
    for number, session in enumerate(sessions):
        is_last = number == len(sessions) - 1
        if session.start.anew and (session.rows or (is_last and session.end is None)):
            first = number
    return tuple(sessions[first:])


def _remarks(path: Path, versions: list[object], skipped: int) -> tuple[str, ...]:
    remarks = []
    if versions:
        named = ", ".join(sorted({f"{each!r:.20}" for each in versions}))
        remarks.append(
            f"{path} has sessions of journal version {named}, which are left out: this llmpq reads "
            f"version {JOURNAL_VERSION}"
        )
    if skipped > _TORN_LINES:
        remarks.append(f"{path} is damaged: {skipped} of its lines are no entries and are left out")
    return tuple(remarks)

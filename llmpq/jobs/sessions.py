"""Sessions of a job, the starts of its command, as its journal tells them, and as pictures do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.stage_figures import NO_LATENCIES, LatencyCounts
from llmpq.jobs import journal

MOST_BYTES = 2**25
"""Bytes of a journal that are read: far more than a journal grows to."""

LONGEST_LOADING_S = 6 * 3600.0
LONGEST_POINT_S = 120.0
"""Seconds without an entry at most, while stages load and when they generate."""

_TORN_LINES = 8
"""Lines that kills and full disks may have cut off before a journal counts as damaged."""

KILLED = "killed"
RUNNING = "running"

_FIGURES = ("number", "began_at", "how", "text", "rows", "errors", "tokens", "loaded_s")
_OF_START = ("host", "llmpq", "command", "plan_file")


@dataclass(frozen=True)
class StageFigures:
    planned: journal.PlannedStage
    work: journal.StageRecord | None


@dataclass(frozen=True)
class PlanPart:
    """The part of a session that one plan made, from the session's second `begins_s` on."""

    plan: journal.PlanNote
    begins_s: float
    tokens: int
    seconds: float
    stages: tuple[StageFigures, ...]


@dataclass
class JobSession:
    """A session of the job, by its entries.

    `last_at`: its last sign of life, or now while it `runs`; `end` is None while it does, and where
    it was killed. `work` of each plan's stages stands beside its change in `plans`.
    """

    start: journal.SessionStart
    number: int
    last_at: float
    runs: bool = False
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    loaded: float | None = None
    plans: list[journal.PlanChange] = field(default_factory=list)
    plan_tokens: list[int] = field(default_factory=list)  # of the session when each plan began
    work: dict[int, journal.WorkDone] = field(
        default_factory=dict
    )  # by the plan's place in `plans`
    points: list[journal.ProgressPoint] = field(default_factory=list)
    events: list[journal.EventNote] = field(default_factory=list)
    more_events: int = 0
    error_notes: dict[str, journal.ErrorNote] = field(default_factory=dict)
    end: journal.SessionEnd | None = None

    def add(self, entry: journal.Entry) -> None:
        self.last_at = max(self.last_at, entry.at)
        if isinstance(entry, journal.SessionStart | journal.PlanChange):
            self.plans.append(journal.PlanChange(entry.at, entry.plan))
            self.plan_tokens.append(self.tokens)
        elif isinstance(entry, journal.Loaded):
            self.loaded = self.loaded or entry.at
        elif isinstance(entry, journal.ProgressPoint):
            self.points.append(entry)
            self.rows, self.errors, self.tokens = entry.rows, entry.errors, entry.tokens
        elif isinstance(entry, journal.WorkDone):
            self.work[len(self.plans) - 1] = entry
        elif isinstance(entry, journal.EventNote):
            self.events.append(entry)
        elif isinstance(entry, journal.MoreEvents):
            self.more_events = entry.count
        elif isinstance(entry, journal.ErrorNote):
            self.error_notes[entry.what] = entry
        else:
            self.end = entry

    @property
    def latencies(self) -> LatencyCounts:
        """Latencies of its requests, where a latency was planned."""
        latest = max(self.work, default=None)
        return NO_LATENCIES if latest is None else LatencyCounts(self.work[latest].latencies)

    @property
    def began_at(self) -> float:
        return self.start.at

    @property
    def seconds(self) -> float:
        return max(0.0, self.last_at - self.start.at)

    @property
    def loaded_s(self) -> float | None:
        """The second from which it generated; None where it never came to that."""
        return None if self.loaded is None else max(0.0, self.loaded - self.start.at)

    @property
    def generated_s(self) -> float:
        return 0.0 if self.loaded_s is None else max(0.0, self.seconds - self.loaded_s)

    @property
    def how(self) -> str:
        """How it ended: done, interrupted, stopped, failed or killed, or that it is running."""
        return (RUNNING if self.runs else KILLED) if self.end is None else self.end.how

    @property
    def text(self) -> str:
        return "" if self.end is None else self.end.text

    @property
    def parts(self) -> tuple[PlanPart, ...]:
        """The parts, of which the first begins when the stages are loaded."""
        ended_at = self.start.at + self.seconds
        begins = [self.loaded or ended_at, *(plan.at for plan in self.plans[1:])]
        ends, tokens = [*begins[1:], ended_at], [*self.plan_tokens, self.tokens]
        return tuple(
            PlanPart(
                plan=change.plan,
                begins_s=max(0.0, begins[place] - self.start.at),
                tokens=max(0, tokens[place + 1] - tokens[place]),
                seconds=max(0.0, ends[place] - begins[place]),
                stages=_stages(change.plan, self.work.get(place)),
            )
            for place, change in enumerate(self.plans)
        )

    def figures(self) -> dict[str, object]:
        found = {name: getattr(self, name) for name in _FIGURES}
        return found | {
            "ended_at": self.start.at + self.seconds,
            "parts": [asdict(part) for part in self.parts],
            **{name: getattr(self.start, name) for name in _OF_START},
        }


def _stages(plan: journal.PlanNote, work: journal.WorkDone | None) -> tuple[StageFigures, ...]:
    if work is None or len(work.stages) != len(plan.stages):
        return tuple(StageFigures(stage, None) for stage in plan.stages)
    return tuple(map(StageFigures, plan.stages, work.stages))


@dataclass(frozen=True)
class Journal:
    """The sessions of a journal, of those that count: since the last `--overwrite` that came to
    something. `remarks` say what could not be read; `beat_at`: the latest sign of life.
    """

    sessions: tuple[JobSession, ...] = ()
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
    whole, _, _ = data.rpartition(b"\n")  # the last line may be on its way
    return _read(whole.splitlines(), path, beat_at)


def _content(path: Path) -> tuple[bytes, float]:
    """Bytes of the journal and when it was changed."""
    descriptor, state = journal.opened(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MOST_BYTES), state.st_mtime


def _read(lines: Iterable[bytes], path: Path, beat_at: float) -> Journal:
    sessions: list[JobSession] = []
    versions: list[object] = []
    skipped = 0
    is_known = False  # whether the latest start is of this version
    for line in filter(bytes.strip, lines):
        try:
            entry = journal.entry_of(line)
        except journal.UnreadableEntryError as error:
            if error.version is not None:
                versions.append(error.version)
                is_known = False
            elif is_known or not versions:
                skipped += 1
            continue
        if isinstance(entry, journal.SessionStart):
            is_known = True
            sessions.append(JobSession(entry, 0, entry.at))
        if is_known:
            sessions[-1].add(entry)
    if sessions and sessions[-1].end is None:
        last = sessions[-1]
        # the time of a file that was copied is no sign of life
        most_s = LONGEST_POINT_S if last.points else LONGEST_LOADING_S
        last.last_at = beat_at if 0 < beat_at - last.last_at < most_s else last.last_at
    return Journal(_that_count(sessions), _remarks(path, versions, skipped), beat_at)


def _that_count(sessions: list[JobSession]) -> tuple[JobSession, ...]:
    first = 0
    for place, session in enumerate(sessions):
        is_open = place == len(sessions) - 1 and session.end is None
        if session.start.anew and (session.rows or is_open):
            first = place
    for number, session in enumerate(sessions[first:], start=1):
        session.number = number
    return tuple(sessions[first:])


def _remarks(path: Path, versions: list[object], skipped: int) -> tuple[str, ...]:
    remarks = []
    if versions:
        named = ", ".join(sorted({f"{each!r:.20}" for each in versions}))
        remarks.append(
            f"{path} has sessions of journal version {named}, which are left out: this llmpq reads "
            f"version {journal.JOURNAL_VERSION}"
        )
    if skipped > _TORN_LINES:
        remarks.append(f"{path} is damaged: {skipped} of its lines are no entries and are left out")
    return tuple(remarks)


BUCKETS = 80
"""Means that a curve of tokens per second has at most: a point every 7 pixels."""

LEAST_BUCKET_S = 4.0
"""Seconds of a mean at least: micro-batches give their tokens in bursts."""

MOST_POINTS = 240


class RatePoint(NamedTuple):
    """Mean tokens per second around a second of the job."""

    at_s: float
    tokens_per_s: float


class RowPoint(NamedTuple):
    at_s: float
    rows: int


class PlannedSpan(NamedTuple):
    """Tokens per second that a plan predicts for a span of the job."""

    begins_s: float
    ends_s: float
    tokens_per_s: float


class SessionSeries(NamedTuple):
    """Its seconds are those of the job."""

    number: int
    begins_s: float
    ends_s: float
    rates: tuple[RatePoint, ...]
    rows: tuple[RowPoint, ...]
    planned: tuple[PlannedSpan, ...]


def session_series(sessions: Sequence[JobSession]) -> tuple[SessionSeries, ...]:
    bucket_s = max(LEAST_BUCKET_S, sum(session.seconds for session in sessions) / BUCKETS)
    found = []
    begins_s = 0.0
    for session in sessions:
        ends_s = begins_s + session.seconds
        shift = begins_s - session.began_at
        counts = [(point.at + shift, point.tokens) for point in session.points]
        if session.loaded is not None:
            counts.insert(0, (session.loaded + shift, 0))
        resumed = session.start.resumed
        rows = [RowPoint(point.at + shift, resumed + point.rows) for point in session.points]
        rows.insert(0, RowPoint(counts[0][0] if counts else begins_s, resumed))
        rates, planned = _rates(counts, bucket_s), _planned(session, begins_s, ends_s)
        span = (session.number, begins_s, ends_s)
        found.append(SessionSeries(*span, rates, _thinned(rows), planned))
        begins_s = ends_s
    return tuple(found)


def _rates(counts: Sequence[tuple[float, int]], bucket_s: float) -> tuple[RatePoint, ...]:
    """Means over buckets of about that length; counts are taken to rise evenly between points."""
    if len(counts) < 2:
        return ()
    first, last = counts[0][0], counts[-1][0]
    if last <= first:
        return ()
    number = max(1, round((last - first) / bucket_s))
    ends = np.linspace(first, last, number + 1)
    middles = (ends[:-1] + ends[1:]) / 2
    at_s, tokens = zip(*counts, strict=True)
    rates = np.diff(np.interp(ends, at_s, tokens)) * number / (last - first)
    return tuple(map(RatePoint, middles.tolist(), rates.tolist()))


def _thinned(rows: Sequence[RowPoint]) -> tuple[RowPoint, ...]:
    step = -(-len(rows) // MOST_POINTS)
    kept = list(rows[::step])
    return tuple(kept if kept[-1] == rows[-1] else [*kept, rows[-1]])


def _planned(session: JobSession, begins_s: float, ends_s: float) -> tuple[PlannedSpan, ...]:
    parts = session.parts
    ends = [*(begins_s + part.begins_s for part in parts[1:]), ends_s]
    return tuple(
        PlannedSpan(begins_s + part.begins_s, end, part.plan.tokens_per_s)
        for part, end in zip(parts, ends, strict=True)
        if part.plan.tokens_per_s and end > begins_s + part.begins_s
    )

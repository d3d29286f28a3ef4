"""A job over time: rates, results and plans of its sessions, for pictures, and its events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmpq.jobs.sessions import JobSession

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
    """Rows that are done at a second of the job."""

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
    ends = [first + (last - first) * each / number for each in range(number + 1)]
    tokens = [_count_at(counts, at_s) for at_s in ends]
    width = (last - first) / number
    return tuple(
        RatePoint((ends[each] + ends[each + 1]) / 2, (tokens[each + 1] - tokens[each]) / width)
        for each in range(number)
    )


def _count_at(counts: Sequence[tuple[float, int]], at_s: float) -> float:
    place = bisect_right(counts, at_s, key=lambda each: each[0])
    if place >= len(counts):
        return counts[-1][1]
    (before_s, before), (after_s, after) = counts[place - 1], counts[place]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)


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

"""Pictures of a job over the time that it ran: tokens per second, and finished rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.overview.sentences import lasted
from llmpq.jobs.overview.series import JobEvent
from llmpq.jobs.page.time_axis import TimeAxis
from llmpq.report.formatting import count, per_second
from llmpq.report.pictures.axes import Axis

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 48, 56
LABEL_ROWS, LABEL_WIDTH = (34.0, 12.0), 22.0
"""Pixels of the rows in which numbers of events stand, and of each number."""

MOST_MARKS = 40
"""Events that are marked; more would cover each other."""

Pixels = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """An event on the time axis, whose number stands at `label`, above the picture."""

    number: int
    x: float
    label: tuple[float, float]
    title: str


@dataclass(frozen=True)
class Chart:
    """Curves over time, as pixels: `measured`, and `planned` beside them.

    `whole`: pixels of all rows, with their words; None where the picture has no such line.
    """

    name: str
    time: TimeAxis
    axis: Axis
    ticks: Sequence[tuple[float, str]]
    measured: Sequence[Pixels]
    planned: Sequence[Pixels]
    begins: Sequence[float]
    marks: Sequence[Mark]
    words: str
    whole: tuple[float, str] | None = None
    width: int = WIDTH
    height: int = HEIGHT


def rate_chart(job: JobOverview) -> Chart | None:
    """Tokens per second; None where too little is known."""
    rates = [point.tokens_per_s for session in job.series for point in session.rates]
    if not rates:
        return None
    plans = [span.tokens_per_s for session in job.series for span in session.planned]
    time, axis = _time(job), Axis.from_zero([*rates, *plans], HEIGHT - BOTTOM, TOP)
    return Chart(
        name="generated tokens per second",
        time=time,
        axis=axis,
        ticks=axis.ticks,
        measured=[
            [(time.at(point.at_s), axis.at(point.tokens_per_s)) for point in session.rates]
            for session in job.series
        ],
        planned=[
            [(time.at(each), axis.at(span.tokens_per_s)) for each in (span.begins_s, span.ends_s)]
            for session in job.series
            for span in session.planned
        ],
        begins=_begins(job, time),
        marks=_marks(job.events, time),
        words=f"from {per_second(min(rates))} to {per_second(max(rates))} over "
        f"{lasted(job.seconds)}",
    )


def rows_chart(job: JobOverview) -> Chart | None:
    """Finished rows; None where too little is known."""
    rows = [point.rows for session in job.series for point in session.rows]
    if not rows or max(rows) == 0 or job.seconds <= 0:
        return None
    most = max(max(rows), job.rows or 0)
    time, axis = _time(job), Axis.from_zero([most], HEIGHT - BOTTOM, TOP)
    return Chart(
        name="finished rows",
        time=time,
        axis=axis,
        ticks=[(at, text) for at, text in axis.ticks if "." not in text],
        measured=[
            [(time.at(point.at_s), axis.at(point.rows)) for point in session.rows]
            for session in job.series
        ],
        planned=_planned_rows(job, time, axis),
        begins=_begins(job, time),
        marks=_marks(job.events, time),
        words=f"{count(max(rows))} after {lasted(job.seconds)}",
        whole=None if not job.rows else (axis.at(job.rows), f"all {count(job.rows)}"),
    )


def _planned_rows(job: JobOverview, time: TimeAxis, axis: Axis) -> list[Pixels]:
    """Rows as each session's plan predicts them from where it began, as far as the picture goes."""
    found: list[Pixels] = []
    for session, figures in zip(job.series, job.sessions, strict=True):
        plan = figures.parts[0].plan
        if not (plan.seconds and plan.prompts and job.rows and figures.loaded_s is not None):
            continue
        begins_s, rows = session.rows[0].at_s, session.rows[0].rows
        a_row_s = plan.seconds / plan.prompts
        ends_s = min(session.ends_s, begins_s + (job.rows - rows) * a_row_s)
        upto = rows + (ends_s - begins_s) / a_row_s
        found.append([(time.at(begins_s), axis.at(rows)), (time.at(ends_s), axis.at(upto))])
    return found


def _time(job: JobOverview) -> TimeAxis:
    return TimeAxis(max(job.seconds, 1e-3), LEFT, WIDTH - RIGHT)


def _begins(job: JobOverview, time: TimeAxis) -> list[float]:
    return [time.at(session.begins_s) for session in job.series[1:]]


def _marks(events: Sequence[JobEvent], time: TimeAxis) -> list[Mark]:
    """Marks of the latest events, whose numbers make way for each other."""
    marks: list[Mark] = []
    ends = dict.fromkeys(LABEL_ROWS, -math.inf)
    for event in events[-MOST_MARKS:]:
        x = time.at(event.at_s)
        y = next((row for row in LABEL_ROWS if ends[row] <= x), min(ends, key=ends.__getitem__))
        label = max(x, ends[y])
        ends[y] = label + LABEL_WIDTH
        title = f"{event.kind}: {event.text}"
        marks.append(Mark(event.number, x, (min(label, WIDTH - LABEL_WIDTH / 2), y), title))
    return marks

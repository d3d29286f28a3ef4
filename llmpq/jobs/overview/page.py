"""The page of a job: one file, with its style and pictures inside and nothing to load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.overview.words import (
    NOT_KNOWN,
    SESSION_HEADS,
    STAGE_HEADS,
    facts,
    rows_words,
    session_cells,
    speed_words,
    stage_cells,
    state_words,
    time_words,
    why_stopped,
)
from llmpq.report.charts import Axis, columns, element, label, line, polyline, rows, spot, svg, text
from llmpq.report.formatting import count, lasted, per_second
from llmpq.report.rendering import render, write_page
from llmpq.version import llmpq_version

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 78, WIDTH - 24, 48, HEIGHT - 56
LABEL_ROWS, LABEL_WIDTH = (34.0, 12.0), 22.0
"""Pixels of the rows in which numbers of events stand, and of each number."""

MOST_MARKS = 40
"""Events that are marked; more would cover each other."""

Pixels = Sequence[tuple[float, float]]


def job_page(job: JobOverview, refresh_s: float | None = None, home: str = "") -> str:
    """The job as an HTML document, which a browser loads again every `refresh_s` seconds.

    `home`: where the page of all jobs is; of a page that comes over HTTP, which a script refreshes.
    """
    charts = (("generated tokens per second", rate_chart(job)), ("finished rows", rows_chart(job)))
    return render(
        "job.html.j2",
        job=job,
        state=state_words(job),
        why=why_stopped(job),
        facts=tuple(facts(job)),
        tiles=_tiles(job),
        charts=[(name, chart) for name, chart in charts if chart is not None],
        session_heads=SESSION_HEADS,
        session_cells=session_cells,
        stage_heads=("stage", *STAGE_HEADS[2:]),
        stage_cells=stage_cells,
        version=llmpq_version(),
        refresh=None if refresh_s is None else max(1, round(refresh_s)),
        home=home,
    )


def _tiles(job: JobOverview) -> list[tuple[str, str]]:
    planned = job.planned_tokens_per_s
    return [
        ("state", state_words(job)),
        ("rows", rows_words(job)),
        ("tokens per second", speed_words(job)),
        ("predicted", NOT_KNOWN if planned is None else per_second(planned)),
        ("time", time_words(job) if job.sessions else NOT_KNOWN),
    ]


def write_job_page(path: str | Path, job: JobOverview, refresh_s: float | None = None) -> None:
    """Write `job_page` whole or not at all; raises InputError where it cannot be written."""
    write_page(Path(path), job_page(job, refresh_s), "page")


def rate_chart(job: JobOverview) -> Markup | None:
    rates = [point.tokens_per_s for session in job.series for point in session.rates]
    if not rates:
        return None
    plans = [span.tokens_per_s for session in job.series for span in session.planned]
    time, y = _time(job), Axis.from_zero([*rates, *plans], BOTTOM, TOP)
    measured = [
        [(time.at(point.at_s), y.at(point.tokens_per_s)) for point in session.rates]
        for session in job.series
    ]
    planned = [
        [(time.at(each), y.at(span.tokens_per_s)) for each in (span.begins_s, span.ends_s)]
        for session in job.series
        for span in session.planned
    ]
    span = f"from {per_second(min(rates))} to {per_second(max(rates))} over {lasted(job.seconds)}"
    parts = [*rows(y.ticks, LEFT, RIGHT), *_course(job, time, measured, planned)]
    return _chart(job, f"generated tokens per second: {span}", parts)


def rows_chart(job: JobOverview) -> Markup | None:
    done = [point.rows for session in job.series for point in session.rows]
    if not done or max(done) == 0 or job.seconds <= 0:
        return None
    time, y = _time(job), Axis.from_zero([max(max(done), job.rows or 0)], BOTTOM, TOP)
    measured = [
        [(time.at(point.at_s), y.at(point.rows)) for point in session.rows]
        for session in job.series
    ]
    planned = [[(time.at(at_s), y.at(each)) for at_s, each in ends] for ends in _planned_rows(job)]
    ticks = [(at, number) for at, number in y.ticks if "." not in number]
    parts = [*rows(ticks, LEFT, RIGHT), *_course(job, time, measured, planned)]
    if job.rows:
        parts.append(line(LEFT, y.at(job.rows), RIGHT, y.at(job.rows), "whole"))
        parts.append(label(LEFT + 6, y.at(job.rows) - 6, f"all {count(job.rows)}"))
    return _chart(job, f"finished rows: {count(max(done))} after {lasted(job.seconds)}", parts)


def _chart(job: JobOverview, said: str, parts: Sequence[Markup]) -> Markup:
    role = "group" if job.events else "img"  # links within an image would not be told
    return svg((WIDTH, HEIGHT), said, parts, style="chart course", role=role)


def _planned_rows(job: JobOverview) -> Iterator[list[tuple[float, float]]]:
    """Yield seconds and rows as each session's plan predicts them, within the picture."""
    for session, figures in zip(job.series, job.sessions, strict=True):
        plan = figures.parts[0].plan
        if not (plan.seconds and plan.prompts and job.rows and figures.loaded_s is not None):
            continue
        begins_s, done = session.rows[0].at_s, session.rows[0].rows
        a_row_s = plan.seconds / plan.prompts
        ends_s = min(session.ends_s, begins_s + (job.rows - done) * a_row_s)
        yield [(begins_s, done), (ends_s, done + (ends_s - begins_s) / a_row_s)]


def _time(job: JobOverview) -> Axis:
    return Axis(0.0, max(job.seconds, 1e-3), LEFT, RIGHT)


def _course(
    job: JobOverview, time: Axis, measured: Sequence[Pixels], planned: Sequence[Pixels]
) -> Iterator[Markup]:
    """Draw curves over the time that the job ran, and its events."""
    yield from columns(time.times, BOTTOM, TOP, below=22)
    words = "time that the job ran"
    yield text((LEFT + RIGHT) / 2, HEIGHT - 6, words, text_anchor="middle")
    for session in job.series[1:]:
        yield line(time.at(session.begins_s), TOP - 6, time.at(session.begins_s), BOTTOM, "begins")
    for pixels in planned:
        yield polyline(pixels, "planned")
    for pixels in measured:
        if len(pixels) == 1:
            yield spot(*pixels[0], "", r=4)
        elif pixels:
            yield polyline(pixels)
    yield from _marks(job, time)


def _marks(job: JobOverview, time: Axis) -> Iterator[Markup]:
    """Mark the latest events by numbers above the picture, which make way for each other."""
    numbers: list[Markup] = []
    ends = dict.fromkeys(LABEL_ROWS, -math.inf)
    for event in job.events[-MOST_MARKS:]:
        x = time.at(event.at_s)
        y = next((row for row in LABEL_ROWS if ends[row] <= x), min(ends, key=ends.__getitem__))
        at = max(x, ends[y])
        ends[y] = at + LABEL_WIDTH
        at = min(at, WIDTH - LABEL_WIDTH / 2)
        path = f"M{at:.1f},{y:.1f} L{x:.1f},{TOP:.1f} {x:.1f},{BOTTOM:.1f}"
        yield element("path", d=path, style="event")
        told = f"{event.kind}: {event.text}"
        number = (
            element("title", told),
            spot(at, y, "", "event", r=10),
            text(at, y + 5, str(event.number), "event", text_anchor="middle"),
        )
        named = f"event {event.number}: {told}"
        numbers.append(element("a", *number, href="#events", aria_label=named))
    yield from numbers

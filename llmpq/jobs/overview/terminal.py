"""Jobs for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.overview.words import (
    NOT_KNOWN,
    SESSION_HEADS,
    STAGE_HEADS,
    facts,
    session_cells,
    stage_cells,
    state_words,
    why_stopped,
)
from llmpq.jobs.sessions import PlanPart
from llmpq.remote.ray_jobs import KnownJob
from llmpq.report.formatting import SPACE, age, count, lasted, moment, per_second, plural, shortened

MOST_EVENTS = 12
"""Events that a terminal shows, the latest ones; the page has all."""

_WIDE_DEVICE, _WIDE_MODEL = 22, 14  # characters
_MANY = 7  # columns, which then stand closer


def job_text(job: JobOverview) -> RenderableType:
    """All that is known of a job."""
    return Group(*_parts(job))


def _parts(job: JobOverview) -> Iterator[RenderableType]:
    # A path and a command stay in one piece, so that they can be copied.
    yield Text(f"{job.output}: {state_words(job)}", "bold", no_wrap=True, overflow="ignore")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts(job):
        grid.add_row(f"  {name}", _plain(text))
    yield grid
    if job.state == "stopped":
        yield Text(why_stopped(job))
        if job.command:
            yield Text(f"  {job.command}", "dim", no_wrap=True, overflow="ignore")
    yield from (Text(f"note: {remark}") for remark in job.remarks)
    if job.sessions and job.sessions[-1].parts[-1].plan.stages:
        yield _stages(job.sessions[-1].parts[-1])
    if job.error_kinds:
        yield _errors(job)
    if job.events:
        yield _events(job)
    if len(job.sessions) > 1:
        rows = ((began[:-3], *more) for began, *more in map(session_cells, job.sessions))
        yield _table("sessions", SESSION_HEADS, rows, words=(0, 6))


def _stages(part: PlanPart) -> RenderableType:
    """The stages without their bits, for which 80 columns have no room."""
    heads = [head for head in STAGE_HEADS if head != "bits"]
    rows = []
    for number, stage in enumerate(part.stages):
        cells = dict(enumerate(stage_cells(number, stage)))
        cells[1] = shortened(cells[1], _WIDE_DEVICE)
        del cells[STAGE_HEADS.index("bits")]
        rows.append(list(cells.values()))
    return _table(
        "stages: mean of a full micro-batch, measured and planned", heads, rows, (1, 2), (1,)
    )


def _errors(job: JobOverview) -> RenderableType:
    title = "errors by kind"
    if job.error_rows_read is not None:
        title += f" (of the first {plural(job.error_rows_read, 'row')})"
    rows = [
        (count(kind.count), f"{kind.error}\nfirst: {kind.custom_id}") for kind in job.error_kinds
    ]
    return _table(title, ("rows", "error"), rows, words=(1,), folds=(1,))


def _events(job: JobOverview) -> RenderableType:
    shown = job.events[-MOST_EVENTS:]
    left_out = len(job.events) - len(shown) + job.more_events
    title = "what happened" + (f" ({count(left_out)} more)" if left_out else "")
    rows = [(moment(event.at)[5:], event.kind, lasted(event.lost_s), event.text) for event in shown]
    return _table(title, ("when", "what", "lost", ""), rows, words=(0, 1, 3), folds=(3,))


def _table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[int],
    folds: Sequence[int] = (),
) -> RenderableType:
    """Columns of `words` are aligned to the left; those in `folds` may take several lines."""
    table = Table(
        title=f"\n{title}" if title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1 if len(heads) > _MANY else 2, 0, 0),
        header_style="dim",
    )
    for number, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if number in words else "right",
            overflow="fold",
            no_wrap=number not in folds,
        )
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str) -> Text:
    """A text whose spaces are those that every terminal has."""
    return Text(text.replace(SPACE, " "))


LIST_HEADS = ("output", "state", "rows", "errors", "tokens/s", "ago", "model")


def list_text(jobs: Sequence[JobOverview]) -> RenderableType:
    """Jobs, a line each; how long ago the last sign of each was."""
    return _table("", LIST_HEADS, map(_list_cells, jobs), words=(0, 1, 6), folds=(0,))


def _list_cells(job: JobOverview) -> Sequence[str]:
    rows = "–" if job.done is None else count(job.done)
    speed = job.now_tokens_per_s or job.tokens_per_s
    return (
        str(job.output),
        job.state,
        rows if job.rows is None else f"{rows}/{count(job.rows)}",
        "–" if job.errors is None else count(job.errors),
        "–" if speed is None else per_second(speed),
        "–" if job.last_at is None else age(job.last_at, job.at),
        shortened(job.model or NOT_KNOWN, _WIDE_MODEL),
    )


def ray_text(jobs: Sequence[KnownJob]) -> RenderableType:
    """Jobs of a Ray cluster, a line each."""
    rows = [
        (
            job.id,
            job.status if job.exit_code in (None, 0) else f"{job.status} ({job.exit_code})",
            "–" if job.began_at is None else moment(job.began_at),
            "–" if job.ended_at is None else moment(job.ended_at),
            job.output or "–",
        )
        for job in jobs
    ]
    return _table(
        "", ("id", "state", "began", "ended", "output"), rows, words=range(5), folds=(0, 4)
    )

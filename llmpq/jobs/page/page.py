"""The page of a job as a whole: one file, with its style inside and nothing to load."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.overview.sentences import (
    NOT_KNOWN,
    SESSION_HEADS,
    STAGE_HEADS,
    facts,
    lasted,
    moment,
    rows_words,
    session_cells,
    speed_words,
    stage_cells,
    state_words,
    time_words,
    why_stopped,
)
from llmpq.jobs.page.charts import rate_chart, rows_chart
from llmpq.report.formatting import count, per_second, plural
from llmpq.version import llmpq_version
from quant.common.errors import InputError
from quant.common.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

_ROOMS = ("llmpq.jobs.page", "llmpq.report", "llmpq.report.pictures")
"""Rooms with templates: style and elements are those of the report."""

_FILTERS = (count, lasted, moment, per_second, plural, session_cells)


def job_page(job: JobOverview, refresh_s: float | None = None) -> str:
    """The job as an HTML document, which a browser loads again every `refresh_s` seconds."""
    return (
        _environment()
        .get_template("job_page.html.j2")
        .render(
            job=job,
            state=state_words(job),
            why=why_stopped(job),
            facts=tuple(facts(job)),
            tiles=_tiles(job),
            rates=rate_chart(job),
            rows_chart=rows_chart(job),
            session_heads=SESSION_HEADS,
            stage_heads=("stage", *STAGE_HEADS[2:]),
            stage_cells=stage_cells,
            version=llmpq_version(),
            refresh=None if refresh_s is None else max(1, round(refresh_s)),
        )
    )


def _tiles(job: JobOverview) -> list[tuple[str, str]]:
    """The first things that people look for, by their names."""
    planned = job.planned_tokens_per_s
    return [
        ("state", state_words(job)),
        ("rows", rows_words(job)),
        ("tokens per second", speed_words(job)),
        ("predicted", NOT_KNOWN if planned is None else f"{per_second(planned)}"),
        ("time", time_words(job) if job.sessions else NOT_KNOWN),
    ]


def write_page(path: str | Path, job: JobOverview, refresh_s: float | None = None) -> None:
    """Write `job_page`; an existing file is replaced whole or not at all.

    Raises InputError where it cannot be written.
    """
    target = Path(path)
    text = job_page(job, refresh_s)
    try:
        write_whole(target, text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write the page to {target}: {why}") from error


@cache
def _environment() -> Environment:
    from jinja2 import (  # the terminal needs none
        ChoiceLoader,
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(room) for room in _ROOMS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    return environment

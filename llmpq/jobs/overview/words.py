"""A job in words: what terminal and page share, and all of it for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.sessions import KILLED, RUNNING, JobSession, PlanPart, StageFigures
from llmpq.remote.ray_jobs import KnownJob
from llmpq.report.formatting import (
    SPACE,
    age,
    count,
    lasted,
    moment,
    per_second,
    percent,
    plural,
    seconds,
    shortened,
)

NOT_KNOWN = "not known"

_SAME = 0.005  # shares below which measured and predicted are alike


def state_words(job: JobOverview) -> str:
    if job.state == "running":
        session = job.sessions[-1] if job.sessions else None
        if session is None or session.how != RUNNING:
            return "running, starting"  # it has the lock and reads its input
        return "running, loading stages" if session.loaded_s is None else "running"
    if job.state == "done":
        return f"done with {plural(job.errors, 'error')}" if job.errors else "done"
    return "stopped"


def why_stopped(job: JobOverview) -> str:
    """Why a job does not run, and what goes on; empty for one that does, or is done."""
    if job.state != "stopped":
        return ""
    go_on = "the same command goes on from there"
    if not job.sessions:
        return f"What is finished is kept; {go_on}."
    last = job.sessions[-1]
    what = {
        KILLED: "Its process was killed or its machine went down",
        "interrupted": "It was interrupted",
        "stopped": f"It was stopped {last.text}",
        "done": "Its results were not put together",
    }.get(last.how, f"It failed: {last.text}")
    return f"{what}; {go_on}."


def facts(job: JobOverview) -> Iterator[tuple[str, str]]:
    yield ("model", job.model or NOT_KNOWN)
    if job.sessions:
        session = job.sessions[-1]
        plan = session.parts[-1].plan
        file = "" if len(session.parts) > 1 else f" ({session.start.plan_file})"
        yield ("plan", f"{plan.fingerprint}{file} for {plan.cluster}")
    yield ("rows", rows_words(job))
    if job.tokens is not None:
        yield ("tokens", f"{count(job.tokens)} generated")
        yield ("tokens/s", speed_words(job))
        yield ("time", time_words(job))
    if job.latency is not None:
        yield ("latency", str(job.latency))
    yield from _beside_the_plan(job)


def rows_words(job: JobOverview) -> str:
    done = NOT_KNOWN if job.done is None else count(job.done)
    whole = f"{done} done" if job.rows is None else f"{done} of {count(job.rows)} done"
    left = "" if not job.left else f", {count(job.left)} left"
    errors = "errors not counted" if job.errors is None else plural(job.errors, "error")
    return f"{whole}{left}, {errors}"


def speed_words(job: JobOverview) -> str:
    if job.tokens_per_s is None:
        return "measuring" if job.state == "running" else NOT_KNOWN
    now = job.now_tokens_per_s
    return per_second(job.tokens_per_s) + ("" if now is None else f", now {per_second(now)}")


def time_words(job: JobOverview) -> str:
    loads_s = job.seconds - job.generated_s
    sessions = len(job.sessions)
    text = f"{lasted(job.seconds)}, of which {lasted(loads_s)} loading"
    if sessions > 1:
        text += f", in {plural(sessions, 'session')}"
    if job.state == "running":
        left = "to go: measuring" if job.left_s is None else f"{lasted(job.left_s)} to go"
        return f"{text}; {left}"
    return text if job.left_s is None else f"{text}; about {lasted(job.left_s)} are left"


def _beside_the_plan(job: JobOverview) -> Iterator[tuple[str, str]]:
    """Predictions beside what was measured, where the plan is followed."""
    if not job.sessions:
        return
    planned, measured = job.planned_tokens_per_s, job.tokens_per_s
    if planned is None:
        yield ("predicted", "nothing: emulated devices without a time scale follow no plan")
        return
    text = f"{per_second(planned)} tokens/s"
    if job.planned_s is not None and job.rows is not None:
        text += f", {lasted(job.planned_s)} for {plural(job.rows, 'row')}"
    yield ("predicted", text)
    if measured is not None:
        text = f"{per_second(measured)} tokens/s, {beside(measured, planned)}"
        if job.state == "done" and job.planned_s is not None:
            text += f"; {lasted(job.generated_s)} without loading"
        yield ("measured", text)


def beside(measured: float, planned: float) -> str:
    """A measured speed beside a predicted one, as "5 % slower" or "3.1 times as fast"."""
    change = measured / planned - 1
    if not -0.5 < change < 1:
        return f"{measured / planned:.2g} times as fast"
    if abs(change) < _SAME:
        return "as predicted"
    return f"{percent(abs(change))} {'faster' if change > 0 else 'slower'}"


def stage_seconds(measured: float | None, is_full: bool) -> str:
    """The mean seconds of a micro-batch; ~ where none was full."""
    return "–" if measured is None else f"{'' if is_full else '~'}{seconds(measured)}"


def stage_cells(number: int, stage: StageFigures) -> tuple[str, ...]:
    planned, work = stage.planned, stage.work
    first, end = planned.layers
    return (
        str(number),
        planned.device,
        f"{first}-{end - 1}",
        planned.bits,
        "–" if work is None else stage_seconds(work.prefill_s, work.prefill_full),
        "–" if planned.prefill_s is None else seconds(planned.prefill_s),
        "–" if work is None else stage_seconds(work.decode_s, work.decode_full),
        "–" if planned.decode_s is None else seconds(planned.decode_s),
        "–" if work is None else percent(work.busy_share),
    )


STAGE_HEADS = (
    "stage", "device", "layers", "bits", "prefill", "planned", "decode", "planned", "busy",
)  # fmt: skip

SESSION_HEADS = ("began", "lasted", "rows", "errors", "tokens", "tokens/s", "ended")


def session_cells(session: JobSession) -> tuple[str, ...]:
    made = session.tokens and session.generated_s
    return (
        moment(session.began_at),
        lasted(session.seconds),
        count(session.rows),
        count(session.errors),
        count(session.tokens),
        per_second(session.tokens / session.generated_s) if made else "–",
        session.how,
    )


MOST_EVENTS = 12
"""Events that a terminal shows, the latest ones; the page has all."""

_WIDE_DEVICE, _WIDE_MODEL = 22, 14  # characters
_MANY = 7  # columns, which then stand closer


def job_text(job: JobOverview) -> RenderableType:
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
    rows = [
        (number, shortened(device, _WIDE_DEVICE), layers, *figures)
        for number, device, layers, _, *figures in starmap(stage_cells, enumerate(part.stages))
    ]
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


def page_cells(job: JobOverview) -> list[str]:
    """What a page's list says of a job, after its name: state to model."""
    _, _, rows, errors, speed, ago, _ = _list_cells(job)
    planned = job.planned_tokens_per_s
    return [
        state_words(job),
        rows,
        errors,
        speed,
        "–" if planned is None else per_second(planned),
        ago if ago == "–" else f"{ago} ago",
        job.model or NOT_KNOWN,
    ]


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

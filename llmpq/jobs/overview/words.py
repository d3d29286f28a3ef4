"""A job in words: the same in the terminal and on its page."""

from __future__ import annotations

from collections.abc import Iterator

from llmpq.jobs.overview.overview import JobOverview
from llmpq.jobs.sessions import KILLED, RUNNING, JobSession, StageFigures
from llmpq.report.formatting import count, lasted, moment, per_second, percent, plural, seconds

NOT_KNOWN = "not known"

_SAME = 0.005  # shares below which measured and predicted are alike


def state_words(job: JobOverview) -> str:
    """The state in a word or two."""
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
    """What is known of the job as a whole, a line each."""
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
    """Rows that are done, left and in error."""
    done = NOT_KNOWN if job.done is None else count(job.done)
    whole = f"{done} done" if job.rows is None else f"{done} of {count(job.rows)} done"
    left = "" if not job.left else f", {count(job.left)} left"
    errors = "errors not counted" if job.errors is None else plural(job.errors, "error")
    return f"{whole}{left}, {errors}"


def speed_words(job: JobOverview) -> str:
    """Tokens per second, in all and now."""
    if job.tokens_per_s is None:
        return "measuring" if job.state == "running" else NOT_KNOWN
    now = job.now_tokens_per_s
    return per_second(job.tokens_per_s) + ("" if now is None else f", now {per_second(now)}")


def time_words(job: JobOverview) -> str:
    """Seconds so far, those of loading, and those to go."""
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
    """A stage's device, layers, bits, measured and predicted times, and busy share."""
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
    """A session's times, rows and speed, and how it ended."""
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

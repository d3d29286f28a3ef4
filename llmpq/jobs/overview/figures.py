"""Figures of a job's sessions: times, tokens, plans, and what the stages took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.jobs.journal.entries import PlannedStage, PlanNote, StageWork
from llmpq.jobs.journal.reader import Journal, PlanPart, Session
from llmpq.report.measured_latency import LatencyFigures, PlannedLatency

KILLED = "killed"
RUNNING = "running"


@dataclass(frozen=True)
class StageFigures:
    """A stage as planned, and what it did, where that is known."""

    planned: PlannedStage
    work: StageWork | None


@dataclass(frozen=True)
class PartFigures:
    """The part of a session that one plan made, from the session's second `begins_s` on."""

    plan: PlanNote
    begins_s: float
    tokens: int
    seconds: float
    stages: tuple[StageFigures, ...]


@dataclass(frozen=True)
class SessionFigures:
    """A session: `began_at` to `ended_at`, of which it generated for `generated_s` seconds, from
    second `loaded_s` on (None: it never came to that).

    `how`: running, killed, done, interrupted, stopped or failed.
    """

    number: int
    began_at: float
    ended_at: float
    how: str
    text: str
    rows: int
    errors: int
    tokens: int
    loaded_s: float | None
    parts: tuple[PartFigures, ...]
    host: str
    llmpq: str
    command: str
    plan_file: str

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.ended_at - self.began_at

    @property
    def generated_s(self) -> float:
        """Seconds in which it generated."""
        return 0.0 if self.loaded_s is None else max(0.0, self.seconds - self.loaded_s)


def session_figures(journal: Journal, runs: bool, now: float) -> tuple[SessionFigures, ...]:
    """The figures of all sessions; `runs`: the last one still does."""
    last = len(journal.sessions) - 1
    return tuple(
        _figures(number, session, runs and number == last and session.end is None, now)
        for number, session in enumerate(journal.sessions, start=0)
    )


def _figures(number: int, session: Session, runs: bool, now: float) -> SessionFigures:
    start, end = session.start, session.end
    ended_at = now if runs else session.last_at
    ended_at = max(start.at, ended_at)
    how, text = (RUNNING if runs else KILLED, "") if end is None else (end.how, end.text)
    loaded_s = None if session.loaded is None else max(0.0, session.loaded - start.at)
    return SessionFigures(
        number=number + 1,
        began_at=start.at,
        ended_at=ended_at,
        how=how,
        text=text,
        rows=session.rows,
        errors=session.failed_rows,
        tokens=session.tokens,
        loaded_s=loaded_s,
        parts=_parts(session, ended_at),
        host=start.host,
        llmpq=start.llmpq,
        command=start.command,
        plan_file=start.plan_file,
    )


def _parts(session: Session, ended_at: float) -> tuple[PartFigures, ...]:
    """The parts, of which the first begins when the stages are loaded."""
    begins = [part.at for part in session.parts]
    begins[0] = session.loaded or ended_at
    ends = [*begins[1:], ended_at]
    tokens = [part.tokens for part in session.parts]
    return tuple(
        PartFigures(
            plan=part.plan,
            begins_s=max(0.0, begin - session.start.at),
            tokens=max(0, upto - before),
            seconds=max(0.0, end - begin),
            stages=_stages(part),
        )
        for part, begin, end, before, upto in zip(
            session.parts, begins, ends, tokens, [*tokens[1:], session.tokens], strict=True
        )
    )


def _stages(part: PlanPart) -> tuple[StageFigures, ...]:
    done: Sequence[StageWork | None] = () if part.work is None else part.work.stages
    if len(done) != len(part.plan.stages):
        done = (None,) * len(part.plan.stages)
    return tuple(map(StageFigures, part.plan.stages, done))


def planned_rate(sessions: Sequence[SessionFigures]) -> float | None:
    """Tokens per second of all sessions by their plans: each plan's seconds for its tokens.

    None where one follows no plan; before there are tokens, that of the latest plan.
    """
    parts = [part for session in sessions for part in session.parts]
    if not parts:
        return None
    made = [part for part in parts if part.tokens] or parts[-1:]
    seconds = tokens = 0.0
    for part in made:
        if not part.plan.tokens_per_s:
            return None
        weight = part.tokens or 1
        tokens += weight
        seconds += weight / part.plan.tokens_per_s
    return tokens / seconds


def latency_figures(journal: Journal) -> LatencyFigures | None:
    """The latencies of all sessions beside what the latest plan says of them; None where it says
    nothing, or no request has ended.
    """
    if not journal.sessions:
        return None
    plan = journal.sessions[-1].parts[-1].plan
    if plan.quantile is None or plan.latency_s is None:
        return None
    planned = PlannedLatency(plan.quantile, plan.latency_s, plan.bound_s)
    return LatencyFigures.of([session.latencies for session in journal.sessions], planned)


def planned_seconds(sessions: Sequence[SessionFigures], rows: int | None) -> float | None:
    """Seconds that the latest plan predicts for so many rows, in proportion to its own."""
    if not sessions or not rows:
        return None
    plan = sessions[-1].parts[-1].plan
    if plan.seconds is None or not plan.prompts:
        return None
    return plan.seconds * rows / plan.prompts

"""Telling a job's journal how its run goes: plans, points, events, errors, and how it ended."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from actors.recovery.policy import RecoveryEvent
from actors.stage_figures import StageStats
from llmpq.jobs import journal
from llmpq.jobs.result_lines import ErrorCounts, ErrorKind
from llmpq.jobs.row_database import Tally
from llmpq.report.formatting import bit_runs
from llmpq.rows.results import Result
from llmpq.run.meter import INTERVAL_S, RunState
from llmpq.run.metrics import RunMetrics
from llmpq.run.run import Run
from llmpq.run.summary import mean_s, planned_latency, planned_tokens_per_s
from llmpq.version import llmpq_version
from planner.plan.simulate import planned_s, time_scale
from planner.plan.spec import PlanSpec, StagePlan, undivided
from planner.scheduling import Phase
from quant.common.text import printable

MOST_EVENTS = 300
"""Events of a session that are kept; of the others only their number."""

_ID, _TEXT, _COMMAND = 400, 800, 10_000  # characters


@dataclass(frozen=True)
class SessionOf:
    """The job of a session: journal's `path`, command, rows; `after`: its newest shard."""

    path: Path
    command: str
    plan_file: str
    rows: Tally
    anew: bool = False
    after: tuple[int, int] | None = None


class RunRecorder:
    """Notes what a run does, from several threads. `end`: how it ended, unless by error or row."""

    def __init__(
        self,
        note: Callable[[journal.Entry], None],
        session: SessionOf,
        plan: PlanSpec,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._note, self._clock = note, clock
        self._rows = self._events = 0
        self._errors = ErrorCounts()
        self._told: dict[str, ErrorKind] = {}
        self._state: RunState | None = None
        self._part_at: float | None = None
        self._state_at = 0.0
        self._has_ended = False
        self._has_latency = planned_latency(plan) is not None
        now = clock()
        # Points come once a second at first, once a minute from seven hours on: 0.6 MB in a week.
        self._points = journal.Cadence(0.9, 60.0, 1 / 400, now)
        self._work = journal.Cadence(5.0, 7200.0, 1 / 10, now)
        note(_start(session, plan, now))

    def count(self, result: Result) -> None:
        self._rows += 1
        if result.error is not None:
            self._errors.add(_cut(result.custom_id, _ID), _cut(result.error))

    def see(self, state: RunState) -> None:
        now = self._clock()
        if self._state is None:
            self._note(journal.Loaded(max(0.0, now - state.elapsed_s)))
        if self._part_at is None:
            self._part_at = now - (state.elapsed_s if self._state is None else INTERVAL_S)
        self._state, self._state_at = state, now
        if self._points.is_due(now):
            self._tell_point(state, now)
        if self._work.is_due(now):
            self._tell_work(state, now)

    def change_plan(self, plan: PlanSpec) -> None:
        """Note another plan, and before it what the stages of the one before have done."""
        now = self._clock()
        if self._state is not None:
            self._tell_point(self._state, now)
            self._tell_work(self._state, now)
            self._state = replace(self._state, stages=())
        self._part_at = None
        self._has_latency = planned_latency(plan) is not None
        self._note(journal.PlanChange(now, plan_note(plan)))

    def tell(self, event: RecoveryEvent) -> None:
        self._events += 1
        if self._events > MOST_EVENTS:
            self._note(journal.MoreEvents(event.time_s, self._events - MOST_EVENTS))
            return
        text = _cut(event.text)
        self._note(
            journal.EventNote(event.time_s, event.kind, event.stage, max(0.0, event.lost_s), text)
        )

    def end(self, how: str, text: str, run: Run | None = None) -> None:
        """Note how the session ended, once, and its last figures."""
        if self._has_ended:
            return
        self._has_ended = True
        now, state = self._clock(), self._state
        if state is not None:
            tokens = state.tokens if run is None else max(state.tokens, run.rows.tokens)
            if run is not None:
                state = replace(state, latencies=run.latencies)
            self._tell_point(replace(state, tokens=tokens, time_left=None), now)
            self._tell_work(state, now)
        elif self._rows:
            tokens = 0 if run is None else run.rows.tokens
            self._tell_row_counts(now, tokens)
        self._note(journal.SessionEnd(now, how, _cut(text)))

    def _tell_point(self, state: RunState, now: float) -> None:
        left_s = None if state.time_left is None else state.time_left.seconds
        self._tell_row_counts(now, state.tokens, state.tokens_per_s, left_s)

    def _tell_row_counts(
        self, now: float, tokens: int, tokens_per_s: float = 0.0, left_s: float | None = None
    ) -> None:
        kinds = dict(self._errors.kinds)
        errors = sum(kind.count for kind in kinds.values())
        rate, left = round(tokens_per_s, 2), None if left_s is None else round(left_s, 1)
        self._note(journal.ProgressPoint(round(now, 2), self._rows, errors, tokens, rate, left))
        for what, kind in kinds.items():
            if self._told.get(what) != kind:
                self._told[what] = kind
                self._note(journal.ErrorNote(now, what, kind.count, kind.custom_id, kind.error))

    def _tell_work(self, state: RunState, now: float) -> None:
        if state.stages:
            passed_s = self._state_at - (self._part_at or self._state_at)
            times = state.elapsed_s / passed_s if passed_s > 0 else 0.0  # shares of this plan alone
            shares = state.whole_busy_share or (0.0,) * len(state.stages)
            stages = zip(state.stages, shares, strict=False)
            works = tuple(_stage_work(each, times * share) for each, share in stages)
            self._note(
                journal.WorkDone(now, works, state.latencies.buckets if self._has_latency else ())
            )


@contextmanager
def recorded(run: Run, session: SessionOf | None) -> Iterator[RunRecorder]:
    """Keep the journal of a run, also of how it is left; where there is no `session`, of none.

    What a journal is told, Ray's metrics are told too.
    """
    if session is None:
        yield RunRecorder(lambda entry: None, _NOBODY, undivided(run.plan))
        return
    writer, metrics = journal.JournalWriter(session.path), RunMetrics(run.name)

    def note(entry: journal.Entry) -> None:
        writer.note(entry)
        metrics.note(entry)

    recorder = RunRecorder(note, session, undivided(run.plan))
    run.on_state += [recorder.see, metrics.refresh]
    run.on_plan.append(recorder.change_plan)
    run.on_event.append(recorder.tell)
    give_up = run.give_up

    def end_at_once(why: str) -> None:
        recorder.end("failed", why, run)
        writer.close()
        if give_up is not None:
            give_up(why)

    if give_up is not None:
        run.give_up = end_at_once
    try:
        yield recorder
    except KeyboardInterrupt:
        recorder.end("interrupted", "", run)
        raise
    except BaseException as error:
        recorder.end("failed", str(error) or type(error).__name__, run)
        raise
    else:
        recorder.end("done", "", run)
    finally:
        writer.close()


def plan_note(plan: PlanSpec) -> journal.PlanNote:
    is_followed = planned_tokens_per_s(plan) is not None
    job, latency = plan.job, planned_latency(plan)
    return journal.PlanNote(
        fingerprint=blake2b(plan.to_json().encode(), digest_size=6).hexdigest(),
        model=_cut(plan.model.name),
        cluster=_cut(plan.cluster),
        in_flight=plan.workload.global_batch,
        prompts=None if job is None else job.job.prompts,
        seconds=job.seconds * time_scale(plan) if job is not None and is_followed else None,
        tokens_per_s=planned_tokens_per_s(plan),
        stages=tuple(_planned(plan, stage) for stage in plan.stages),
        quantile=None if latency is None else latency.quantile,
        latency_s=None if latency is None else latency.planned_s,
        bound_s=None if latency is None else latency.bound_s,
    )


def _planned(plan: PlanSpec, stage: StagePlan) -> journal.PlannedStage:
    def seconds(phase: Phase) -> float | None:
        return planned_s(plan, stage, phase) or None

    bits = " ".join(f"{bits}x{count}" for bits, count in bit_runs(sorted(stage.bitwidths)))
    span = (stage.layers.start, stage.layers.stop)
    return journal.PlannedStage(
        _cut(stage.label), span, bits, seconds("prefill"), seconds("decode")
    )


def _start(session: SessionOf, plan: PlanSpec, now: float) -> journal.SessionStart:
    return journal.SessionStart(
        journal=journal.JOURNAL_VERSION,
        at=now,
        llmpq=llmpq_version(),
        host=_cut(platform.node()),
        pid=os.getpid(),
        command=_cut(session.command, _COMMAND),
        rows=session.rows.rows,
        resumed=session.rows.resumed,
        resumed_errors=session.rows.resumed_errors,
        anew=session.anew,
        after=session.after,
        plan_file=_cut(session.plan_file),
        plan=plan_note(plan),
    )


def _stage_work(stats: StageStats, busy_share: float) -> journal.StageRecord:
    """What a stage has done; a stage that was started again counts from 0, but not its share."""
    prefill, decode = mean_s(stats.prefill), mean_s(stats.decode)
    share = min(1.0, busy_share)
    return journal.StageRecord(stats.busy_s, share, *prefill, *decode, stats.micro_batches)


def _cut(text: str, most: int = _TEXT) -> str:
    """A text that is safe to show, of about `most` characters: escapes may lengthen it."""
    return printable(text, most)[: 2 * most]


_NOBODY = SessionOf(Path(), "", "", Tally(0, 0, 0, 0))

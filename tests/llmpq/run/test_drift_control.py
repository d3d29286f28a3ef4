"""Drift is said once, another plan is looked for where it can help, and a run switches seldom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actors.messages import Request, Sampling
from actors.stage_figures import NO_LATENCIES, LatencyCounts, PhaseWork, StageStats
from llmpq import Cluster, Workload
from llmpq.run.drift import LengthRecord
from llmpq.run.meter import RunState
from llmpq.run.summary import planned_tokens_per_s
from llmpq.run.switching import (
    EVERY_S,
    MOST_PLANS,
    RESCHEDULE_EVERY_S,
    DriftControl,
    Measured,
    RowsToGo,
    Switch,
)
from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.optimiser.problem import JobPasses
from planner.plan.parts import JobForecast
from planner.plan.spec import PlanSpec
from planner.scheduling import RequestSchedule
from planner.workload import Job
from quant.common.errors import BoundNotMetError, InfeasibleError
from tests.planner.bounded import bounded
from tests.planner.plan_alone import alone

PROMPT, PLANNED_OUTPUT, ROWS = 128, 64, 100_000


def planned(slots: int, output: int = PLANNED_OUTPUT) -> PlanSpec:
    cluster = Cluster.from_counts(["T4"], [2])
    with alone():
        spec = cluster.plan("opt-6.7b", Workload(slots, PROMPT, 256), bits=[8]).spec
    job = Job(ROWS, Lengths((PROMPT,), (output,)))
    rate, sizes = spec.predicted.tokens_per_s, spec.micro_batches
    passes = JobPasses(1, 1, 1, 1, sizes.prefill, sizes.decode)
    return replace(spec, job=JobForecast(job, job.output_tokens / rate, rate, passes))


@pytest.fixture(scope="module")
def small() -> PlanSpec:
    return planned(8)


@pytest.fixture(scope="module")
def large() -> PlanSpec:
    return planned(32)


class Simulated:
    """A run in which rows of `output` tokens end at a rate; `lines` are what was said."""

    def __init__(
        self,
        plan: PlanSpec,
        plan_again: Callable[..., PlanSpec] | None = None,
        reschedule: Callable[..., PlanSpec] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.latencies = NO_LATENCIES
        self.lines: list[str] = []
        self.asked: list[Measured] = []
        self._plan_again = plan_again

        def again(plan: PlanSpec, measured: Measured) -> PlanSpec:
            assert plan_again is not None
            self.asked.append(measured)
            return plan_again(plan, measured)

        self.record = LengthRecord()
        self.plan = plan
        self.control = DriftControl(
            self.record,
            0.2,
            self.lines.append,
            None if plan_again is None else again,
            reschedule,
            lambda: self.now_s,
        )
        self.control.begin(plan, 60.0, has_schedule=plan.policy.schedule is not None)
        self.tokens = self.ended_tokens = 0.0
        self.stages: tuple[StageStats, ...] = ()

    def go_on(
        self, seconds: int, output: int, share: float = 1.0, rows_left: int = ROWS
    ) -> Switch | None:
        """The first switch in so many seconds, in which tokens come at a share of the plan."""
        rate = share * (planned_tokens_per_s(self.plan) or 0.0)
        slots = self.plan.workload.global_batch
        for _ in range(seconds):
            self.now_s += 1.0
            self.tokens += rate
            while self.tokens - self.ended_tokens > slots * output:
                request = Request(str(self.record.ended), (1,) * PROMPT, 256, Sampling())
                self.record.begin(request)
                self.record.end(request, output)
                self.ended_tokens += output
            state = self._state()
            self.control.see(state, 3 * slots)
            progress = RowsToGo(rows_left, 3 * slots, (output // 2,) * slots)
            found = self.control.switch(lambda progress=progress: progress)
            for thread in threading.enumerate():
                if thread.name == "llmpq-planning":
                    thread.join()
            if found is not None:
                return found
        return None

    def _state(self) -> RunState:
        nothing: Any = (None, 0.0, (), (), None, None)
        most, rate, busy, whole, queue, left = nothing
        ended = self.record.ended
        return RunState(
            self.now_s, ended, None, int(self.tokens), most, rate, busy, whole, queue, left,
            self.stages, self.latencies,
        )  # fmt: skip


def test_a_run_that_follows_its_plan_says_nothing(small: PlanSpec) -> None:
    run = Simulated(small, lambda *_: small)
    assert run.go_on(600, PLANNED_OUTPUT, 0.85) is None
    assert run.go_on(600, PLANNED_OUTPUT + 10, 1.5) is None
    assert (run.lines, run.asked) == ([], [])


def test_drift_is_said_once_with_numbers_and_remedy(small: PlanSpec) -> None:
    run = Simulated(small)
    assert run.go_on(600, 3 * PLANNED_OUTPUT) is None
    (line,) = run.lines
    assert "192 tokens an output, planned 64 (+200%)" in line
    assert "--replan auto" in line
    assert "tokens/s" not in line
    assert run.go_on(900, 3 * PLANNED_OUTPUT, 0.5) is None
    assert len(run.lines) == 2
    assert "tokens/s, planned" in run.lines[1]
    assert "tokens an output" not in run.lines[1]


def test_a_run_that_waits_for_others_is_not_planned_again(small: PlanSpec, large: PlanSpec) -> None:
    run = Simulated(small, lambda *_: large)
    assert run.go_on(600, PLANNED_OUTPUT, 0.5) is None
    (line,) = run.lines
    assert "(-50%); lengths and stages are as planned: look whether prompts come" in line
    assert not run.asked


def test_other_lengths_lead_to_a_switch_once_for_each_plan(
    small: PlanSpec, large: PlanSpec
) -> None:
    run = Simulated(small, lambda *_: large)
    switch = run.go_on(600, 3 * PLANNED_OUTPUT)
    assert switch is not None
    assert switch.plan is large
    assert switch.is_worth_it
    (measured,) = run.asked
    assert measured.prompts_left == ROWS + 3 * 8
    assert measured.lengths is not None
    assert measured.lengths.mean_output == pytest.approx(3 * PLANNED_OUTPUT, rel=0.02)
    assert measured.lengths.longest_output == 256
    assert run.go_on(2000, 3 * PLANNED_OUTPUT) is None, "the caller has it already"
    assert len(run.asked) == 1


def test_no_switch_near_the_end_nor_to_the_same_plan(small: PlanSpec, large: PlanSpec) -> None:
    run = Simulated(small, lambda *_: large)
    assert run.go_on(600, 3 * PLANNED_OUTPUT, rows_left=0) is None
    assert "the run goes on as it is" in run.lines[1]
    same = Simulated(small, lambda *_: replace(small, job=large.job))
    assert same.go_on(600, 3 * PLANNED_OUTPUT) is None
    assert same.lines[1:] == ["planned again from what was measured: the same plan, which goes on"]


def test_planning_again_is_seldom_and_ends(small: PlanSpec) -> None:
    def nothing(*_: object) -> PlanSpec:
        raise InfeasibleError("nothing fits")

    run = Simulated(small, nothing)
    assert run.go_on(int(EVERY_S), 3 * PLANNED_OUTPUT) is None
    assert len(run.asked) == 1
    assert run.go_on(int(6 * EVERY_S), 3 * PLANNED_OUTPUT) is None
    assert len(run.asked) == MOST_PLANS
    assert run.lines[1:] == ["no other plan: nothing fits; the run goes on as it is"] * MOST_PLANS


def test_a_slow_device_is_planned_for_with_what_was_measured(
    small: PlanSpec, large: PlanSpec
) -> None:
    real = replace(small, stages=tuple(replace(each, emulated=False) for each in small.stages))
    run = Simulated(real, lambda *_: large)
    decode_s = 2 * real.stages[0].decode_s
    work = PhaseWork(1000, 8000, 8000, 1000 * decode_s, 1000, 1000 * decode_s, 1000.0)
    run.stages = (StageStats(9.0, 0, 0, 100, 1, 1, decode=work), StageStats(9.0, 0, 0, 0, 1, 1))
    assert run.go_on(600, PLANNED_OUTPUT, 0.6) is not None
    (measured,) = run.asked
    (device,) = measured.slowdowns
    assert device == real.stages[0].device
    assert measured.slowdowns[device].decode == pytest.approx(2.0)
    assert measured.slowdowns[device].prefill == 1.0


SCHEDULE = RequestSchedule("rra", 4, 8, 16, 2, 2, float(PROMPT))


def expecting(plan: PlanSpec, output: int) -> PlanSpec:
    """A plan with a schedule for answers of so many tokens, on devices whose speed is followed."""
    found = bounded(plan, replace(SCHEDULE, decode_steps=output // 4))
    assert found.latency is not None
    lengths = RequestLengths(
        LengthDistribution((PROMPT,), (1.0,)), LengthDistribution((output,), (1.0,))
    )
    rate = plan.predicted.tokens_per_s
    latency = replace(found.latency, lengths=lengths, tokens_per_s=rate)
    return replace(found, latency=latency)


def test_schedules_follow_lengths_as_they_change(small: PlanSpec) -> None:
    """Of the latest rows: soon after each change, and as often as they do."""
    asked: list[RequestLengths] = []

    def again(plan: PlanSpec, lengths: RequestLengths, margin: float | None) -> PlanSpec:
        assert margin is None
        asked.append(lengths)
        return expecting(plan, round(lengths.outputs.mean))

    run = Simulated(expecting(small, PLANNED_OUTPUT), None, again)
    assert run.go_on(900, PLANNED_OUTPUT) is None
    for output in (100, 200, 40, 100, 64):
        switch = run.go_on(900, output)
        while switch is not None:
            assert (switch.how, switch.cost_s) == ("follow", 0.0)
            run.control.begin(switch.plan, 60.0, has_schedule=True)
            run.plan = switch.plan
            switch = run.go_on(900, output)
        assert output == pytest.approx(asked[-1].outputs.mean, rel=0.2)
    assert run.asked == []


def test_a_bound_that_no_schedule_keeps_is_said_now_and_then(small: PlanSpec) -> None:
    asked: list[float] = []

    def again(*_: object) -> PlanSpec:
        asked.append(run.now_s)
        raise BoundNotMetError("no schedule keeps 20 s", "max_request_latency_s", 30.0)

    run = Simulated(expecting(small, PLANNED_OUTPUT), None, again)
    assert run.go_on(1500, 3 * PLANNED_OUTPUT) is None
    assert run.lines[1] == "no other schedule: no schedule keeps 20 s; the run goes on as it is"
    assert len(asked) == len(run.lines[1:]) <= 1 + 1500 // EVERY_S
    assert min(b - a for a, b in pairwise(asked)) >= EVERY_S
    assert RESCHEDULE_EVERY_S < EVERY_S


def test_requests_that_are_late_have_another_schedule_that_leaves_as_much(small: PlanSpec) -> None:
    """Of requests since the plan is followed; lengths are as planned."""
    asked: list[tuple[RequestLengths, float | None]] = []

    def again(plan: PlanSpec, *given: Any) -> PlanSpec:
        asked.append(given)
        return plan

    plan = expecting(small, PLANNED_OUTPUT)
    assert plan.latency is not None
    run = Simulated(plan, None, again)
    run.latencies = LatencyCounts.of([90.0] * 500)
    assert run.go_on(5, PLANNED_OUTPUT) is None
    run.latencies = run.latencies.plus(LatencyCounts.of([10.0] * 980 + [25.0] * 20))
    assert run.go_on(600, PLANNED_OUTPUT) is not None
    ((lengths, margin),) = asked
    assert lengths == plan.latency.lengths
    assert margin == pytest.approx(1 - plan.latency.latency_s / 25.22, abs=1e-3)
    (line,) = run.lines
    assert "25.22 s for 99 % of requests, planned 20 (+26%); another schedule is looked" in line

"""A plan of a job, simulated by its own times, against the times of the latency model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.micro_batches import MicroBatches
from planner.plan.forecasts import JobForecast, LatencyForecast
from planner.plan.simulate import FILLS_SHOWN, simulate_plan
from planner.schedule.job_passes import job_passes
from planner.scheduling import PolicyOptions, RequestSchedule
from planner.simulation.pictures import gantt_svg
from planner.workload import Job
from tests.planner.bounded import FORECAST


class _Stage:
    """A stage of a plan, of which only the seconds of a micro-batch are read."""

    modelled = None
    emulated = False
    prefill_s, prefill_comm_s = 0.5, 0.25
    decode_s, decode_comm_s = 0.125, 0.0625


class _Plan:
    """What the simulation reads of a plan for a job."""

    micro_batches = MicroBatches(2, 4)
    policy = PolicyOptions()
    latency: LatencyForecast | None = None
    time_scale = 0.0
    stages = (_Stage(), _Stage())

    def __init__(self, job: Job) -> None:
        passes = job_passes(job, 8, self.micro_batches, 2)
        self.workload = job.in_flight(8)
        self.job: JobForecast | None = JobForecast(job, 10.0, 10.0, passes)


def test_the_first_fills_of_a_job_are_simulated_each_prefill_by_its_tokens() -> None:
    lengths = Lengths((10, 30, 20, 40, 5), (3, 9, 1, 12, 6))
    plan = _Plan(Job(1000, lengths))
    simulated = simulate_plan(cast(Any, plan))
    prefills = [each for each in simulated.passes if each.phase == "prefill"]
    assert sum(each.requests for each in prefills) == FILLS_SHOWN * 8
    prompts, outputs = lengths.rows(FILLS_SHOWN * 8)
    assert sum(each.requests for each in simulated.passes) == outputs.sum()
    mean = plan.job.passes.prefill_requests * lengths.mean_prompt
    assert simulated.busy_s("prefill")[1] == pytest.approx(0.5 * prompts.sum() / mean)
    steps = len(simulated.passes) - len(prefills)
    assert simulated.busy_s("decode")[0] == pytest.approx(0.125 * steps)


def test_a_short_job_is_simulated_whole() -> None:
    plan = _Plan(Job(5, Lengths((10, 30), (3, 9))))
    simulated = simulate_plan(cast(Any, plan))
    outputs = plan.job.job.lengths.rows(5)[1]
    assert sum(each.requests for each in simulated.passes) == outputs.sum()


def test_a_schedule_is_simulated_with_lengths_that_it_is_for() -> None:
    """Three times its requests in flight, with turns of newcomers and three steps between them."""
    plan = _Plan(Job(5, Lengths((10, 30), (3, 9))))
    plan.job = None
    schedule = RequestSchedule("rra", 4, 12, 3, 2, 2, 20.0)
    plan.policy = PolicyOptions("exegpt", schedule=schedule)
    lengths = RequestLengths(
        LengthDistribution.of_sample([10, 20, 30]), LengthDistribution.of_sample([1, 5, 12])
    )
    plan.latency = replace(FORECAST, lengths=lengths)
    simulated = simulate_plan(cast(Any, plan))
    prefills = [each for each in simulated.passes if each.phase == "prefill"]
    assert sum(each.requests for each in prefills) == FILLS_SHOWN * 12
    assert {tokens for each in prefills for tokens in each.prompts} == {10, 20, 30}
    decodes = [each for each in simulated.passes if each.phase == "decode"]
    assert {each.index for each in decodes} == {0, 1}
    assert max(each.step for each in decodes) > 11
    picture = gantt_svg(simulated, ("first", "second"))
    assert picture.startswith("<svg")

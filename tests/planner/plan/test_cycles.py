"""Cycles that are drawn: no stage does two things at once, and each does all of a cycle's work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from planner.plan.simulate import CYCLES_SHOWN, TURNS_SHOWN, simulated_cycles
from planner.plan.spec import PlanSpec
from planner.simulation.simulation import Simulated
from quant.common.errors import SpecError
from tests.llmpq.bounded_plans import rra_plan, waa_plan
from tests.llmpq.jobs_of_prompts import small_plan


def busy_s(simulated: Simulated, stage: int, phase: str) -> float:
    taken = simulated.stage_end_s[:, stage] - simulated.stage_start_s[:, stage]
    return float(
        sum(s for each, s in zip(simulated.passes, taken, strict=True) if each.phase == phase)
    )


def spans(simulated: Simulated, stage: int) -> list[tuple[float, float]]:
    starts, ends = simulated.stage_start_s[:, stage], simulated.stage_end_s[:, stage]
    return sorted((a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if b > a)


@pytest.mark.parametrize("made", [rra_plan, waa_plan], ids=["rra", "waa"])
def test_a_stage_does_one_thing_at_a_time(made: Callable[[], PlanSpec]) -> None:
    simulated, labels = simulated_cycles(made())
    assert len(labels) == simulated.stages
    for stage in range(simulated.stages):
        for (_, end), (start, _) in itertools.pairwise(spans(simulated, stage)):
            assert start >= end - 1e-12
        assert 0 < simulated.busy_share[stage] <= 1 + 1e-9


def test_in_turns_every_stage_does_the_work_of_two_cycles() -> None:
    """6 newcomers of 200 tokens a turn where a full micro-batch has 2 of 300; 4 steps, 2 groups."""
    plan = rra_plan()
    simulated, _ = simulated_cycles(plan)
    for index, stage in enumerate(plan.stages):
        newcomers_s = 6 * 200 / (2 * 300) * stage.prefill_s
        assert busy_s(simulated, index, "prefill") == pytest.approx(CYCLES_SHOWN * newcomers_s)
        assert busy_s(simulated, index, "decode") == pytest.approx(
            CYCLES_SHOWN * 2 * 4 * stage.decode_s
        )


def test_on_one_stage_a_cycle_is_the_sum_of_its_work() -> None:
    plan = rra_plan()
    stage = replace(plan.stages[0], prefill_comm_s=0.0, decode_comm_s=0.0)
    simulated, _ = simulated_cycles(replace(plan, stages=(stage,)))
    work_s = 2 * stage.prefill_s + 2 * 4 * stage.decode_s
    assert simulated.latency_s == pytest.approx(CYCLES_SHOWN * work_s)
    assert simulated.busy_share == pytest.approx((1.0,))


def test_apart_turns_come_at_the_rate_of_the_forecast() -> None:
    plan = waa_plan()
    assert plan.latency is not None
    assert plan.prefill_plan is not None
    simulated, _ = simulated_cycles(plan)
    turn_s = 4 / plan.latency.requests_per_s
    assert simulated.latency_s == pytest.approx(TURNS_SHOWN * turn_s)
    begun = [start for start, _ in spans(simulated, 0)][::2]  # two micro-batches a turn
    assert np.diff(begun) == pytest.approx(turn_s)
    newcomers_s = 4 * 200 / (2 * 300) * plan.prefill_plan.stages[0].prefill_s
    assert busy_s(simulated, 0, "prefill") == pytest.approx(TURNS_SHOWN * newcomers_s)
    assert busy_s(simulated, 0, "decode") == 0
    slowest = max(stage.decode_s for stage in plan.stages)
    steps = [s for s in spans(simulated, 1)]
    assert len(steps) * slowest == pytest.approx(simulated.latency_s, rel=0.05), "never idle long"


def test_other_plans_have_no_cycles() -> None:
    with pytest.raises(SpecError, match="a plan of policy static has no cycles"):
        simulated_cycles(small_plan())

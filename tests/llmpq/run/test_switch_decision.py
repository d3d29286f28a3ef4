"""A switch of plans is made where it saves time, in the cheaper of two ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq import Cluster, Workload
from llmpq.run.switching import Outlook, RunLengths, best_switch, is_same, seconds_per_row
from planner.cluster.device import Slowdown
from planner.plan.spec import PlanSpec

LENGTHS = RunLengths(prompt=128, output=64, longest=64, so_far=32)


def planned(slots: int) -> PlanSpec:
    cluster = Cluster.from_counts(["T4"], [2])
    return cluster.plan("opt-6.7b", Workload(slots, 128, 64), bits=[8]).spec


@pytest.fixture(scope="module")
def small() -> PlanSpec:
    return planned(8)


@pytest.fixture(scope="module")
def large() -> PlanSpec:
    return planned(32)


def outlook(rows_left: int, lengths: RunLengths = LENGTHS, start_s: float = 60.0) -> Outlook:
    return Outlook(rows_left, 0, lengths, 100.0, start_s)


def test_seconds_of_a_row_are_those_of_a_simulated_batch(small: PlanSpec, large: PlanSpec) -> None:
    """One batch of the plan's own lengths, whose ends weigh a little more."""
    for plan in (small, large):
        row_s = plan.predicted.latency_s / plan.workload.global_batch
        assert seconds_per_row(plan, LENGTHS, {}) == pytest.approx(row_s, rel=0.12)


def test_a_switch_is_worth_it_only_while_enough_is_left(small: PlanSpec, large: PlanSpec) -> None:
    share = 1 - seconds_per_row(large, LENGTHS, {}) / seconds_per_row(small, LENGTHS, {})
    assert share > 0.3, "or the plans are no example"
    assert best_switch(small, large, outlook(5000)).is_worth_it
    assert not best_switch(small, large, outlook(10)).is_worth_it
    assert not best_switch(large, small, outlook(5000)).is_worth_it
    assert not best_switch(small, large, outlook(5000, start_s=1e5)).is_worth_it
    switch = best_switch(small, large, outlook(1000))
    assert switch.saved_s == pytest.approx(1000 * 0.64 * share, rel=0.01)
    few = best_switch(small, large, outlook(20))
    assert few.saved_s < 24 * 0.64 * share, "they do not fill the larger plan's slots"


def test_rows_with_a_long_way_to_go_are_replayed_and_others_finish(
    small: PlanSpec, large: PlanSpec
) -> None:
    """Prefill takes the same prompts and tokens again; what drains keeps a slot each idle."""
    long_tail = replace(LENGTHS, longest=5000)
    assert best_switch(small, large, outlook(5000, long_tail)).how == "replay"
    nearly_done = RunLengths(prompt=4000, output=4, longest=4, so_far=3.9)
    assert best_switch(small, large, outlook(5000, nearly_done)).how == "drain"
    waiting = replace(outlook(5000, nearly_done), waiting=5000)
    assert best_switch(small, large, waiting).how == "replay", "they gain nothing where they wait"


def test_a_stage_that_is_slow_in_the_old_plan_counts_there(small: PlanSpec) -> None:
    slow = {stage.device: Slowdown(2.0, 3.0) for stage in small.stages[:1]}
    before, after = (seconds_per_row(small, LENGTHS, each) for each in ({}, slow))
    assert 2 * before < after < 3.01 * before


def test_plans_that_run_the_same_are_the_same(small: PlanSpec, large: PlanSpec) -> None:
    assert is_same(small, replace(small, predicted=large.predicted, origin=None))
    assert not is_same(small, large)
    moved = replace(small.stages[0], bitwidths=(4,) * len(small.stages[0].bitwidths))
    assert not is_same(small, replace(small, stages=(moved, *small.stages[1:])))

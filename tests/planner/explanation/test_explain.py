"""Explanations of plans: figures against plain loops, answers against trying all plans."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.layer_units import grouped
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.explanation.explain import explain, layer_reasons, stage_limits
from planner.explanation.planned_assignment import PlannedAssignment, planned_assignment
from planner.explanation.what_if import Question, WhatIfOptions, ask
from planner.model.finding import model_shape
from planner.optimiser.assignment import evaluate
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.plan.builder import build_plan
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.search.candidate_search import search
from planner.workload import Workload
from quant.common.errors import PlanMismatchError
from tests.planner.problems import brute_force

# OPT-125M (12 layers) on two nodes whose memory allows most layers only few bits.
CLUSTER = {
    "name": "tight",
    "nodes": [
        {"name": "a", "accelerators": {"T4": 1}, "usable_memory_gib": 0.76},
        {"name": "b", "accelerators": {"V100": 1}, "usable_memory_gib": 0.75},
    ],
    "network": {"internode_gbit_per_s": 10},
}
OPTIONS = PlanOptions(
    theta=1.0,
    bits=(4, 16),
    group=2,
    prefill_micro_batch=2,
    decode_micro_batch=4,
    head="last",
    keep_all_devices=True,
)
WORKLOAD = Workload(8, 64, 16)


def costs_of(options: PlanOptions = OPTIONS, uneven: bool = False) -> CostModel:
    shape = model_shape("opt-125m")
    sensitivity = default_sensitivity(shape, options.bits)
    if uneven:
        factors = np.random.default_rng(3).uniform(0.2, 2.0, shape.layers)
        sensitivity = sensitivity * factors[:, np.newaxis]
    cluster = ClusterSpec.from_dict(CLUSTER)
    latency = RooflineLatency(shape)
    theta = options.theta or 0.0
    return CostModel(cluster, shape, WORKLOAD, options, latency, sensitivity, theta)


@cache
def planned(uneven: bool = False, group: int = 2) -> tuple[PlanSpec, CostModel, PlannedAssignment]:
    costs = costs_of(replace(OPTIONS, group=group), uneven)
    plan = build_plan(costs, "opt-125m", search(costs), "default", ())
    return plan, costs, planned_assignment(plan, costs)


def priced(
    problem: AssignmentProblem, stage_of: list[int], bits: list[int]
) -> tuple[float, float, float, list[float]]:
    """Latency, decode round, sum of omega and bytes left on each stage, by plain loops."""
    prefill, decode = list(problem.fixed_prefill_s), list(problem.fixed_decode_s)
    left, omega = list(problem.memory_bytes), 0.0
    for layer, (stage, bit) in enumerate(zip(stage_of, bits, strict=True)):
        prefill[stage] += problem.prefill_s[stage, bit]
        decode[stage] += problem.decode_s[stage, bit]
        left[stage] -= problem.layer_bytes[stage, bit]
        omega += problem.sensitivity[layer, bit]
    sent, back = list(problem.prefill_comm_s), list(problem.decode_comm_s)
    around = sum(decode) + sum(back)
    round_s = max(problem.decode_micro_batches * max(decode + back), around)
    latency = (problem.prefill_micro_batches - 1) * max(prefill + sent) + sum(prefill) + sum(sent)
    return latency + (problem.new_tokens - 1) * round_s, round_s, omega, left


def spread(first_layer: tuple[int, ...] | list[int]) -> list[int]:
    return [j for j in range(len(first_layer) - 1) for _ in range(*first_layer[j : j + 2])]


def test_the_plan_is_tight_and_mixed() -> None:
    """What the other tests rely on: two stages, both bitwidths, groups that do not fit."""
    plan, _, found = planned()
    assert len(plan.stages) == 2
    assert set(found.bitwidth) == {0, 1}
    short = [a for reason in layer_reasons(found) for a in reason.alternatives if not a.effect.fits]
    assert short


@pytest.mark.parametrize("uneven", [False, True])
def test_effects_of_other_bits_by_plain_loops(uneven: bool) -> None:
    _, _, found = planned(uneven)
    problem, stage_of, bits = found.problem, spread(found.first_layer), list(found.bitwidth)
    latency, round_s, omega, left = priced(problem, stage_of, bits)
    reasons = layer_reasons(found)
    assert [layer for reason in reasons for layer in reason.layers] == list(range(12))
    for unit, reason in enumerate(reasons):
        assert reason.stage == stage_of[unit]
        assert reason.spare_bytes == pytest.approx(left[reason.stage])
        assert len(reason.alternatives) == 1
        for other in reason.alternatives:
            changed = [*bits]
            changed[unit] = problem.bitwidths.index(other.bits)
            then = priced(problem, stage_of, changed)
            assert other.effect.latency_s == pytest.approx(then[0] - latency, abs=1e-12)
            assert other.effect.decode_round_s == pytest.approx(then[1] - round_s, abs=1e-12)
            assert other.effect.quality_s == pytest.approx(then[2] - omega, abs=1e-12)
            assert other.effect.short_bytes == pytest.approx(max(0.0, -min(then[3])))
            assert other.extra_bytes == pytest.approx(left[reason.stage] - then[3][reason.stage])


def any_assignment(seed: int) -> PlannedAssignment:
    """Not a good one: random boundary and bits that fit, of layers that differ."""
    _, _, found = planned(uneven=True)
    rng = np.random.default_rng(seed)
    while True:
        cut = int(rng.integers(1, found.problem.layers))
        bits = tuple(rng.integers(0, 2, found.problem.layers).tolist())
        if math.isfinite(evaluate(found.problem, (0, cut, found.problem.layers), bits)):
            return replace(found, first_layer=(0, cut, found.problem.layers), bitwidth=bits)


def test_room_is_the_best_single_change() -> None:
    """All plans that raise the layer and differ in one more place: one bitwidth or one boundary."""
    tried = 0
    for found in (planned()[2], *map(any_assignment, range(25))):
        for unit, reason in enumerate(layer_reasons(found)):
            for other in reason.alternatives:
                if other.effect.fits:
                    assert other.room is None
                    continue
                best = best_with_one_change(found, unit, found.problem.bitwidths.index(other.bits))
                if math.isinf(best):
                    assert other.room is None
                    continue
                tried += 1
                before = evaluate(found.problem, found.first_layer, found.bitwidth)
                assert other.room is not None
                assert other.room.effect.objective_s == pytest.approx(best - before, abs=1e-12)
    assert tried > 20


def best_with_one_change(found: PlannedAssignment, unit: int, choice: int) -> float:
    """The least objective with `unit` at `choice` and one other change that touches its stage."""
    problem, stage, cut = found.problem, found.stage_of(unit), found.first_layer[1]
    raised = [*found.bitwidth]
    raised[unit] = choice
    options = []
    for each, bits in itertools.product(range(problem.layers), range(2)):
        if found.stage_of(each) != stage:
            continue
        changed = [*raised]
        changed[each] = bits
        if each != unit:
            options.append((cut, changed))
        if each == (cut - 1 if stage == 0 else cut) and (each != unit or bits == choice):
            options.append((each if stage == 0 else each + 1, changed))
    plans = [((0, bound, problem.layers), changed) for bound, changed in options]
    return min((evaluate(problem, *plan) for plan in plans), default=math.inf)


def test_exchange_finds_the_best_partner() -> None:
    _, _, found = planned(uneven=True, group=1)
    problem, bits = found.problem, list(found.bitwidth)
    quality = priced(problem, spread(found.first_layer), bits)[2]
    for unit, reason in enumerate(layer_reasons(found)):
        changes = []
        for other in range(problem.layers):
            if found.stage_of(other) == reason.stage and bits[other] != bits[unit]:
                swapped = [*bits]
                swapped[unit], swapped[other] = bits[other], bits[unit]
                changes.append(priced(problem, spread(found.first_layer), swapped)[2] - quality)
        if changes:
            assert reason.exchange is not None
            assert reason.exchange.quality_s == pytest.approx(min(changes), abs=1e-12)
        else:
            assert reason.exchange is None


def test_headroom_and_prices_in_closed_form() -> None:
    _, _, found = planned()
    problem, limits = found.problem, stage_limits(found)
    prefill, decode = found.times.prefill_s, found.times.decode_s
    assert problem.prefill_comm_s.max() < prefill.max()
    assert problem.decode_comm_s.max() < decode.max()
    micro, rounds = problem.prefill_micro_batches, problem.new_tokens - 1
    sums = problem.decode_micro_batches * decode.max() < (decode + problem.decode_comm_s).sum()
    for limit in limits:
        stage = limit.stage
        slowest = bool(prefill[stage] == prefill.max())
        assert limit.prefill.spare == pytest.approx(prefill.max() - prefill[stage])
        assert limit.prefill_price == pytest.approx(micro if slowest else 1, rel=1e-6)
        busiest = problem.decode_micro_batches if decode[stage] == decode.max() else 0
        assert limit.decode_price == pytest.approx(rounds * (1 if sums else busiest), rel=1e-6)
        used = found.times.bytes[stage]
        assert limit.memory.spare == pytest.approx(problem.memory_bytes[stage] - used)


def test_memory_binds_exactly_where_no_larger_bitwidth_or_further_layer_fits() -> None:
    _, _, found = planned()
    problem, bits = found.problem, list(found.bitwidth)
    _, _, _, left = priced(problem, spread(found.first_layer), bits)
    for limit in stage_limits(found):
        row = problem.layer_bytes[limit.stage]
        mine = [b for b, j in zip(bits, spread(found.first_layer), strict=True) if j == limit.stage]
        steps = [row[0]] + [row[1] - row[0] for b in mine if b == 0]
        assert ("memory" in limit.binds) == (left[limit.stage] < min(steps))


@pytest.mark.parametrize("uneven", [False, True])
def test_answers_are_the_best_of_all_plans(uneven: bool) -> None:
    """Memory, links and theta changed by hand, then every plan of the changed problem tried."""
    _, costs, found = planned(uneven)
    options = WhatIfOptions(extra_bytes=30 * 2**20, theta_factors=(2.0, 0.5, 0.0, 50.0))
    answers = ask(found, options)
    assert not answers.left_out
    kinds = [answer.question.kind for answer in answers.given]
    assert kinds == ["memory", "memory", "links", *["theta"] * 4]
    for answer in answers.given:
        changed = problem_under(answer.question, found)
        best = brute_force(changed)
        reached = answer.latency_s + answer.theta * answer.sensitivity
        assert answer.proven
        assert reached == pytest.approx(best, rel=2 * costs.options.relative_gap)
        assert answer.latency_change_s == pytest.approx(answer.latency_s - found.times.latency_s)


def problem_under(question: Question, found: PlannedAssignment) -> AssignmentProblem:
    """The plan's problem with the arrays that the question changes."""
    problem, shape, workload = found.problem, found.costs.shape, found.costs.workload
    if question.kind == "theta":
        return replace(problem, theta=question.amount)
    if question.kind == "memory":
        more = np.array(problem.memory_bytes)
        assert question.stage is not None
        # What the allocator takes of it, and what is left free.
        slack = (0.02 + found.costs.options.memory_margin) * question.amount
        more[question.stage] += question.amount - round(slack)
        return replace(problem, memory_bytes=more)
    assert question.kind == "links"
    width = 2 * shape.hidden_size / 1.25e9  # seconds a token at 10 Gbit/s, 16 bit
    sizes = found.sizes
    onward = np.array([1.0, 0.0])
    prefill = problem.prefill_comm_s - onward * width * sizes.prefill * workload.prompt_length / 2
    decode = problem.decode_comm_s - onward * width * sizes.decode / 2
    ids = np.array([0.0, 1.0]) * 4 / 1.25e9 / 2
    return replace(
        problem,
        prefill_comm_s=prefill - ids * sizes.prefill,
        decode_comm_s=decode - ids * sizes.decode,
    )


def test_no_time_leaves_questions_out() -> None:
    ticks = itertools.count()
    options = WhatIfOptions(budget_s=1.5, clock=lambda: float(next(ticks)))
    answers = ask(planned()[2], options)
    assert len(answers.given) == 1
    assert answers.given[0].question.kind == "memory"
    assert [each.kind for each in answers.left_out][:2] == ["memory", "links"]


def test_a_heuristic_plan_is_held_against_the_default_method() -> None:
    costs = costs_of(replace(OPTIONS, method="uniform"))
    plan = build_plan(costs, "opt-125m", search(costs), "default", ())
    explanation = explain(plan, costs, WhatIfOptions(theta_factors=()))
    first = explanation.answers.given[0]
    assert first.question.kind == "same"
    problem = planned_assignment(plan, costs).problem
    reached = first.latency_s + first.theta * first.sensitivity
    assert reached == pytest.approx(brute_force(problem), rel=1e-3)
    assert first.objective_change_s <= 0


def test_the_simulated_batch_is_the_plans() -> None:
    plan, costs, _ = planned()
    explanation = explain(plan, costs, WhatIfOptions(budget_s=0.0))
    assert explanation.simulated.latency_s == pytest.approx(plan.predicted.latency_s, rel=1e-12)
    assert explanation.answers.given == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": Workload(8, 65, 16)}, "workload"),
        ({"shape": model_shape("opt-1.3b")}, "model"),
        ({"options": replace(OPTIONS, bits=(4, 8))}, "bitwidths"),
        ({"cluster": ClusterSpec.from_counts(["T4"], [2])}, "cluster"),
    ],
)
def test_another_cost_model_is_refused(change: dict[str, object], message: str) -> None:
    plan, costs, _ = planned()
    with pytest.raises(PlanMismatchError, match=f"the plan's {message} "):
        planned_assignment(plan, replace(costs, **change))  # type: ignore[arg-type]


def test_grouped_and_single_layers_agree_on_the_problem() -> None:
    """A unit is `group` layers: the same boundaries as the plan's."""
    plan, costs, found = planned()
    assert [found.group * bound for bound in found.first_layer[:-1]] == [
        stage.layers.start for stage in plan.stages
    ]
    problem = grouped(costs.problem(found.devices, found.sizes), 2)
    assert np.array_equal(problem.layer_bytes, found.problem.layer_bytes)

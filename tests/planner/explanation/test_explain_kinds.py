"""Explanations where layers are of several kinds and experts lie apart: every change they tell is
applied to the plan and evaluated, and every single change they might tell is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from llmpq.report.formatting import layer_runs
from llmpq.report.reasons import layer_sentences, reason_groups
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.explanation.explain import layer_reasons, stage_limits
from planner.explanation.planned_assignment import PlannedAssignment
from planner.explanation.what_if import WhatIfOptions, ask
from planner.optimiser.assignment import evaluate
from planner.optimiser.feasibility import explain_infeasible
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.search.request import cost_model
from planner.workload import MicroBatches, Workload
from tests.planner.kinds import DELTA, EXPERT, FULL, three_kinds

CLUSTER = ClusterSpec.from_dict(
    {
        "name": "hosts",
        "nodes": [
            {"name": "a", "accelerators": {"T4": 1}, "host_memory_gib": 6, "host_threads": 12},
            {"name": "b", "accelerators": {"V100-32GB": 1}},
        ],
        "network": {"internode_gbit_per_s": 10},
    }
)
SHAPE = three_kinds((EXPERT, FULL, DELTA, EXPERT, FULL, EXPERT), joined=(4,))


@cache
def costs() -> CostModel:
    bits = (4, 8)
    options = PlanOptions(bits=bits, memory_margin=0.0, relative_gap=0.0)
    factors = np.random.default_rng(5).uniform(0.5, 2.0, (SHAPE.layers, 1))
    omega = default_sensitivity(SHAPE, bits) * factors
    made = cost_model(CLUSTER, SHAPE, Workload(4, 128, 32), options, omega)
    return replace(made, experts_apart=True, hosting=True, theta=0.3)


@cache
def whole_problem() -> AssignmentProblem:
    return costs().grouped_problem(CLUSTER.devices, MicroBatches(2, 4))


def tight(seed: int) -> PlannedAssignment:
    """A random assignment that fits, in memories that are then cut to little more than it takes."""
    rng, problem = np.random.default_rng(seed), whole_problem()
    while True:
        cut = int(rng.choice(problem.open_boundaries[1:-1]))
        choices = tuple(rng.integers(0, len(problem.bitwidths), problem.layers).tolist())
        bounds = (0, cut, problem.layers)
        if math.isfinite(evaluate(problem, bounds, choices)):
            break
    sizes, devices = MicroBatches(2, 4), CLUSTER.devices
    found = PlannedAssignment(costs(), devices, sizes, problem, bounds, choices)
    spare = rng.choice([0.0, 0.3, 2.0], 2) * problem.layer_bytes.max()
    host = found.times.host_bytes + rng.uniform(0.0, 1.0) * problem.host_bytes.max()
    cut_problem = replace(
        problem,
        memory_bytes=found.times.bytes + spare,
        host_memory_bytes=np.minimum(host, problem.host_memory_bytes),
    )
    return replace(found, problem=cut_problem)


def moved_and_lowered(found: PlannedAssignment, unit: int, choice: int) -> float:
    """The least objective with `unit` at `choice` and one other change on its stage, tried one by
    one: another unit at any choice, or the units up to the next boundary that may be, moved.
    """
    problem, (_, cut, end) = found.problem, found.first_layer
    stage, raised = found.stage_of(unit), list(found.bitwidth)
    raised[unit] = choice
    width = range(len(problem.bitwidths))
    tried = []
    for other in range(problem.layers):
        if found.stage_of(other) == stage and other != unit:
            tried += [
                ((0, cut, end), [*raised[:other], each, *raised[other + 1 :]]) for each in width
            ]
    borders = problem.open_boundaries.tolist()
    to = borders[borders.index(cut) + (1 if stage == 1 else -1)]
    run = range(min(cut, to), max(cut, to))
    if 0 < to < end:
        experts = [found.part(each) == "experts" for each in run]
        for rest, own in itertools.product(width, width):
            bits = [own if is_experts else rest for is_experts in experts]
            if unit not in run or bits[run.index(unit)] == choice:
                tried.append(((0, to, end), [*raised[: run.start], *bits, *raised[run.stop :]]))
    return min((evaluate(problem, *each) for each in tried), default=math.inf)


def test_alternatives_and_rooms_by_direct_evaluation() -> None:
    roomy, hosted, moved = 0, 0, 0
    for found in map(tight, range(24)):
        problem, reasons = found.problem, layer_reasons(found)
        before = evaluate(problem, found.first_layer, found.bitwidth)
        assert len(reasons) == problem.layers
        for unit, reason in enumerate(reasons):
            kind = problem.kind_of_layer[unit] * len(problem.bitwidths)
            able = problem.available[reason.stage, kind:][: len(problem.bitwidths)]
            assert len(reason.alternatives) == able.sum() - 1
            assert reason.part == "experts" or not reason.on_host
            for other in reason.alternatives:
                choice = found.costs.placing.unit_choices.index((other.bits, other.on_host))
                changed = list(found.bitwidth)
                changed[unit] = choice
                after = evaluate(problem, found.first_layer, changed)
                assert other.effect.fits == math.isfinite(after)
                hosted += other.on_host
                if other.effect.fits:
                    assert other.effect.objective_s == pytest.approx(after - before, abs=1e-9)
                    assert other.room is None
                    continue
                best = moved_and_lowered(found, unit, choice)
                assert (other.room is None) == math.isinf(best)
                if other.room is not None:
                    roomy += 1
                    moved += other.room.to_stage != reason.stage
                    told = other.room.effect.objective_s
                    assert told == pytest.approx(best - before, abs=1e-9)
    assert min(roomy, hosted, 2 * moved) > 5


def test_exchanges_stay_within_a_kind_and_limits_count_runs() -> None:
    for found in map(tight, range(12)):
        problem = found.problem
        for reason in layer_reasons(found):
            if reason.exchange is not None:
                assert reason.exchange.part == reason.part
                assert reason.exchange.bits != reason.bits
        for limit in stage_limits(found):
            spare = problem.memory_bytes[limit.stage] - found.times.bytes[limit.stage]
            assert limit.memory.spare == pytest.approx(spare)
            steps = []
            cells = problem.layer_bytes[limit.stage].reshape(problem.kinds, -1)
            usable = problem.available[limit.stage].reshape(problem.kinds, -1)
            each = np.where(usable, cells, np.inf).min(axis=1)
            for start, stop in itertools.pairwise(problem.open_boundaries.tolist()):
                steps.append(sum(each[problem.kind_of_layer[unit]] for unit in range(start, stop)))
            for unit in range(*found.first_layer[limit.stage :][:2]):
                own, row = found.bitwidth[unit], cells[problem.kind_of_layer[unit]]
                bits, on_host = found.costs.placing.unit_choices[own]
                for choice, (more, host) in enumerate(found.costs.placing.unit_choices):
                    better = more > bits or (more == bits and on_host and not host)
                    if better and usable[problem.kind_of_layer[unit], choice]:
                        steps.append(row[choice] - row[own])
            assert limit.memory.least_step == pytest.approx(min(s for s in steps if s > 0))


def test_words_tell_parts_and_places() -> None:
    found = tight(0)
    reasons = layer_reasons(found)
    text = " ".join(layer_sentences(reasons, ["T4", "V100"], 1e-9))
    for words in ("Experts of layer 0: ", "Layer 0 without its experts: ", "bit on the host "):
        assert words in text
    titles = [group.title for group in reason_groups(reasons, 1e-9)]
    assert any(title.startswith("experts of ") for title in titles)
    assert any("without experts" in title for title in titles)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([7], "layers 7"),
        ([*range(11), 17], "layers 0–10, 17"),
        (range(3, 48, 4), "layers 3, 7, 11, … 47"),
        ([0, *(i for i in range(4, 24) if i % 4), 30], "layers 0, 5–7, 9–11, 13–15, … 21–23, 30"),
        ([1, 5, 9, 13], "layers 1, 5, 9, 13"),
    ],
)
def test_layers_at_equal_distances_are_named_shortly(layers: Sequence[int], words: str) -> None:
    assert layer_runs(layers) == words


def test_changed_plans_count_layers_once() -> None:
    found = tight(1)
    answers = ask(found, WhatIfOptions(theta_factors=(100.0,), solve_s=2.0)).given
    assert answers
    assert found.layers_of(range(found.problem.layers)) == SHAPE.layers
    for answer in answers:
        counts = (
            answer.layers_moved,
            answer.layers_with_other_bits,
            answer.layers_with_experts_elsewhere,
        )
        assert max(counts) <= SHAPE.layers


def test_what_does_not_fit_counts_layers() -> None:
    """Room for the first two layers, which are three units, and for no more than the last one."""
    units, problem = costs().placing.units, whole_problem()
    least = np.where(problem.available, problem.layer_bytes, np.inf)
    on_device = [not host for _, host in costs().placing.unit_choices]
    by_unit = problem.by_layer(least)[:, :, on_device].min(axis=2)
    limits = np.array([by_unit[0, :3].sum(), by_unit[1, -2:].sum()])
    short = replace(problem, memory_bytes=limits, host_memory_bytes=np.zeros(2))
    message = explain_infeasible(short, ["T4", "V100"], units.layer_of_unit)
    assert problem.layers == 9
    assert message.startswith("only 3 of 6 layers fit")

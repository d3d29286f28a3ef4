"""The integer programme as LLM-PQ publishes it (eq. 4-16), to hold the planner against.

Binary variables z (layer, device, bitwidth), y (layer, bitwidth) and u (layer, device), with one
contiguity constraint for every layer and pair of devices. Eq. 16 is read with k > j, since as
printed it forbids two layers on one device. The objective `pipeline` needs one more row for the
trip round all stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pulp

from planner.optimiser.milp.objective import linear_latency, objective_scale
from planner.optimiser.milp.relaxation import OBJECTIVE_UNITS, memory_row
from planner.optimiser.problem import AssignmentProblem, evaluate


@dataclass(frozen=True)
class PublishedOutcome:
    """What HiGHS made of the programme: `objective` by `evaluate`, infinite without a point."""

    objective: float
    bound: float
    finished: bool
    wall_s: float
    cpu_s: float
    variables: int
    constraints: int


def solve_published(
    problem: AssignmentProblem, time_limit_s: float | None, relative_gap: float
) -> PublishedOutcome:
    """Solve the published programme with HiGHS on one thread."""
    started, cpu = time.perf_counter(), time.process_time()
    programme, placed = build_published(problem)
    programme.solve(pulp.HiGHS(msg=False, gapRel=relative_gap, timeLimit=time_limit_s, threads=1))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    scale_s = objective_scale(problem) / OBJECTIVE_UNITS
    objective = np.inf
    if programme.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        objective = _objective(problem, placed)
    return PublishedOutcome(
        objective=objective,
        bound=float(programme.solverModel.getInfo().mip_dual_bound) * scale_s,
        finished=programme.sol_status == pulp.LpSolutionOptimal,
        wall_s=wall_s,
        cpu_s=cpu_s,
        variables=programme.numVariables(),
        constraints=programme.numConstraints(),
    )


Placed = dict[tuple[int, int, int], pulp.LpVariable]


def build_published(problem: AssignmentProblem) -> tuple[pulp.LpProblem, Placed]:
    """The programme and its z variables by layer, stage and bitwidth."""
    stages, choices = problem.prefill_s.shape
    programme = pulp.LpProblem("published", pulp.LpMinimize)
    layers, bits = range(problem.layers), range(choices)

    def binary(name: str) -> pulp.LpVariable:
        return programme.add_variable(name, cat=pulp.LpBinary)

    placed = {
        (i, j, b): binary(f"z_{i}_{j}_{b}") for i in layers for j in range(stages) for b in bits
    }
    chosen = {(i, b): binary(f"y_{i}_{b}") for i in layers for b in bits}
    lies = {(i, j): binary(f"u_{i}_{j}") for i in layers for j in range(stages)}
    for i in layers:
        here = [placed[i, j, b] for j in range(stages) for b in bits]
        programme.addConstraint(pulp.lpSum(here) == 1)  # eq. 9
        for b in bits:  # eq. 10
            of_bits = pulp.lpSum(placed[i, j, b] for j in range(stages))
            programme.addConstraint(of_bits == chosen[i, b])
        for j in range(stages):  # eq. 11
            on_stage = pulp.lpSum(placed[i, j, b] for b in bits)
            programme.addConstraint(on_stage == lies[i, j])
    _add_memory(programme, problem, placed)
    programme.addConstraint(lies[0, 0] == 1)  # eq. 15
    programme.addConstraint(lies[problem.layers - 1, stages - 1] == 1)
    for i in range(1, problem.layers):  # eq. 16
        for j in range(stages - 1):
            for k in range(j + 1, stages):
                programme.addConstraint(lies[i, j] + lies[i - 1, k] <= 1)
    _add_objective(programme, problem, placed)
    return programme, placed


def _add_memory(programme: pulp.LpProblem, problem: AssignmentProblem, placed: Placed) -> None:
    """Eq. 12-13, scaled; a bitwidth that a device lacks is never placed there."""
    for stage in range(problem.stages):
        each, limit = memory_row(problem, stage)
        terms = [float(each[b]) * variable for (_, j, b), variable in placed.items() if j == stage]
        programme.addConstraint(pulp.lpSum(terms) <= limit)
    for (_, stage, choice), variable in placed.items():
        if not problem.available[stage, choice]:
            programme.addConstraint(variable == 0)


def _add_objective(programme: pulp.LpProblem, problem: AssignmentProblem, placed: Placed) -> None:
    """Eq. 4-8, in units of the objective's size."""
    latency = linear_latency(problem)
    scale_s = objective_scale(problem) / OBJECTIVE_UNITS
    constant = latency.constant_s / scale_s
    cost = problem.theta * problem.sensitivity
    terms = [
        float((latency.per_layer_s[j, b] + cost[i, b]) / scale_s) * variable
        for (i, j, b), variable in placed.items()
    ]
    for index, bottleneck in enumerate(latency.bottlenecks):
        factor = bottleneck.weight / scale_s
        slowest = programme.add_variable(f"slowest_{index}", 0)
        terms.append(slowest)
        for row_s, start_s in zip(bottleneck.row_s, bottleneck.start_s, strict=True):
            form = [
                float(factor * row_s[j, b]) * variable
                for (_, j, b), variable in placed.items()
                if row_s[j, b]
            ]
            programme.addConstraint(slowest >= pulp.lpSum(form) + factor * float(start_s))
    fixed = programme.add_variable("constant", constant, constant)
    programme.setObjective(pulp.lpSum(terms) + fixed)


def _objective(problem: AssignmentProblem, placed: Placed) -> float:
    """The point's objective by `evaluate`."""
    stage_of, bit_of = np.zeros(problem.layers, int), np.zeros(problem.layers, int)
    for (layer, stage, choice), variable in placed.items():
        if variable.value() > 0.5:
            stage_of[layer], bit_of[layer] = stage, choice
    first_layer = np.searchsorted(stage_of, np.arange(problem.stages + 1))
    first_layer[-1] = problem.layers
    return evaluate(problem, first_layer.tolist(), bit_of.tolist())

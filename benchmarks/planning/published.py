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

from planner.optimiser.assignment import evaluate
from planner.optimiser.problem import (
    AssignmentProblem,
    FloatArray,
    latency_form,
    typical_objective_s,
)
from planner.optimiser.relaxation import OBJECTIVE_UNITS, memory_unit_bytes


@dataclass(frozen=True)
class PublishedOutcome:
    """HiGHS's result: `objective` by `evaluate`, infinite without a point."""

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
    scale_s = typical_objective_s(problem) / OBJECTIVE_UNITS
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
        each, memory = problem.layer_bytes[stage], problem.memory_bytes[stage]
        unit = memory_unit_bytes(each, memory)
        terms = [
            float(each[b] / unit) * variable for (_, j, b), variable in placed.items() if j == stage
        ]
        programme.addConstraint(pulp.lpSum(terms) <= float(memory / unit))
    for (_, stage, choice), variable in placed.items():
        if not problem.available[stage, choice]:
            programme.addConstraint(variable == 0)


def _add_objective(programme: pulp.LpProblem, problem: AssignmentProblem, placed: Placed) -> None:
    """Eq. 4-8, in units of the objective's size."""
    form, scale_s = latency_form(problem), typical_objective_s(problem) / OBJECTIVE_UNITS
    each_s = form.prefill_each * problem.prefill_s + form.decode_each * problem.decode_s
    cost = problem.theta * problem.sensitivity
    terms = [
        float((each_s[j, b] + cost[i, b]) / scale_s) * variable
        for (i, j, b), variable in placed.items()
    ]
    constant_s = form.constant_s + form.prefill_each * problem.fixed_prefill_s.sum()
    constant_s += form.decode_each * problem.fixed_decode_s.sum()
    terms.append(programme.add_variable("constant", constant_s / scale_s, constant_s / scale_s))
    prefill, decode = (programme.add_variable(f"slowest_{index}", 0) for index in range(2))

    def add_maximum(slowest: pulp.LpVariable, layer_s: FloatArray, rest_s: float) -> None:
        """Keep `slowest` above the seconds of all layers by `layer_s` [N, K] plus `rest_s`."""
        held = [
            float(layer_s[j, b] / scale_s) * variable
            for (_, j, b), variable in placed.items()
            if layer_s[j, b]
        ]
        programme.addConstraint(slowest >= pulp.lpSum(held) + float(rest_s / scale_s))

    for slowest, weight, layer_s, fixed_s, floor_s in (
        (
            prefill,
            form.prefill_max,
            problem.prefill_s,
            problem.fixed_prefill_s,
            form.prefill_floor_s,
        ),
        (decode, form.decode_max, problem.decode_s, problem.fixed_decode_s, form.decode_floor_s),
    ):
        terms.append(slowest)
        programme.addConstraint(slowest >= float(weight * floor_s / scale_s))
        for stage in range(problem.stages):
            own = (np.arange(problem.stages) == stage)[:, np.newaxis]
            add_maximum(slowest, weight * layer_s * own, weight * fixed_s[stage])
    if form.round_trips:
        trip_s = problem.fixed_decode_s.sum() + form.trip_s
        add_maximum(decode, form.round_trips * problem.decode_s, form.round_trips * trip_s)
    programme.setObjective(pulp.lpSum(terms))


def _objective(problem: AssignmentProblem, placed: Placed) -> float:
    """The point's objective by `evaluate`."""
    stage_of, bit_of = np.zeros(problem.layers, int), np.zeros(problem.layers, int)
    for (layer, stage, choice), variable in placed.items():
        if variable.value() > 0.5:
            stage_of[layer], bit_of[layer] = stage, choice
    first_layer = np.searchsorted(stage_of, np.arange(problem.stages + 1))
    first_layer[-1] = problem.layers
    return evaluate(problem, first_layer.tolist(), bit_of.tolist())

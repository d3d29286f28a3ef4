"""The PipeEdge baseline of LLM-PQ section 6.1: one bitwidth, partitioned for the prefill alone.

The bitwidth is lowered from the greatest until the layers fit. The partition minimises the slowest
stage or transfer of the prefill by dynamic programming over boundaries, as PipeEdge does for models
of a single phase.
"""

from __future__ import annotations

import math

import numpy as np

from planner.optimiser.assignment import Assignment, evaluate
from planner.optimiser.bit_assignment import Candidate
from planner.optimiser.capacity import require_feasible, whole_layers
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from planner.optimiser.relaxation.relax import relax
from planner.optimiser.solve_options import SolveOptions
from quant.common.errors import InfeasibleError


def solve_pipeedge(problem: AssignmentProblem, options: SolveOptions) -> Assignment:
    """The baseline's assignment, status "pipeedge", with the relaxation's bound.

    Raises InfeasibleError where no single bitwidth is run by all devices and fits.
    """
    start = options.clock()
    found = pipeedge_candidate(problem)
    bound = min(found.objective, relax(problem).bound)
    seconds = options.clock() - start
    return Assignment(
        found.first_layer, found.bitwidth, found.objective, bound, "pipeedge", seconds
    )


def pipeedge_candidate(problem: AssignmentProblem) -> Candidate:
    """The baseline's assignment without a bound, for searches that ask often."""
    for choice in reversed(range(len(problem.bitwidths))):
        most = _most_layers(problem, choice)
        if most is None:
            continue
        first_layer = _fastest_prefill(problem, choice, most)
        bits = (choice,) * problem.layers
        objective = evaluate(problem, first_layer, bits) if first_layer else math.inf
        if math.isfinite(objective):
            return Candidate(first_layer, bits, objective)
    require_feasible(problem)
    bits_text = ", ".join(map(str, problem.bitwidths))
    raise InfeasibleError(
        f"no one bitwidth of {bits_text} fits all {problem.layers} layers on the "
        f"{problem.stages} devices; mix bitwidths, or lower the batch"
    )


def _most_layers(problem: AssignmentProblem, choice: int) -> IntArray | None:
    """Count the layers of a bitwidth that fit each stage [N]; None where one cannot be empty."""
    if (problem.memory_bytes < 0).any():
        return None
    held = whole_layers(problem.layer_bytes[:, choice], problem.memory_bytes, problem.layers)
    return np.where(problem.available[:, choice], held, 0)


def _fastest_prefill(problem: AssignmentProblem, choice: int, most: IntArray) -> tuple[int, ...]:
    """Boundaries with the least slowest prefill stage; empty where nothing fits.

    `slowest[j, l]` is the least for the first j stages with l layers.
    """
    stages, layers = problem.stages, problem.layers
    slowest: FloatArray = np.full((stages + 1, layers + 1), np.inf)
    slowest[0, 0] = float(problem.prefill_comm_s.max())
    taken = np.zeros((stages + 1, layers + 1), dtype=np.int64)
    for stage in range(stages):
        least = 1 if stage in (0, stages - 1) else 0
        for size in range(least, int(most[stage]) + 1):
            own = problem.fixed_prefill_s[stage] + size * problem.prefill_s[stage, choice]
            found = np.maximum(slowest[stage, : layers + 1 - size], own)
            better = found < slowest[stage + 1, size:]
            slowest[stage + 1, size:][better] = found[better]
            taken[stage + 1, size:][better] = size
    if math.isinf(slowest[stages, layers]):
        return ()
    first_layer = [layers]
    for stage in range(stages, 0, -1):
        first_layer.append(first_layer[-1] - int(taken[stage, first_layer[-1]]))
    return tuple(reversed(first_layer))

"""The Uniform baseline of LLM-PQ section 6.1: one bitwidth for all layers, spread evenly.

The bitwidth is lowered from the greatest until the model fits.
"""

from __future__ import annotations

import math

import numpy as np

from planner.optimiser.assignment import Assignment, evaluate, stage_times
from planner.optimiser.bit_assignment import Candidate
from planner.optimiser.problem import AssignmentProblem, IntArray
from planner.optimiser.relaxation.relax import relax
from planner.optimiser.solve_options import SolveOptions
from quant.common.errors import InfeasibleError
from quant.common.units import GIB


def solve_uniform(problem: AssignmentProblem, options: SolveOptions) -> Assignment:
    """The baseline's assignment, status "uniform", with the relaxation's bound.

    Raises InfeasibleError where no single bitwidth is run by all devices and fits.
    """
    start = options.clock()
    found = uniform_candidate(problem)
    bound = min(found.objective, relax(problem).bound)
    seconds = options.clock() - start
    return Assignment(found.first_layer, found.bitwidth, found.objective, bound, "uniform", seconds)


def uniform_candidate(problem: AssignmentProblem) -> Candidate:
    """The baseline's assignment without a bound, for searches that ask often."""
    sizes = even_sizes(problem.layers, problem.stages)
    first_layer = (0, *np.cumsum(sizes).tolist())
    for choice in reversed(range(len(problem.bitwidths))):
        bitwidth = (choice,) * problem.layers
        objective = evaluate(problem, first_layer, bitwidth)
        if math.isfinite(objective):
            return Candidate(first_layer, bitwidth, objective)
    usable = problem.available[sizes > 0].all(axis=0)
    raise InfeasibleError(_explain(problem, sizes, first_layer, np.flatnonzero(usable)))


def even_sizes(layers: int, stages: int) -> IntArray:
    """Layers per stage [N] that differ by at most one; the ends come first where they differ."""
    sizes = np.full(stages, layers // stages, dtype=np.int64)
    by_turn = [0, *range(stages - 1, 0, -1)]
    sizes[by_turn[: layers % stages]] += 1
    return sizes


def _explain(
    problem: AssignmentProblem, sizes: IntArray, first_layer: tuple[int, ...], usable: IntArray
) -> str:
    """Say which stage is short at the smallest bitwidth that all devices run."""
    if problem.layers < min(problem.stages, 2):
        return f"{problem.layers} layer cannot fill {problem.stages} stages; use 1 device"
    if usable.size == 0:
        bits = ", ".join(map(str, problem.bitwidths))
        return f"no one bitwidth of {bits} runs on every device; allow another or mix bitwidths"
    smallest = int(usable[problem.layer_bytes[:, usable].sum(axis=0).argmin()])
    needed = stage_times(problem, first_layer, (smallest,) * problem.layers).bytes
    short = needed - problem.memory_bytes
    stage = int(short.argmax())
    return (
        f"{problem.bitwidths[smallest]} bit everywhere still needs {needed[stage] / GIB:.2f} GiB "
        f"for {sizes[stage]} layers on stage {stage}, which has "
        f"{problem.memory_bytes[stage] / GIB:.2f} GiB left, {short[stage] / GIB:.2f} GiB short; "
        "spread layers by memory, mix bitwidths, or lower the batch"
    )

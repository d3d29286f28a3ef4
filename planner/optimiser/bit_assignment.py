"""Which layers of a stage get which of its bitwidths, where only their counts are settled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.assignment import evaluate
from planner.optimiser.capacity import layer_capacity
from planner.optimiser.problem import AssignmentProblem, IntArray


@dataclass(frozen=True)
class Candidate:
    """An assignment without proof: boundaries [N+1], bitwidth indices [L], objective in seconds."""

    first_layer: tuple[int, ...]
    bitwidth: tuple[int, ...]
    objective: float


def assign_bits(problem: AssignmentProblem, counts: IntArray) -> Candidate:
    """The best assignment with exactly `counts` [N, K] layers per stage and bitwidth.

    Times and bytes are settled by the counts; inside each stage the bits go to its layers at the
    least sum of sensitivities, which is an assignment problem.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and not every command plans

    first_layer = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    bitwidth = np.zeros(problem.layers, dtype=np.int64)
    for stage, held in enumerate(counts):
        start, stop = first_layer[stage], first_layer[stage + 1]
        slots = np.repeat(np.arange(held.size), held)
        _, chosen = linear_sum_assignment(problem.sensitivity[start:stop, slots])
        bitwidth[start:stop] = slots[chosen]
    boundaries, bits = tuple(first_layer.tolist()), tuple(bitwidth.tolist())
    return Candidate(boundaries, bits, evaluate(problem, boundaries, bits))


def smallest_candidate(problem: AssignmentProblem) -> Candidate:
    """An assignment of a feasible problem: every layer as small as its device can run it.

    After a layer for each end, layers go one by one to the stage with room whose bottleneck is
    then the least.
    """
    usable = np.where(problem.available, problem.layer_bytes, np.inf)
    smallest = usable.argmin(axis=1)
    stage = np.arange(problem.stages)
    batches = np.array([problem.prefill_micro_batches, problem.decode_rounds])
    layer_s = batches @ np.stack(
        [problem.prefill_s[stage, smallest], problem.decode_s[stage, smallest]]
    )
    capacity = layer_capacity(problem)
    sizes = np.zeros(problem.stages, dtype=np.int64)
    sizes[[0, -1]] = 1
    while sizes.sum() < problem.layers:
        grown_s = np.where(sizes < capacity, (sizes + 1) * layer_s, np.inf)
        sizes[grown_s.argmin()] += 1
    counts = np.zeros_like(problem.available, dtype=np.int64)
    counts[stage, smallest] = sizes
    return assign_bits(problem, counts)

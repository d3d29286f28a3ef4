"""What fits where layers take memory of devices and of hosts.

A choice may take less of the one and more of the other, so a run has many smallest ways to lie
there: those that no other beats in both memories. They are found layer by layer, and are few, since
layers of a kind are alike.
"""

from __future__ import annotations

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray


def fullest_stages(
    problem: AssignmentProblem, layer_scale: float = 1.0
) -> tuple[IntArray, IntArray]:
    """The boundaries [N+1] if stages, first to last, hold as many layers as fit, where the last has
    one to hold, and choices [L] with which they do.
    """
    reached = np.zeros(problem.stages + 1, dtype=np.int64)
    bitwidth = np.zeros(problem.layers, dtype=np.int64)
    for stage in range(problem.stages):
        start, last = int(reached[stage]), problem.layers - (stage < problem.stages - 1)
        choices = _longest_run(problem, stage, (start, last), layer_scale)
        reached[stage + 1] = start + choices.size
        bitwidth[start : start + choices.size] = choices
    return reached, bitwidth


def _longest_run(
    problem: AssignmentProblem, stage: int, between: tuple[int, int], scale: float
) -> IntArray:
    """The choices of the longest run from a layer on that fits a stage."""
    limits = np.array([each.limit_bytes[stage] for each in problem.memories])
    ways = [_smallest_ways(problem, stage, kind) for kind in range(problem.kinds)]
    sums, steps, longest = np.zeros((1, limits.size)), list[tuple[IntArray, IntArray]](), 0
    open_ones = set(problem.open_boundaries.tolist())
    for layer in range(*between):
        choices, each = ways[problem.kind_of_layer[layer]]
        grown = (sums[:, np.newaxis] + scale * each).reshape(-1, limits.size)
        kept = _unbeaten(grown, np.flatnonzero((grown <= limits).all(axis=1)))
        if not kept.size:
            break
        sums = grown[kept]
        steps.append((kept // choices.size, choices[kept % choices.size]))
        longest = len(steps) if layer + 1 in open_ones else longest
    found, way = [], -1  # the last has the most on the device
    for before, choice in reversed(steps[:longest]):
        found.append(int(choice[way]))
        way = int(before[way])
    return np.array(found[::-1], dtype=np.int64)


def _smallest_ways(
    problem: AssignmentProblem, stage: int, kind: int
) -> tuple[IntArray, FloatArray]:
    """The choices of a layer that no other beats in both memories, and their bytes [P, 2]."""
    width = len(problem.bitwidths)
    cells = np.arange(kind * width, (kind + 1) * width)
    bytes_of = np.column_stack([each.layer_bytes[stage, cells] for each in problem.memories])
    kept = _unbeaten(bytes_of, np.flatnonzero(problem.available[stage, cells]))
    return kept, bytes_of[kept]


def _unbeaten(sums: FloatArray, rows: IntArray) -> IntArray:
    """Those of some `rows` of sums [M, 2] that no other is below in both, by rising first sum."""
    ordered = rows[np.lexsort(sums[rows].T[::-1])]
    second = sums[ordered, 1]
    below = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(ordered[second < below])

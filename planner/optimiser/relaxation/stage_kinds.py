"""Which stages of a problem cost the same, so that a relaxation can treat them together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem, IntArray


@dataclass(frozen=True, eq=False)
class StageKinds:
    """Stages of one kind cost the same; the first and the last, which need a layer, stand alone.

    `of_stage` [N] is each stage's kind, `example` [Q] a stage of each kind, `count` [Q] how many.
    Kinds are in an order that does not depend on that of the stages between the ends.
    """

    of_stage: IntArray
    example: IntArray
    count: IntArray


def stage_kinds(problem: AssignmentProblem) -> StageKinds:
    """Group the stages between the ends by their rows of the problem's arrays."""
    last = problem.stages - 1
    rows = _row_bytes(problem)
    middle = sorted(set(rows[1:last]))
    ends = 1 if last == 0 else 2
    place = {row: ends + index for index, row in enumerate(middle)}
    of_stage = np.array([place.get(row, 0) for row in rows], dtype=np.int64)
    of_stage[0], of_stage[last] = 0, ends - 1
    _, example, count = np.unique(of_stage, return_index=True, return_counts=True)
    return StageKinds(of_stage, example, count)


def each_stage_alone(problem: AssignmentProblem) -> StageKinds:
    """Make every stage a kind of its own, in stage order."""
    stages = np.arange(problem.stages)
    return StageKinds(stages, stages, np.ones_like(stages))


def _row_bytes(problem: AssignmentProblem) -> list[bytes]:
    """Join all that each stage's costs depend on; transfers enter through constants only."""
    columns = (
        problem.prefill_s,
        problem.decode_s,
        problem.layer_bytes,
        problem.available,
        problem.fixed_prefill_s[:, np.newaxis],
        problem.fixed_decode_s[:, np.newaxis],
        problem.memory_bytes[:, np.newaxis],
    )
    return [row.tobytes() for row in np.concatenate(columns, axis=1)]

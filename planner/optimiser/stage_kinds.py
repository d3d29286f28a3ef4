"""What a latency is made of, and which stages are alike.

Either objective (LLM-PQ eq. 4, or `pipeline`) is, with the slowest stage's seconds P and D of the
two phases and sums over stages of prefill and decode seconds Tp and Td,

    constant + prefill_max * max(P, prefill_floor) + sum Tp + decode_each * sum Td
      + max(decode_max * max(D, decode_floor), round_trips * (sum Td + trip))  + theta * omega
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem, IntArray


@dataclass(frozen=True)
class LatencyWeights:
    """The factors above; floors, constant and trip in seconds."""

    prefill_max: float
    decode_max: float
    decode_each: float
    round_trips: float
    constant_s: float
    trip_s: float
    prefill_floor_s: float
    decode_floor_s: float

    def seconds(
        self, slowest_prefill_s: float, slowest_decode_s: float, prefill_s: float, decode_s: float
    ) -> float:
        """The latency, of the slowest stages' seconds and of the sums over stages."""
        rounds = self.decode_max * max(slowest_decode_s, self.decode_floor_s)
        trips = self.round_trips * (decode_s + self.trip_s)
        fill = self.prefill_max * max(slowest_prefill_s, self.prefill_floor_s) + prefill_s
        return self.constant_s + fill + self.decode_each * decode_s + max(rounds, trips)


def latency_weights(problem: AssignmentProblem) -> LatencyWeights:
    """The weights of the problem's objective."""
    paper = problem.objective == "paper"
    waiting = problem.decode_micro_batches - 1 if paper else problem.decode_micro_batches
    return LatencyWeights(
        prefill_max=problem.prefill_micro_batches - 1,
        decode_max=waiting * problem.decode_rounds,
        decode_each=1.0 if paper else 0.0,
        round_trips=0.0 if paper else problem.decode_rounds,
        constant_s=0.0 if paper else float(problem.prefill_comm_s.sum()),
        trip_s=0.0 if paper else float(problem.decode_comm_s.sum()),
        prefill_floor_s=float(problem.prefill_comm_s.max()),
        decode_floor_s=float(problem.decode_comm_s.max()),
    )


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
    rows = [_row_bytes(problem, stage) for stage in range(problem.stages)]
    middle = sorted(set(rows[1:last]))
    ends = 1 if last == 0 else 2
    place = {row: ends + index for index, row in enumerate(middle)}
    of_stage = np.array([place.get(row, 0) for row in rows], dtype=np.int64)
    of_stage[0], of_stage[last] = 0, ends - 1
    _, example, count = np.unique(of_stage, return_index=True, return_counts=True)
    return StageKinds(of_stage, example, count)


def _row_bytes(problem: AssignmentProblem, stage: int) -> bytes:
    """All that a stage's costs depend on; transfers enter through constants only."""
    rows = (
        problem.prefill_s[stage],
        problem.decode_s[stage],
        problem.layer_bytes[stage],
        problem.available[stage].astype(np.float64),
        problem.fixed_prefill_s[stage : stage + 1],
        problem.fixed_decode_s[stage : stage + 1],
        problem.memory_bytes[stage : stage + 1],
    )
    return np.concatenate(rows).tobytes()

"""The seconds of a batch, or of a whole job, by each objective: the one place that states them.

Every objective has the same form. P and D are the seconds of the slowest stage per micro-batch of
prefill and decode; sum P_j and sum D_j add up all stages:

    latency = constant + prefill_max * max(P, prefill_floor) + prefill_each * sum P_j
                + decode_each * sum D_j
                + max(decode_max * max(D, decode_floor), round_trips * (sum D_j + trip))

The floors are the slowest transfers (LLM-PQ eq. 7). Exact search, integer programme, relaxation,
heuristics, offloading estimate and explanation all read this form. A new objective is a function
that gives its coefficients, an entry in `OBJECTIVES`, and its name in `problem.Objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.optimiser.names import Objective
from planner.optimiser.problem import AssignmentProblem, FloatArray

Seconds = float | FloatArray


@dataclass(frozen=True)
class LatencyForm:
    """Coefficients of the form above; `_s` are seconds, the others count how often a time is paid.

    `transfer_each` is how often each prefill transfer counts in `constant_s`.
    """

    prefill_max: float
    prefill_each: float
    decode_max: float
    decode_each: float
    round_trips: float
    transfer_each: float
    constant_s: float
    trip_s: float
    prefill_floor_s: float
    decode_floor_s: float

    def seconds(
        self,
        slowest_prefill_s: Seconds,
        slowest_decode_s: Seconds,
        prefill_sum_s: Seconds,
        decode_sum_s: Seconds,
    ) -> FloatArray:
        """Latency for the slowest stages' seconds and the sums over stages; arrays broadcast."""
        fill: Seconds = self.prefill_max * np.maximum(slowest_prefill_s, self.prefill_floor_s)
        decode = np.maximum(self.rounds_s(slowest_decode_s), self.trips_s(decode_sum_s))
        once = self.constant_s + self.prefill_each * prefill_sum_s
        once = once + self.decode_each * decode_sum_s
        total: FloatArray = np.asarray(once + fill + decode)
        return total

    def of_stages(self, prefill_s: FloatArray, decode_s: FloatArray) -> float:
        """Latency for the seconds that each stage [N] takes per micro-batch."""
        slowest = prefill_s.max(), decode_s.max()
        return float(self.seconds(*slowest, prefill_s.sum(), decode_s.sum()))

    def rounds_s(self, slowest_decode_s: Seconds) -> FloatArray:
        """Decode seconds if the slowest stage or transfer decides."""
        rounds: FloatArray = self.decode_max * np.maximum(slowest_decode_s, self.decode_floor_s)
        return rounds

    def trips_s(self, decode_sum_s: Seconds) -> Seconds:
        """Decode seconds if each token's way round all stages decides."""
        return self.round_trips * (decode_sum_s + self.trip_s)


def latency_form(problem: AssignmentProblem) -> LatencyForm:
    """The form of the problem's own objective."""
    return OBJECTIVES[problem.objective](problem, problem.decode_rounds)


def decode_round_form(problem: AssignmentProblem) -> LatencyForm:
    """The form of the pipeline with one decode round, whatever the problem's objective."""
    return _pipeline(problem, 1)


def _pipeline(problem: AssignmentProblem, decode_rounds: int) -> LatencyForm:
    """The latency of the pipeline: a token waits until the one before it has come round."""
    return LatencyForm(
        prefill_max=problem.prefill_micro_batches - 1,
        prefill_each=1.0,
        decode_max=problem.decode_micro_batches * decode_rounds,
        decode_each=0.0,
        round_trips=decode_rounds,
        transfer_each=1.0,
        constant_s=float(problem.prefill_comm_s.sum()),
        trip_s=float(problem.decode_comm_s.sum()),
        prefill_floor_s=float(problem.prefill_comm_s.max()),
        decode_floor_s=float(problem.decode_comm_s.max()),
    )


def _paper(problem: AssignmentProblem, decode_rounds: int) -> LatencyForm:
    """LLM-PQ eq. 4 to 8: transfers count in the maxima only, and no token waits for another."""
    return LatencyForm(
        prefill_max=problem.prefill_micro_batches - 1,
        prefill_each=1.0,
        decode_max=(problem.decode_micro_batches - 1) * decode_rounds,
        decode_each=1.0,
        round_trips=0.0,
        transfer_each=0.0,
        constant_s=0.0,
        trip_s=0.0,
        prefill_floor_s=float(problem.prefill_comm_s.max()),
        decode_floor_s=float(problem.decode_comm_s.max()),
    )


def _job(problem: AssignmentProblem, _: int) -> LatencyForm:
    """A job whose slots are refilled: newcomers are prefilled in bursts between decode steps.

    In a burst prefills follow each other like those of a batch; the stages run idle while the first
    of them goes through, so each burst takes the sum over stages once.
    """
    passes = problem.passes
    assert passes is not None, "a problem of a job counts its passes"
    return LatencyForm(
        prefill_max=passes.prefills - passes.bursts,
        prefill_each=passes.bursts,
        decode_max=passes.decode_steps,
        decode_each=0.0,
        round_trips=passes.rounds,
        transfer_each=passes.bursts,
        constant_s=passes.bursts * float(problem.prefill_comm_s.sum()),
        trip_s=float(problem.decode_comm_s.sum()),
        prefill_floor_s=float(problem.prefill_comm_s.max()),
        decode_floor_s=float(problem.decode_comm_s.max()),
    )


OBJECTIVES: dict[Objective, Callable[[AssignmentProblem, int], LatencyForm]] = {
    "pipeline": _pipeline,
    "paper": _paper,
    "job": _job,
}

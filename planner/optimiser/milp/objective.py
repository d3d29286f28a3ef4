"""The latency as linear terms and maxima over layer counts, for linear models.

With `counts[j, b]` layers of bitwidth b on stage j, the latency of either objective is

    constant_s + sum(per_layer_s * counts)
      + sum over bottlenecks of weight * max over rows r of (row_s[r] . counts + start_s[r])

which LLM-PQ eq. 4 to 8 state with the two variables T_max; theta * omega is added by the models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray


@dataclass(frozen=True, eq=False)
class Bottleneck:
    """`weight` times the greatest of R linear forms; rows [R, N, K] are seconds per layer."""

    weight: float
    row_s: FloatArray
    start_s: FloatArray


@dataclass(frozen=True, eq=False)
class LinearLatency:
    """A latency that is linear but for a few maxima; seconds."""

    constant_s: float
    per_layer_s: FloatArray  # [N, K]
    bottlenecks: tuple[Bottleneck, ...]


def linear_latency(problem: AssignmentProblem) -> LinearLatency:
    """The problem's objective without the quality term."""
    prefill = _stage_maximum(
        problem.prefill_micro_batches - 1,
        problem.prefill_s,
        problem.fixed_prefill_s,
        problem.prefill_comm_s,
    )
    constant_s = problem.fixed_prefill_s.sum()
    if problem.objective == "paper":
        repeats = (problem.decode_micro_batches - 1) * problem.decode_rounds
        decode = _stage_maximum(
            repeats, problem.decode_s, problem.fixed_decode_s, problem.decode_comm_s
        )
        constant_s += problem.fixed_decode_s.sum()
        per_layer_s = problem.prefill_s + problem.decode_s
    else:
        decode = _decode_round(problem)
        constant_s += problem.prefill_comm_s.sum()
        per_layer_s = problem.prefill_s
    used = tuple(term for term in (prefill, decode) if term.weight > 0)
    return LinearLatency(float(constant_s), per_layer_s, used)


def objective_scale(problem: AssignmentProblem) -> float:
    """A positive number of seconds of the objective's size, to scale models with.

    The objective with the layers spread evenly over stages and bitwidths; 1 if that is zero.
    """
    stages, choices = problem.prefill_s.shape
    counts = np.full((stages, choices), problem.layers / (stages * choices))
    latency = linear_latency(problem)
    seconds = latency.constant_s + float((latency.per_layer_s * counts).sum())
    for term in latency.bottlenecks:
        seconds += term.weight * float(
            ((term.row_s * counts).sum(axis=(1, 2)) + term.start_s).max()
        )
    seconds += problem.theta * float(problem.sensitivity.mean(axis=1).sum())
    return seconds if seconds > 0 else 1.0


def _stage_maximum(
    weight: float, layer_s: FloatArray, fixed_s: FloatArray, comm_s: FloatArray
) -> Bottleneck:
    """`weight` times the slowest of all stages and transfers."""
    stages, choices = layer_s.shape
    rows = np.zeros((2 * stages, stages, choices))
    stage = np.arange(stages)
    rows[stage, stage] = layer_s
    return Bottleneck(weight, rows, np.concatenate([fixed_s, comm_s]))


def _decode_round(problem: AssignmentProblem) -> Bottleneck:
    """All decode rounds: each takes the slowest stage per micro-batch, or one trip round."""
    slowest = _stage_maximum(
        problem.decode_rounds, problem.decode_s, problem.fixed_decode_s, problem.decode_comm_s
    )
    trip_s = (problem.fixed_decode_s + problem.decode_comm_s).sum()
    return Bottleneck(
        weight=slowest.weight,
        row_s=np.concatenate(
            [problem.decode_micro_batches * slowest.row_s, problem.decode_s[np.newaxis]]
        ),
        start_s=np.append(problem.decode_micro_batches * slowest.start_s, trip_s),
    )

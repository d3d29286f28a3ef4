"""An assignment of layers to stages and bitwidths: its shape, its costs and its objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.latency import latency_form
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from quant.common.errors import SpecError


@dataclass(frozen=True)
class Assignment:
    """An assignment, its objective, and a lower bound on any assignment's objective (seconds).

    `first_layer` [N+1] rises from 0 to L: stage j holds layers `first_layer[j]` up to, not
    including, `first_layer[j + 1]`. `bitwidth` [L] holds indices into
    `AssignmentProblem.bitwidths`. `seconds` is the wall-clock time of the solve. `status` is

    - "optimal": proven within the gap that was asked for;
    - "bounded": the best found within a bound on quality or latency, with a wider gap;
    - "time_limit": the best found in time;
    - "cutoff": nothing beats the given upper bound by more than the gap; there is no assignment
      (both tuples are empty, the objective is infinite);
    - the method's name where it is a heuristic or a baseline.
    """

    first_layer: tuple[int, ...]
    bitwidth: tuple[int, ...]
    objective: float
    bound: float
    status: str
    seconds: float


@dataclass(frozen=True, eq=False)
class StageTimes:
    """The costs of each stage of an assignment: seconds per micro-batch [N] and layer bytes [N].

    `latency_s` is the batch's latency by the problem's objective without the quality term;
    `quality` is the sum of omega, not multiplied by theta.
    """

    prefill_s: FloatArray
    decode_s: FloatArray
    bytes: FloatArray
    latency_s: float
    quality: float


def layer_counts(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> IntArray:
    """Count layers per stage and bitwidth, [N, K]; SpecError if the two are no assignment."""
    bounds = np.asarray(first_layer, dtype=np.int64)
    bits = np.asarray(bitwidth, dtype=np.int64)
    stages, choices = problem.prefill_s.shape
    if bounds.shape != (stages + 1,) or bits.shape != (problem.layers,):
        raise SpecError(
            f"an assignment of {problem.layers} layers to {stages} stages has {stages + 1} "
            f"boundaries and {problem.layers} bitwidths, not {bounds.size} and {bits.size}; "
            "pass first_layer[N+1] and bitwidth[L]"
        )
    if bounds[0] != 0 or bounds[-1] != problem.layers or (np.diff(bounds) < 0).any():
        raise SpecError(
            f"first_layer must rise from 0 to {problem.layers}, but is {bounds.tolist()}"
        )
    if (bits < 0).any() or (bits >= choices).any():
        raise SpecError(f"bitwidth holds indices from 0 to {choices - 1}, but is {bits.tolist()}")
    stage_of_layer = np.repeat(np.arange(stages), np.diff(bounds))
    cell = stage_of_layer * choices + bits
    return np.bincount(cell, minlength=stages * choices).reshape(stages, choices)


def compute_seconds(problem: AssignmentProblem, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Prefill and decode seconds per micro-batch of every stage, each [N], for counts [N, K]."""
    return (
        problem.fixed_prefill_s + (counts * problem.prefill_s).sum(axis=1),
        problem.fixed_decode_s + (counts * problem.decode_s).sum(axis=1),
    )


def stage_times(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> StageTimes:
    """Time and memory of every stage and the batch's latency, whether or not it fits."""
    counts = layer_counts(problem, first_layer, bitwidth)
    prefill_s, decode_s = compute_seconds(problem, counts)
    bits = np.asarray(bitwidth, dtype=np.int64)
    return StageTimes(
        prefill_s=prefill_s,
        decode_s=decode_s,
        bytes=(counts * problem.layer_bytes).sum(axis=1),
        latency_s=latency_form(problem).of_stages(prefill_s, decode_s),
        quality=float(problem.sensitivity[np.arange(problem.layers), bits].sum()),
    )


def evaluate(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> float:
    """The objective in seconds; infinite where the assignment cannot run.

    That is over memory, with bits that a device lacks, or with no layer on the first or the last
    stage (LLM-PQ eq. 15).
    """
    counts = layer_counts(problem, first_layer, bitwidth)
    sizes = counts.sum(axis=1)
    times = stage_times(problem, first_layer, bitwidth)
    over_memory = (times.bytes > problem.memory_bytes).any()
    lacking = (counts[~problem.available] > 0).any()
    if over_memory or lacking or sizes[0] == 0 or sizes[-1] == 0:
        return float("inf")
    return times.latency_s + problem.theta * times.quality

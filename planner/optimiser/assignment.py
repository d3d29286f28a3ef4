"""An assignment of layers to stages and bitwidths: its costs, its objective, how it is sought."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.capacity import layer_capacity
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, latency_form
from quant.common.errors import SpecError


@dataclass(frozen=True)
class SolveOptions:
    """Options of all methods; only assignments better than `upper_bound` seconds by more than the
    gap are of interest.
    """

    solver: str = DEFAULT_SOLVER
    time_limit_s: float | None = None
    relative_gap: float = 1e-4
    upper_bound: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if not 0 <= self.relative_gap < 1:
            raise SpecError(f"relative gap is {self.relative_gap}; give 0 or more, below 1")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise SpecError(f"time limit is {self.time_limit_s} s; give more than 0, or none")
        if math.isnan(self.upper_bound):
            raise SpecError("upper bound is not a number; give seconds, or none")

    @property
    def target(self) -> float:
        """Seconds that an assignment must stay below to be of interest."""
        return self.upper_bound * (1 - self.relative_gap)


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
    - the method's name where it is a heuristic or a baseline; empty while one is being made.
    """

    first_layer: tuple[int, ...]
    bitwidth: tuple[int, ...]
    objective: float
    bound: float = 0.0
    status: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class AssignmentCosts:
    """Seconds per micro-batch [N] and layer bytes [N]; `latency_s` without the quality term,
    `quality` the sum of omega.
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
    cell = np.repeat(np.arange(stages), np.diff(bounds)) * choices + bits
    return np.bincount(cell, minlength=stages * choices).reshape(stages, choices)


def compute_seconds(problem: AssignmentProblem, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Prefill and decode seconds per micro-batch of every stage, each [N], for counts [N, K]."""
    return (
        problem.fixed_prefill_s + (counts * problem.prefill_s).sum(axis=1),
        problem.fixed_decode_s + (counts * problem.decode_s).sum(axis=1),
    )


def stage_times(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> AssignmentCosts:
    """Time and memory of every stage and the batch's latency, whether or not it fits."""
    return _costs_of(problem, layer_counts(problem, first_layer, bitwidth), bitwidth)


def _costs_of(
    problem: AssignmentProblem, counts: IntArray, bitwidth: Sequence[int]
) -> AssignmentCosts:
    prefill_s, decode_s = compute_seconds(problem, counts)
    bits = np.asarray(bitwidth, dtype=np.int64)
    return AssignmentCosts(
        prefill_s=prefill_s,
        decode_s=decode_s,
        bytes=(counts * problem.layer_bytes).sum(axis=1),
        latency_s=latency_form(problem).of_stages(prefill_s, decode_s),
        quality=float(problem.sensitivity[np.arange(problem.layers), bits].sum()),
    )


def evaluate(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> float:
    """The objective in seconds; infinite over memory, with bits that a device lacks, or an empty
    first or last stage (eq. 15).
    """
    counts = layer_counts(problem, first_layer, bitwidth)
    costs = _costs_of(problem, counts, bitwidth)
    over_memory = (costs.bytes > problem.memory_bytes).any()
    lacking = (counts[~problem.available] > 0).any()
    if over_memory or lacking or not counts[0].any() or not counts[-1].any():
        return math.inf
    return costs.latency_s + problem.theta * costs.quality


def assign_bits(problem: AssignmentProblem, counts: IntArray) -> Assignment:
    """The best assignment with exactly `counts` [N, K]; inside each stage bits go to layers as an
    assignment problem.
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
    return Assignment(boundaries, bits, evaluate(problem, boundaries, bits))


def smallest_assignment(problem: AssignmentProblem) -> Assignment:
    """Every layer as small as its device runs it, one by one where the bottleneck is then the
    least.
    """
    smallest = np.where(problem.available, problem.layer_bytes, np.inf).argmin(axis=1)
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


def conclude(
    best: Assignment | None, bound: float, options: SolveOptions, start_s: float, rounding: float
) -> Assignment:
    """Name the outcome of an exact method; `best` is None only where `bound` reaches the target."""
    target, seconds = options.target, options.clock() - start_s
    best_s = math.inf if best is None else best.objective
    if best is None or (best_s >= target and bound >= target * (1 - rounding)):
        return Assignment((), (), math.inf, target, "cutoff", seconds)
    bound = min(bound, best_s)
    proven = best_s - bound <= (options.relative_gap + rounding) * best_s
    status = "optimal" if proven else "time_limit"
    return Assignment(best.first_layer, best.bitwidth, best_s, bound, status, seconds)

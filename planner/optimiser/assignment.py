"""An assignment of layers to stages and bitwidths: its costs, its objective, how it is sought."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.feasibility import run_sums
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, latency_form
from planner.optimiser.two_memories import fullest_stages
from quant.common.errors import SpecError


class OutOfTimeError(Exception):
    """Time was up before there was anything to return."""


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
    - "bounded": the best found within a bound on quality or latency, or with some of many
      bitwidths, with a wider gap;
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
    """Seconds per micro-batch [N] and layer bytes [N] on device and host; `latency_s` without the
    quality term, `quality` the sum of omega.
    """

    prefill_s: FloatArray
    decode_s: FloatArray
    bytes: FloatArray
    host_bytes: FloatArray
    latency_s: float
    quality: float


def layer_counts(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> IntArray:
    """Count layers per stage and cell, [N, C * K]; SpecError if the two are no assignment."""
    bounds = np.asarray(first_layer, dtype=np.int64)
    bits = np.asarray(bitwidth, dtype=np.int64)
    (stages, cells), choices = problem.prefill_s.shape, len(problem.bitwidths)
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
    cell = np.repeat(np.arange(stages), np.diff(bounds)) * cells
    cell += problem.kind_of_layer * choices + bits
    return np.bincount(cell, minlength=stages * cells).reshape(stages, cells)


def compute_seconds(problem: AssignmentProblem, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Prefill and decode seconds per micro-batch of every stage, each [N], of counts [N, C * K]."""
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
        host_bytes=(counts * problem.host_bytes).sum(axis=1),
        latency_s=latency_form(problem).of_stages(prefill_s, decode_s),
        quality=float(problem.sensitivity[np.arange(problem.layers), bits].sum()),
    )


def evaluate(
    problem: AssignmentProblem, first_layer: Sequence[int], bitwidth: Sequence[int]
) -> float:
    """The objective in seconds; infinite over memory, with bits that a device lacks, joined layers
    apart, or an empty first or last stage (eq. 15).
    """
    counts = layer_counts(problem, first_layer, bitwidth)
    costs = _costs_of(problem, counts, bitwidth)
    over_memory = (costs.bytes > problem.memory_bytes).any()
    over_memory |= (spare_host_bytes(problem, costs.host_bytes) < 0).any()
    lacking = (counts[~problem.available] > 0).any()
    apart = not set(problem.joined).isdisjoint(first_layer)
    if over_memory or lacking or apart or not counts[0].any() or not counts[-1].any():
        return math.inf
    return costs.latency_s + problem.theta * costs.quality


def spare_host_bytes(problem: AssignmentProblem, host_bytes: FloatArray) -> FloatArray:
    """What is left to each stage of its host [N] where stages take `host_bytes` [N]."""
    spare = problem.host_memory_bytes - host_bytes
    for host in problem.hosts:
        stages = list(host.stages)
        left = host.memory_bytes - host_bytes[stages].sum()
        spare[stages] = np.minimum(spare[stages], left)
    return spare


def assign_bits(problem: AssignmentProblem, counts: IntArray) -> Assignment:
    """The best assignment with exactly `counts` [N, C * K]; a stage's bits are matched to its
    layers, kind by kind.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and not every command plans

    first_layer = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    bitwidth = np.zeros(problem.layers, dtype=np.int64)
    of_kinds = [np.flatnonzero(problem.kind_of_layer == kind) for kind in range(problem.kinds)]
    for stage, held in enumerate(counts.reshape(problem.stages, problem.kinds, -1)):
        start, stop = first_layer[stage], first_layer[stage + 1]
        for layers, of_kind in zip(of_kinds, held, strict=True):
            own = layers[(layers >= start) & (layers < stop)]
            slots = np.repeat(np.arange(of_kind.size), of_kind)
            _, chosen = linear_sum_assignment(problem.sensitivity[own][:, slots])
            bitwidth[own] = slots[chosen]
    boundaries, bits = tuple(first_layer.tolist()), tuple(bitwidth.tolist())
    return Assignment(boundaries, bits, evaluate(problem, boundaries, bits))


def smallest_assignment(problem: AssignmentProblem) -> Assignment:
    """Every layer as small as its device runs it, each where the bottleneck is then the least; with
    two memories as many as fit on the first stages.
    """
    if len(problem.memories) > 1:
        boundaries, choices = fullest_stages(problem)
        return assign_bits(problem, layer_counts(problem, boundaries.tolist(), choices.tolist()))
    stages, kinds = problem.stages, problem.kinds
    usable = np.where(problem.available, problem.layer_bytes, np.inf).reshape(stages, kinds, -1)
    smallest = usable.argmin(axis=2)
    cells = smallest + np.arange(kinds) * usable.shape[2]
    stage = np.arange(stages)[:, np.newaxis]
    each_s = problem.prefill_micro_batches * problem.prefill_s[stage, cells]
    each_s += problem.decode_rounds * problem.decode_s[stage, cells]
    smallest_bytes = usable.min(axis=2)
    first_layer = fastest_boundaries(
        np.where(run_sums(held, problem) <= memory, run_sums(seconds, problem), np.inf)
        for held, memory, seconds in zip(smallest_bytes, problem.memory_bytes, each_s, strict=True)
    )
    of_layer = smallest[:, problem.kind_of_layer]
    stage_of = np.repeat(np.arange(stages), np.diff(first_layer))
    bits = of_layer[stage_of, np.arange(problem.layers)]
    return assign_bits(problem, layer_counts(problem, first_layer, bits.tolist()))


def fastest_boundaries(run_s: Iterable[FloatArray], least_s: float = 0.0) -> tuple[int, ...]:
    """Boundaries [N+1] with the least slowest stage above `least_s` seconds; none where no layers
    fit. `run_s` are each stage's seconds by where its run begins and ends [L+1, L+1], infinite
    where it cannot hold that; where several are as good, earlier stages hold more.
    """
    slowest, begins = np.zeros(0), list[IntArray]()
    every = list(run_s)
    for stage, seconds in enumerate(every):
        if stage == 0:
            slowest = np.full(len(seconds), np.inf)
            slowest[0] = least_s
        through = np.maximum(slowest[:, np.newaxis], seconds)
        if stage in (0, len(every) - 1):
            np.fill_diagonal(through, np.inf)
        begin = len(through) - 1 - through[::-1].argmin(axis=0)
        slowest = through[begin, np.arange(len(through))]
        begins.append(begin)
    if math.isinf(slowest[-1]):
        return ()
    first_layer = [len(slowest) - 1]
    for begin in reversed(begins):
        first_layer.append(int(begin[first_layer[-1]]))
    return tuple(reversed(first_layer))


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

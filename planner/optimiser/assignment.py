"""An assignment of layers to stages and bitwidths: whether any fits, and if not which memory is
short by how much; its costs, its objective, how it is sought.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, latency_form
from quant.common.errors import InfeasibleError, SpecError
from quant.common.units import GIB

SHRINK_STEPS = 60  # halvings of an interval within [0, 1]: down to double precision


def smallest_layer_bytes(problem: AssignmentProblem) -> FloatArray:
    """Bytes of the smallest layer each device can run, [N]; infinite where it can run none."""
    usable: FloatArray = np.where(problem.available, problem.layer_bytes, np.inf)
    return np.asarray(usable.min(axis=1))


def layer_capacity(problem: AssignmentProblem) -> IntArray:
    """The layers that fit on each stage at its smallest bitwidth [N]; -1 where nothing does."""
    return _capacity(smallest_layer_bytes(problem), problem.memory_bytes, problem.layers)


def _capacity(each: FloatArray, memory: FloatArray, layers: int) -> IntArray:
    capacity = whole_layers(each, memory, layers)
    capacity[np.isinf(each)] = 0
    capacity[memory < 0] = -1
    return capacity


def is_feasible(problem: AssignmentProblem, layer_scale: float = 1.0) -> bool:
    """Whether some assignment has a finite objective: exactly when fixed parts fit, the ends can
    hold a layer, and all stages together all layers at their smallest.
    """
    each = smallest_layer_bytes(problem) * layer_scale
    return stages_hold(each, problem.memory_bytes, problem.layers)


def stages_hold(each: FloatArray, memory: FloatArray, layers: int) -> bool:
    """Whether stages with so much `memory` [N] hold all layers, `each` [N] of so many bytes."""
    capacity = _capacity(each, memory, layers)
    return bool(
        layers >= min(capacity.size, 2)
        and capacity.min() >= 0
        and min(capacity[0], capacity[-1]) >= 1
        and capacity.sum() >= layers
    )


def fullest_bytes(problem: AssignmentProblem, stage: int) -> float:
    """The most bytes of whole layers within a stage's memory, of all counts but one bitwidth's."""
    memory = float(problem.memory_bytes[stage])
    sizes = problem.layer_bytes[stage, problem.available[stage]]
    sums = np.zeros(1)
    for each in sizes[:-1]:
        grown = np.add.outer(sums, np.arange(problem.layers + 1) * each).ravel()
        sums = np.unique(grown[grown <= memory])
    if sizes.size and sizes[-1] > 0:
        last = sizes[-1]
        room = np.minimum((memory - sums) // last, problem.layers)
        sums = sums + room * last
        sums = np.where(sums > memory, sums - last, sums)
    return float(sums.max())


def require_feasible(problem: AssignmentProblem) -> None:
    """Raise InfeasibleError with the reason where no assignment fits."""
    if not is_feasible(problem):
        names = [f"device {stage}" for stage in range(problem.stages)]
        raise InfeasibleError(explain_infeasible(problem, names))


def explain_infeasible(problem: AssignmentProblem, device_names: Sequence[str]) -> str:
    """Why nothing fits, with figures and no remedies; empty for a problem with a solution."""
    if is_feasible(problem):
        return ""
    if problem.layers < min(problem.stages, 2):
        return (
            f"{problem.layers} layer cannot fill both the first and the last of "
            f"{problem.stages} stages; use 1 device"
        )
    return _explain_one_stage(problem, device_names) or _explain_total(problem)


def whole_layers(
    each: FloatArray | np.float64, memory: FloatArray | np.float64, most: int
) -> IntArray:
    """The greatest counts [N] up to `most` whose bytes, as `evaluate` multiplies, fit `memory`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.floor_divide(memory, each)
        whole += ((whole + 1) * each <= memory) * 1.0 - (whole * each > memory) * 1.0
        whole = np.where(most * each <= memory, most, whole)
    return np.where(np.isfinite(whole), whole, 0.0).astype(np.int64)


def _explain_one_stage(problem: AssignmentProblem, device_names: Sequence[str]) -> str:
    """Explain the first stage that cannot hold what it must; empty if there is none."""
    smallest = smallest_layer_bytes(problem)
    ends = {0: "first", problem.stages - 1: "last"}
    for stage, name in enumerate(device_names):
        memory = float(problem.memory_bytes[stage])
        if memory < 0:
            return (
                f"stage {stage} on {name} is {_gib(-memory)} short before it holds a layer: "
                "what else lives there does not fit"
            )
        if stage not in ends:
            continue
        if np.isinf(smallest[stage]):
            bits = ", ".join(map(str, problem.bitwidths))
            return f"stage {stage} on {name} can run none of the bitwidths {bits}; allow another"
        if smallest[stage] > memory:
            return (
                f"the {ends[stage]} stage must hold a layer, and the smallest that {name} can run "
                f"takes {_gib(smallest[stage])} with its KV cache, but {name} has {_gib(memory)} "
                f"left, {_gib(smallest[stage] - memory)} short"
            )
    return ""


def _explain_total(problem: AssignmentProblem) -> str:
    smallest = smallest_layer_bytes(problem)
    capacity = layer_capacity(problem)
    usable = np.isfinite(smallest)
    held = int(capacity.sum())
    typical = float(np.median(smallest[usable]))
    needed = float((capacity[usable] * smallest[usable]).sum()) + (problem.layers - held) * typical
    offered = float(problem.memory_bytes[usable].sum())
    lowest = ", ".join(str(bits) for bits in sorted(_lowest_bits(problem)))
    message = (
        f"{problem.layers} layers need {_gib(needed)} at the lowest bitwidth each device can run "
        f"({lowest} bit), KV cache included, but the devices offer {_gib(offered)}, which is whole "
        f"layers for {held}: short by {problem.layers - held} of them or "
        f"{_gib((problem.layers - held) * typical)}"
    )
    scale = _scale_that_fits(problem)
    if scale > 0:
        message += f"; they would fit if a layer were {_percent_rounded_up(1 - scale)} smaller"
    return message


def _lowest_bits(problem: AssignmentProblem) -> set[int]:
    usable = np.where(problem.available, problem.layer_bytes, np.inf)
    able = problem.available.any(axis=1)
    return {problem.bitwidths[choice] for choice in usable.argmin(axis=1)[able]}


def _scale_that_fits(problem: AssignmentProblem) -> float:
    """The greatest factor below 1 on a layer's bytes with which all layers fit; 0 if none."""
    low, high = 0.0, 1.0
    for _ in range(SHRINK_STEPS):
        middle = (low + high) / 2
        if is_feasible(problem, middle):
            low = middle
        else:
            high = middle
    return low


def _gib(amount_bytes: float) -> str:
    if amount_bytes < GIB / 10:
        return f"{amount_bytes / 2**20:.2f} MiB"
    return f"{amount_bytes / GIB:.2f} GiB"


def _percent_rounded_up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 10:.1f} %"


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
    """The best assignment with exactly `counts` [N, K]; a stage's bits are matched to layers."""
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
    """Every layer as small as its device runs it, each where the bottleneck is then the least."""
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

"""Solving one assignment problem by a method of the table: the face of the optimiser.

`AssignmentProblem` says what layers cost on each stage, `solve_by` finds which go where at which
bitwidth (LLM-PQ section 4.3), `planner.optimiser.assignment.evaluate` prices any assignment. The
baselines of section 6.1 with one bitwidth, Uniform, PipeEdge and FlexGen, are here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.optimiser.assignment import (
    Assignment,
    SolveOptions,
    evaluate,
    fastest_boundaries,
    stage_times,
)
from planner.optimiser.boxes.few_bitwidths import has_many, solve_with_few
from planner.optimiser.boxes.search import solve_by_boxes
from planner.optimiser.feasibility import require_feasible, run_sums
from planner.optimiser.milp import solve_exactly
from planner.optimiser.names import DEFAULT_SOLVER
from planner.optimiser.problem import (
    AssignmentProblem,
    BoolArray,
    FloatArray,
    IntArray,
    latency_form,
)
from planner.optimiser.relaxation import relax
from planner.optimiser.sensitivity_tables import LossTables
from planner.optimiser.solvers import require_known
from planner.optimiser.transfer import improve_by_transfer, solve_adabits, solve_by_transfer
from quant.common.errors import InfeasibleError, SpecError
from quant.common.units import GIB


def solve_bounded(
    find: Callable[[AssignmentProblem], Assignment],
    problem: AssignmentProblem,
    options: SolveOptions,
) -> Assignment:
    """What a baseline finds, with the relaxation's bound; InfeasibleError where nothing fits."""
    start_s = options.clock()
    found = find(problem)
    bound = min(found.objective, relax(problem).bound)
    return replace(found, bound=bound, seconds=options.clock() - start_s)


def uniform_assignment(problem: AssignmentProblem) -> Assignment:
    """Uniform without a bound, for searches that ask often: the greatest bitwidth that fits."""
    first_layer = even_boundaries(problem)
    for choice in _most_bits_first(problem):
        bitwidth = (choice,) * problem.layers
        objective = evaluate(problem, first_layer, bitwidth)
        if math.isfinite(objective):
            return Assignment(first_layer, bitwidth, objective, status="uniform")
    raise InfeasibleError(_explain_uneven(problem, first_layer))


def _most_bits_first(problem: AssignmentProblem) -> list[int]:
    """The choices by falling bitwidth; of the same bitwidth as they come."""
    return sorted(range(len(problem.bitwidths)), key=lambda choice: -problem.bitwidths[choice])


def even_boundaries(problem: AssignmentProblem) -> tuple[int, ...]:
    """Boundaries [N+1] as near to an even partition as joined layers allow; both ends hold some,
    unless all are joined.
    """
    even = np.cumsum(even_sizes(problem.layers, problem.stages))[:-1]
    borders = problem.open_boundaries
    inner = borders[1:-1] if borders.size > 2 else borders
    nearest = np.abs(inner - even[:, np.newaxis]).argmin(axis=1)
    return (0, *inner[nearest].tolist(), problem.layers)


def even_sizes(layers: int, stages: int) -> IntArray:
    """Layers per stage [N] that differ by at most one; the ends come first where they differ."""
    sizes = np.full(stages, layers // stages, dtype=np.int64)
    by_turn = [0, *range(stages - 1, 0, -1)]
    sizes[by_turn[: layers % stages]] += 1
    return sizes


def _explain_uneven(problem: AssignmentProblem, first_layer: tuple[int, ...]) -> str:
    sizes = np.diff(first_layer)
    usable = np.flatnonzero(_every_kind(problem)[sizes > 0].all(axis=0))
    if problem.layers < min(problem.stages, 2):
        return f"{problem.layers} layer cannot fill {problem.stages} stages; use 1 device"
    if min(sizes[0], sizes[-1]) == 0:
        return "an even partition would part layers that must lie on one stage; use fewer devices"
    if usable.size == 0:
        bits = ", ".join(map(str, problem.bitwidths))
        return f"no one bitwidth of {bits} runs on every device; allow another or mix bitwidths"
    each = problem.layer_bytes.reshape(problem.stages, problem.kinds, -1)[:, :, usable]
    smallest = int(usable[each.sum(axis=(0, 1)).argmin()])
    needed = stage_times(problem, first_layer, (smallest,) * problem.layers).bytes
    short = needed - problem.memory_bytes
    stage = int(short.argmax())
    return (
        f"{problem.bitwidths[smallest]} bit everywhere still needs {needed[stage] / GIB:.2f} GiB "
        f"for {sizes[stage]} layers on stage {stage}, which has "
        f"{problem.memory_bytes[stage] / GIB:.2f} GiB left, {short[stage] / GIB:.2f} GiB short; "
        "spread layers by memory, mix bitwidths, or lower the batch"
    )


def _every_kind(problem: AssignmentProblem) -> BoolArray:
    """Whether each stage runs layers of all kinds at a bitwidth [N, K]."""
    return np.asarray(problem.by_layer(problem.available).all(axis=1))


def pipeedge_assignment(problem: AssignmentProblem) -> Assignment:
    """PipeEdge without a bound: the greatest bitwidth that fits, and the least slowest prefill."""
    for choice in _most_bits_first(problem):
        if (problem.memory_bytes < 0).any():
            break
        first_layer = _fastest_prefill(problem, choice)
        bits = (choice,) * problem.layers
        objective = evaluate(problem, first_layer, bits) if first_layer else math.inf
        if math.isfinite(objective):
            return Assignment(first_layer, bits, objective, status="pipeedge")
    require_feasible(problem)
    bits_text = ", ".join(map(str, problem.bitwidths))
    raise InfeasibleError(
        f"no one bitwidth of {bits_text} fits all {problem.layers} layers on the "
        f"{problem.stages} devices; mix bitwidths, or lower the batch"
    )


def _fastest_prefill(problem: AssignmentProblem, choice: int) -> tuple[int, ...]:
    """Boundaries with the least slowest prefill stage at a bitwidth; none where nothing fits."""
    cells = np.arange(problem.kinds) * len(problem.bitwidths) + choice
    each = np.where(problem.available, problem.layer_bytes, np.inf)[:, cells]
    seconds, fixed_s = problem.prefill_s[:, cells], problem.fixed_prefill_s
    return fastest_boundaries(
        (
            np.where(
                run_sums(each[stage], problem) <= problem.memory_bytes[stage],
                run_sums(seconds[stage], problem) + fixed_s[stage],
                np.inf,
            )
            for stage in range(problem.stages)
        ),
        float(problem.prefill_comm_s.max()),
    )


@dataclass(frozen=True, eq=False)
class OffloadingEstimate:
    """Seconds of one batch, the bitwidth, and the bytes [N] that each stage keeps on its host."""

    latency_s: float
    bits: int
    host_bytes: FloatArray


def estimate_offloading(
    problem: AssignmentProblem,
    bits: int,
    host_link_bytes_per_s: Sequence[float],
    host_memory_bytes: Sequence[float],
) -> OffloadingEstimate:
    """Estimate FlexGen with an even partition; rates [N] in one direction. What does not fit lies
    in host memory and is streamed in once a round (block schedule) while computing: a round takes
    the longer of both. SpecError for another bitwidth, InfeasibleError where a device cannot run it
    or host memory is short.
    """
    if bits not in problem.bitwidths:
        raise SpecError(f"{bits} bit is none of {', '.join(map(str, problem.bitwidths))}")
    choice = problem.bitwidths.index(bits)
    if not (usable := _every_kind(problem)[:, choice]).all():
        stage = int(np.flatnonzero(~usable)[0])
        raise InfeasibleError(f"stage {stage} cannot run {bits} bit; estimate another bitwidth")
    times = stage_times(problem, even_boundaries(problem), (choice,) * problem.layers)
    host = np.maximum(times.bytes - problem.memory_bytes, 0.0)
    short = host - np.asarray(host_memory_bytes, dtype=np.float64)
    if (short > 0).any():
        stage = int(short.argmax())
        raise InfeasibleError(
            f"stage {stage} offloads {host[stage] / GIB:.2f} GiB, {short[stage] / GIB:.2f} GiB "
            "more than its host memory; use fewer bits or more host memory"
        )
    streamed_s = host / np.asarray(host_link_bytes_per_s, dtype=np.float64)
    prefill = np.maximum(times.prefill_s, streamed_s / problem.prefill_micro_batches)
    decode = np.maximum(times.decode_s, streamed_s / problem.decode_micro_batches)
    return OffloadingEstimate(latency_form(problem).of_stages(prefill, decode), bits, host)


TRANSFER_SHARE = 0.2  # of a time limit, kept for the heuristic


def solve_by(
    method: str,
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: LossTables | None = None,
) -> Assignment:
    """Assign layers to stages and bitwidths by a `method` of `METHODS`; "auto" searches exactly
    without an integer programme, unless options name another solver than HiGHS. Exact methods stop
    when proven within the gap ("optimal") or with some of many bitwidths ("bounded"), out of time
    ("time_limit"), or when nothing beats the upper bound by the gap ("cutoff", no assignment).
    `tables` are those of the problem's sensitivity. InfeasibleError where nothing fits, SpecError
    for options that cannot be used.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    require_known(options.solver)
    if method == "auto" and options.solver != DEFAULT_SOLVER:
        method = "ilp"
    found, tables = METHODS[method], tables or LossTables(problem)
    if method in BY_COUNTS and has_many(problem):
        return solve_with_few(problem, options, tables, found)
    return found(problem, options, tables)


def solve_automatically(
    problem: AssignmentProblem, options: SolveOptions, tables: LossTables
) -> Assignment:
    """Exact search to the gap; out of time, the best after bitwidth transfer, with its bound."""
    if options.time_limit_s is None:
        return solve_by_boxes(problem, options, tables)
    kept_s = TRANSFER_SHARE * options.time_limit_s
    shorter = replace(options, time_limit_s=options.time_limit_s - kept_s)
    found = solve_by_boxes(problem, shorter, tables)
    if found.status != "time_limit":
        return found
    start_s = options.clock()
    better = improve_by_transfer(problem, found, replace(options, time_limit_s=kept_s), tables)
    bound = min(found.bound, better.objective)
    seconds = found.seconds + options.clock() - start_s
    return replace(better, bound=bound, status="time_limit", seconds=seconds)


BY_COUNTS = ("auto", "transfer")
"""Methods that have tables of all ways to count layers by bitwidth."""

METHODS: dict[str, Callable[[AssignmentProblem, SolveOptions, LossTables], Assignment]] = {
    "auto": solve_automatically,
    "ilp": lambda problem, options, _: solve_exactly(problem, options),
    "transfer": solve_by_transfer,
    "adabits": solve_adabits,
    "uniform": lambda problem, options, _: solve_bounded(uniform_assignment, problem, options),
    "pipeedge": lambda problem, options, _: solve_bounded(pipeedge_assignment, problem, options),
}
"""`planner.optimiser.names` says what they are; the tables of a sensitivity serve many problems."""

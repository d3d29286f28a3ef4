"""Whether any assignment fits, and if not which memory is short by how much.

Layers keep their order, so stages that take as many layers as they can, first to last, reach as far
as any: for equal layers that is a matter of numbers, else of the longest runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, Memory
from planner.optimiser.two_memories import (
    even_shares,
    fitting_shares,
    fullest_stages,
    holds_all,
    with_shares,
)
from quant.common.errors import InfeasibleError
from quant.common.units import GIB

SHRINK_STEPS = 60  # halvings of an interval within [0, 1]: down to double precision
FEW_STEPS = 12  # to a fortieth of a per cent: with two memories each takes a tenth of a second
MOST_SUMS = 2_000_000  # of bytes that are told apart for one stage: 16 MB


def smallest_layer_bytes(problem: AssignmentProblem) -> FloatArray:
    """Bytes of the smallest layer of each kind that each device can run, [N, C]; infinite where it
    can run none.
    """
    usable: FloatArray = np.where(problem.available, problem.layer_bytes, np.inf)
    return np.asarray(usable.reshape(problem.stages, problem.kinds, -1).min(axis=2))


def layer_capacity(problem: AssignmentProblem) -> IntArray:
    """The most layers of a run that fit on each stage's device at their smallest [N]; -1 where
    nothing does.
    """
    each = smallest_layer_bytes(problem)
    if problem.is_even:
        return _capacity(each[:, 0], problem.memory_bytes, problem.layers)
    capacity = np.full(problem.stages, -1, dtype=np.int64)
    for stage in np.flatnonzero(problem.memory_bytes >= 0).tolist():
        held = run_sums(each[stage], problem) <= problem.memory_bytes[stage]
        starts, stops = np.nonzero(held)
        capacity[stage] = (stops - starts).max()
    return capacity


def run_sums(each: FloatArray, problem: AssignmentProblem) -> FloatArray:
    """What each run adds up to [L+1, L+1], by where it begins and ends, if a layer of each kind is
    `each` [C]; infinite for what is no run of whole layers between open boundaries.
    """
    before = problem.kinds_before
    sums = np.zeros((problem.layers + 1,) * 2)
    for kind, one in enumerate(each.tolist()):
        length = before[:, kind] - before[:, kind][:, np.newaxis]
        sums += np.where(length == 0, 0.0, one) if math.isinf(one) else length * one
    closed = list(problem.joined)
    sums[closed] = sums[:, closed] = np.inf
    sums[np.tri(problem.layers + 1, k=-1, dtype=bool)] = np.inf
    return sums


def _capacity(each: FloatArray, memory: FloatArray, layers: int) -> IntArray:
    capacity = whole_layers(each, memory, layers)
    capacity[np.isinf(each)] = 0
    capacity[memory < 0] = -1
    return capacity


def is_feasible(problem: AssignmentProblem, layer_scale: float = 1.0) -> bool:
    """Whether some assignment has a finite objective: exactly when fixed parts fit, the ends can
    hold a layer, and all stages together all layers at their smallest.
    """
    if len(problem.memories) > 1:
        return fitting_shares(problem, layer_scale) is not None
    each = smallest_layer_bytes(problem) * layer_scale
    return stages_hold(each, problem.memory_bytes, problem.kind_of_layer, problem.joined)


def stages_hold(
    each: FloatArray, memory: FloatArray, kind_of_layer: IntArray, joined: Sequence[int] = ()
) -> bool:
    """Whether stages with so much `memory` [N] hold all layers in their order, where one of each
    kind has `each` [N, C] bytes, infinite where a stage can hold none.
    """
    layers = len(kind_of_layer)
    if each.shape[1] == 1 and not joined:
        capacity = _capacity(each[:, 0], memory, layers)
        return bool(
            layers >= min(capacity.size, 2)
            and capacity.min() >= 0
            and min(capacity[0], capacity[-1]) >= 1
            and capacity.sum() >= layers
        )
    reached = _reached(each, memory, kind_of_layer, joined)
    return holds_all(reached, memory, layers)


def _reached(
    each: FloatArray, memory: FloatArray, kind_of_layer: IntArray, joined: Sequence[int]
) -> IntArray:
    """The farthest boundary that the stages up to each reach [N+1]; the last has one to hold."""
    stages, kinds = each.shape
    layers = len(kind_of_layer)
    before = (kind_of_layer[:, np.newaxis] == np.arange(kinds)).cumsum(axis=0)
    before = np.concatenate([np.zeros((1, kinds), dtype=np.int64), before])
    closed = np.zeros(layers + 1, dtype=bool)
    closed[list(joined)] = True
    reached = np.zeros(stages + 1, dtype=np.int64)
    for stage in range(stages):
        start = int(reached[stage])
        counts = before[start:] - before[start]
        usable = np.isfinite(each[stage])
        held = counts @ np.where(usable, each[stage], 0.0)
        fits = (held <= memory[stage]) & ~counts[:, ~usable].any(axis=1) & ~closed[start:]
        if stage < stages - 1:
            fits[-1] = False
        reached[stage + 1] = start + int(np.flatnonzero(fits).max(initial=0))
    return reached


def fullest_bytes(problem: AssignmentProblem, stage: int, of: Memory | None = None) -> float:
    """The most bytes of whole layers within a stage's memory (the device's, or `of`), of all counts
    but one cell's; all of the memory where there are too many sums.
    """
    of = of or problem.memories[0]
    memory = float(of.limit_bytes[stage])
    sizes = of.layer_bytes[stage, problem.available[stage]]
    sums = np.zeros(1)
    for each in sizes[:-1]:
        if sums.size * (problem.layers + 1) > MOST_SUMS:
            return memory
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


def explain_infeasible(
    problem: AssignmentProblem,
    device_names: Sequence[str],
    layer_of_unit: Sequence[int] | None = None,
) -> str:
    """Why nothing fits, with figures and no remedies; empty for a problem with a solution. What the
    problem places are units whose first layers are `layer_of_unit` [L+1], each a layer by default.
    """
    layer_of = range(problem.layers + 1) if layer_of_unit is None else layer_of_unit
    layers = layer_of[-1]
    if is_feasible(problem):
        return ""
    runs = len(problem.open_boundaries) - 1
    if runs < min(problem.stages, 2):
        kept = "" if runs == layers else " that must lie on one stage"
        return (
            f"{layers} layer{'' if layers == 1 else 's'}{kept} cannot fill both "
            f"the first and the last of {problem.stages} stages; use 1 device"
        )
    return _explain_one_stage(problem, device_names, layer_of) or _explain_total(problem, layer_of)


def whole_layers(
    each: FloatArray | np.float64, memory: FloatArray | np.float64, most: int
) -> IntArray:
    """The greatest counts [N] up to `most` whose bytes, as `evaluate` multiplies, fit `memory`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.floor_divide(memory, each)
        whole += ((whole + 1) * each <= memory) * 1.0 - (whole * each > memory) * 1.0
        whole = np.where(most * each <= memory, most, whole)
    return np.where(np.isfinite(whole), whole, 0.0).astype(np.int64)


def _explain_one_stage(
    problem: AssignmentProblem, device_names: Sequence[str], layer_of: Sequence[int]
) -> str:
    """Explain the first stage that cannot hold what it must; empty if there is none."""
    smallest, borders = smallest_layer_bytes(problem), problem.open_boundaries
    before = problem.kinds_before
    ends = {
        0: ("first", before[borders[1]], layer_of[borders[1]]),
        problem.stages - 1: (
            "last",
            before[-1] - before[borders[-2]],
            layer_of[-1] - layer_of[borders[-2]],
        ),
    }
    for stage, name in enumerate(device_names):
        memory = float(problem.memory_bytes[stage])
        if memory < 0:
            return (
                f"stage {stage} on {name} is {_gib(-memory)} short before it holds a layer: "
                "what else lives there does not fit"
            )
        if stage not in ends:
            continue
        end, counts, layers = ends[stage]
        needed = float(smallest[stage, counts > 0] @ counts[counts > 0])
        if math.isinf(needed):
            bits = ", ".join(map(str, problem.bitwidths))
            return f"stage {stage} on {name} can run none of the bitwidths {bits}; allow another"
        if needed > memory:
            held = "a layer" if layers == 1 else f"{layers} layers"
            takes = "takes" if layers == 1 else "take"
            return (
                f"the {end} stage must hold {held}, and the smallest that {name} can run "
                f"{takes} {_gib(needed)} with its KV cache, but {name} has {_gib(memory)} "
                f"left, {_gib(needed - memory)} short"
            )
    return ""


def _explain_total(problem: AssignmentProblem, layer_of: Sequence[int]) -> str:
    smallest = smallest_layer_bytes(problem)
    usable = np.isfinite(smallest)
    counts = problem.kinds_before[-1]
    if (lacking := ~usable.any(axis=0) & (counts > 0)).any():
        layer = layer_of[int(np.flatnonzero(lacking[problem.kind_of_layer])[0])]
        bits = ", ".join(map(str, problem.bitwidths))
        return f"no device can run layer {layer} at any of the bitwidths {bits}; allow another"
    if len(problem.memories) > 1:
        return _explain_both(problem, layer_of)
    reached = _reached(smallest, problem.memory_bytes, problem.kind_of_layer, problem.joined)
    taken = np.diff(problem.kinds_before[reached], axis=0)
    held = layer_of[int(reached[-1])]
    left = layer_of[-1] - held
    typical = [
        np.median(smallest[able, kind]) if able.any() else 0.0 for kind, able in enumerate(usable.T)
    ]
    missing = float((counts - problem.kinds_before[reached[-1]]) @ typical)
    needed = float((taken * np.where(usable, smallest, 0.0)).sum()) + missing
    offered = float(problem.memory_bytes[usable.any(axis=1)].sum())
    lowest = ", ".join(str(bits) for bits in sorted(_lowest_bits(problem)))
    message = (
        f"{layer_of[-1]} layers need {_gib(needed)} at the lowest bitwidth each device can run "
        f"({lowest} bit), KV cache included, but the devices offer {_gib(offered)}, which is whole "
        f"layers for {held}: short by {left} of them or {_gib(missing)}"
    )
    scale = _scale_that_fits(problem)
    if scale > 0:
        message += f"; they would fit if a layer were {_percent_rounded_up(1 - scale)} smaller"
    return message


def _explain_both(problem: AssignmentProblem, layer_of: Sequence[int]) -> str:
    """Explain the total of two memories, of which hosts are shared evenly."""
    apart = with_shares(problem, even_shares(problem))
    held = layer_of[int(fullest_stages(apart)[0][-1])]
    device, host = (float(each.limit_bytes.sum()) for each in apart.memories)
    message = (
        f"only {held} of {layer_of[-1]} layers fit at the smallest, KV cache included, into "
        f"{_gib(device)} of the devices and {_gib(host)} of their hosts"
    )
    scale = _scale_that_fits(problem)
    if scale > 0:
        message += f"; all would fit if a layer were {_percent_rounded_up(1 - scale)} smaller"
    return message


def _lowest_bits(problem: AssignmentProblem) -> set[int]:
    usable = np.where(problem.available, problem.layer_bytes, np.inf)
    usable = usable.reshape(-1, len(problem.bitwidths))
    able = np.isfinite(usable).any(axis=1)
    return {problem.bitwidths[choice] for choice in usable.argmin(axis=1)[able]}


def _scale_that_fits(problem: AssignmentProblem) -> float:
    """The greatest factor below 1 on a layer's bytes with which all layers fit; 0 if none."""
    low, high = 0.0, 1.0
    for _ in range(SHRINK_STEPS if len(problem.memories) == 1 else FEW_STEPS):
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

"""Whether any assignment fits at all, and if not, which memory is short by how much. A plan exists
exactly when fixed parts fit, the ends can hold a layer, and all stages together all layers at their
smallest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from quant.common.errors import InfeasibleError
from quant.common.units import GIB

SHRINK_STEPS = 60  # halvings of an interval within [0, 1]: down to double precision


def smallest_layer_bytes(problem: AssignmentProblem) -> FloatArray:
    """Bytes of the smallest layer each device can run, [N]; infinite where it can run none."""
    usable: FloatArray = np.where(problem.available, problem.layer_bytes, np.inf)
    return np.asarray(usable.min(axis=1))


def layer_capacity(problem: AssignmentProblem, layer_scale: float = 1.0) -> IntArray:
    """The layers, times `layer_scale` bytes, that fit on each stage at its smallest bitwidth [N];
    -1 where nothing does.
    """
    each = smallest_layer_bytes(problem) * layer_scale
    return _capacity(each, problem.memory_bytes, problem.layers)


def _capacity(each: FloatArray, memory: FloatArray, layers: int) -> IntArray:
    capacity = whole_layers(each, memory, layers)
    capacity[np.isinf(each)] = 0
    capacity[memory < 0] = -1
    return capacity


def is_feasible(problem: AssignmentProblem, layer_scale: float = 1.0) -> bool:
    """Whether some assignment has a finite objective."""
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
    """The most bytes of whole layers within a stage's memory, of all counts of all bitwidths but
    one.
    """
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
    """Why nothing fits, with figures and no remedies; `device_names` [N]. Empty for a problem with
    a solution.
    """
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
    """The greatest counts [N] up to `most` whose bytes, multiplied as `evaluate` does, fit `memory`
    [N].
    """
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

"""The integer programme of LLM-PQ section 4.3 (eq. 4-16), written as a staircase of stages.

Symbols: `before[i][j]` is 1 where layer i lies on stage j or an earlier one; it falls with i, which
keeps stages contiguous as eq. 16 does with one constraint for each pair of stages.
`placed[i, j, b]` is the paper's z(i,j,b), `counts[j][b]` its sum over layers. Once boundaries and
counts are whole numbers, placing the bits is a transport problem, whose corners are whole numbers
too: only those two are integer variables. Objective and memory are scaled as
`planner.optimiser.relaxation.scaling` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pulp

from planner.optimiser.capacity import whole_layers
from planner.optimiser.milp.windows import Window
from planner.optimiser.objectives import latency_form
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from planner.optimiser.relaxation.scaling import (
    OBJECTIVE_UNITS,
    memory_unit_bytes,
    typical_objective_s,
)

# A variable, or 0 or 1 where the windows settle it.
Step: TypeAlias = "pulp.LpVariable | int"


@dataclass(frozen=True)
class Restriction:
    """The assignments that a programme allows: boundary j in `windows[j]` [N-1].

    With `cutoff_s` only those of at most that objective. `expected_s` is about the objective's
    value, for scaling, or 0 if unknown.
    """

    windows: tuple[Window, ...]
    expected_s: float
    cutoff_s: float | None = None


@dataclass(frozen=True, eq=False)
class AssignmentModel:
    """A model under construction and its variables; one model unit is `scale_s` seconds."""

    problem: AssignmentProblem
    scale_s: float
    programme: pulp.LpProblem
    before: list[list[Step]]  # [L][N]
    placed: dict[tuple[int, int, int], pulp.LpVariable]  # only where window and device allow
    counts: list[list[pulp.LpVariable]]  # [N][K]

    def counts_found(self) -> IntArray:
        """Layers per stage and bitwidth [N, K] of the point that a solver left in the model."""
        values = [[variable.value() for variable in row] for row in self.counts]
        return np.rint(np.array(values, dtype=np.float64)).astype(np.int64)


def build_model(
    problem: AssignmentProblem, restriction: Restriction, memory_share: FloatArray
) -> AssignmentModel:
    """The programme under `restriction`.

    `memory_share` [N], about 1, is the part of each memory that may be used.
    """
    expected_s = restriction.expected_s
    size_s = expected_s if expected_s > 0 else typical_objective_s(problem)
    model = _declare(problem, restriction.windows, size_s / OBJECTIVE_UNITS)
    add_one_place_per_layer(model)
    add_contiguity(model)
    add_layer_counts(model)
    add_memory_limit(model, memory_share)
    objective = add_latency(model) + _quality_terms(model)
    model.programme.setObjective(objective)
    if restriction.cutoff_s is not None:
        limit = restriction.cutoff_s / model.scale_s
        model.programme.addConstraint(objective <= limit, "cutoff")
    return model


def add_one_place_per_layer(model: AssignmentModel) -> None:
    """Give a layer one bitwidth where its staircase steps up, none elsewhere (eq. 9-11)."""
    stages, choices = model.problem.prefill_s.shape
    for layer, steps in enumerate(model.before):
        for stage in range(stages):
            here = steps[stage] - (steps[stage - 1] if stage else 0)
            terms = [
                model.placed[layer, stage, choice]
                for choice in range(choices)
                if (layer, stage, choice) in model.placed
            ]
            if terms or not isinstance(here, int):
                model.programme.addConstraint(pulp.lpSum(terms) == here)


def add_contiguity(model: AssignmentModel) -> None:
    """Keep every layer on its predecessor's stage or a later one (eq. 15-16)."""
    for steps, following in pairwise(model.before):
        for step, next_step in zip(steps, following, strict=True):
            if not isinstance(step, int) and not isinstance(next_step, int):
                model.programme.addConstraint(step >= next_step)


def add_layer_counts(model: AssignmentModel) -> None:
    """Make `counts` add up the layers placed on a stage at a bitwidth."""
    terms: dict[tuple[int, int], list[pulp.LpVariable]] = {}
    for (_, stage, choice), variable in model.placed.items():
        terms.setdefault((stage, choice), []).append(variable)
    for stage, row in enumerate(model.counts):
        for choice, count in enumerate(row):
            held = pulp.lpSum(terms.get((stage, choice), []))
            model.programme.addConstraint(held == count)


def add_memory_limit(model: AssignmentModel, memory_share: FloatArray) -> None:
    """Make the layers of a stage fit its memory (eq. 12-13)."""
    for stage, row in enumerate(model.counts):
        each, memory = model.problem.layer_bytes[stage], model.problem.memory_bytes[stage]
        unit = memory_unit_bytes(each, memory)
        weighed = pulp.lpSum(
            float(size) * count for size, count in zip(each / unit, row, strict=True)
        )
        model.programme.addConstraint(weighed <= float(memory / unit * memory_share[stage]))


def add_latency(model: AssignmentModel) -> pulp.LpAffineExpression:
    """Add a variable above every form of each maximum (eq. 5-8); the latency in model units.

    The constant is a fixed variable, so that the solver's relative gap is on the whole.
    """
    problem, form, unit = model.problem, latency_form(model.problem), model.scale_s
    constant_s = form.constant_s + form.prefill_each * problem.fixed_prefill_s.sum()
    constant_s += form.decode_each * problem.fixed_decode_s.sum()
    constant = model.programme.add_variable("constant", constant_s / unit, constant_s / unit)
    prefill = model.programme.add_variable(
        "slowest_prefill", form.prefill_max * form.prefill_floor_s / unit
    )
    decode = model.programme.add_variable(
        "decode_rounds", form.decode_max * form.decode_floor_s / unit
    )
    for slowest, weight, layer_s, fixed_s in (
        (prefill, form.prefill_max / unit, problem.prefill_s, problem.fixed_prefill_s),
        (decode, form.decode_max / unit, problem.decode_s, problem.fixed_decode_s),
    ):
        for stage in range(problem.stages) if weight else ():
            held_s = _weighed(model, weight * layer_s, [stage])
            model.programme.addConstraint(slowest - held_s >= weight * float(fixed_s[stage]))
    if form.round_trips:
        weight = form.round_trips / unit
        held_s = _weighed(model, weight * problem.decode_s)
        trip_s = float(problem.fixed_decode_s.sum()) + form.trip_s
        model.programme.addConstraint(decode - held_s >= weight * trip_s)
    each_s = form.prefill_each * problem.prefill_s + form.decode_each * problem.decode_s
    each = _weighed(model, each_s / unit)
    return pulp.lpSum([constant, prefill, decode]) + each


def _declare(
    problem: AssignmentProblem, windows: Sequence[Window], scale_s: float
) -> AssignmentModel:
    """Declare the variables, without those that the windows settle."""
    programme = pulp.LpProblem("assignment", pulp.LpMinimize)
    stages, choices = problem.prefill_s.shape
    before = [
        [_step(programme, layer, stage, windows) for stage in range(stages)]
        for layer in range(problem.layers)
    ]
    placed = {
        (layer, stage, choice): programme.add_variable(f"placed_{layer}_{stage}_{choice}", 0, 1)
        for layer, steps in enumerate(before)
        for stage in range(stages)
        if _may_lie(steps, stage)
        for choice in range(choices)
        if problem.available[stage, choice]
    }
    counts = [
        [
            programme.add_variable(
                f"count_{stage}_{choice}", 0, _most(problem, stage, choice), pulp.LpInteger
            )
            for choice in range(choices)
        ]
        for stage in range(stages)
    ]
    return AssignmentModel(problem, scale_s, programme, before, placed, counts)


def _step(programme: pulp.LpProblem, layer: int, stage: int, windows: Sequence[Window]) -> Step:
    """Whether `layer` lies on `stage` or before it."""
    if stage == len(windows) or layer < windows[stage].least:
        return 1
    if layer >= windows[stage].most:
        return 0
    return programme.add_variable(f"before_{layer}_{stage}", cat=pulp.LpBinary)


def _may_lie(steps: Sequence[Step], stage: int) -> bool:
    """Whether the settled steps leave the layer free to lie on `stage`."""
    reached = not (isinstance(steps[stage], int) and steps[stage] == 0)
    passed = stage > 0 and isinstance(steps[stage - 1], int) and steps[stage - 1] == 1
    return reached and not passed


def _most(problem: AssignmentProblem, stage: int, choice: int) -> int:
    """Count the layers of a bitwidth that the device runs and holds."""
    memory = problem.memory_bytes[stage]
    if not problem.available[stage, choice] or memory < 0:
        return 0
    return int(whole_layers(problem.layer_bytes[stage, choice], memory, problem.layers))


def _quality_terms(model: AssignmentModel) -> pulp.LpAffineExpression:
    """The sum of theta * omega in model units."""
    cost = model.problem.theta * model.problem.sensitivity / model.scale_s
    return pulp.LpAffineExpression(
        [
            (variable, float(cost[layer, choice]))
            for (layer, _, choice), variable in model.placed.items()
        ]
    )


def _weighed(
    model: AssignmentModel, weights: FloatArray, stages: Sequence[int] | None = None
) -> pulp.LpAffineExpression:
    """Sum of counts times `weights` [N, K] on all or some stages, without the zeros."""
    return pulp.LpAffineExpression(
        [
            (count, float(weight))
            for stage in (range(len(model.counts)) if stages is None else stages)
            for count, weight in zip(model.counts[stage], weights[stage], strict=True)
            if weight
        ]
    )

"""Why a plan is as it is: what binds each stage, and what other bits would bring for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

import numpy as np

from planner.costs.model import CostModel
from planner.explanation.planned_assignment import Effect, PlannedAssignment, planned_assignment
from planner.explanation.what_if import Answers, WhatIfOptions, ask
from planner.optimiser.assignment import stage_times
from planner.optimiser.problem import FloatArray, decode_round_form
from planner.plan.spec import PlanSpec
from planner.scheduling import Phase
from planner.simulation.simulation import Simulated

Resource = Literal["memory", "prefill", "decode"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)

NUDGE = 1e-3  # relative growth of a stage's time by which its price is measured


@dataclass(frozen=True)
class Headroom:
    """What a stage may still use, in bytes or in seconds of a micro-batch before it slows the
    phase, and the least that one more layer or more bits of one ask for (infinite where none does).
    """

    spare: float
    least_step: float

    @property
    def binds(self) -> bool:
        return self.spare < self.least_step < math.inf


@dataclass(frozen=True)
class StageLimits:
    """A price is how many seconds longer a batch takes per second more of the stage's passes."""

    stage: int
    memory: Headroom
    prefill: Headroom
    decode: Headroom
    prefill_price: float
    decode_price: float

    @property
    def binds(self) -> tuple[Resource, ...]:
        return tuple(name for name in RESOURCES if getattr(self, name).binds)


@dataclass(frozen=True)
class Room:
    """A way to make room on a stage: `layers` go to `to_stage`, or stay there at `bits`."""

    layers: range
    to_stage: int
    bits: int
    effect: Effect


@dataclass(frozen=True)
class Alternative:
    """One layer (or group) at other bits; `room` is the best single change that makes it fit, whose
    effect includes the new bits, None where it fits or no change does.
    """

    bits: int
    extra_bytes: float
    effect: Effect
    room: Room | None


@dataclass(frozen=True)
class Exchange:
    """Two groups of one stage that exchange bits; `quality_s` is theta times the change of
    sensitivity.
    """

    layers: range
    bits: int
    quality_s: float


@dataclass(frozen=True)
class LayerReason:
    """Layers decided together, and every other choice with its price; `spare_bytes` are left on the
    stage, `exchange` is the best one within it (None: all have the same bits).
    """

    layers: range
    stage: int
    bits: int
    spare_bytes: float
    alternatives: tuple[Alternative, ...]
    exchange: Exchange | None


@dataclass(repr=False, frozen=True, eq=False)
class Explanation:
    costs: CostModel
    stages: tuple[StageLimits, ...]
    layers: tuple[LayerReason, ...]
    answers: Answers
    simulated: Simulated

    def __repr__(self) -> str:
        bound = [
            f"stage {stage.stage} by {' and '.join(stage.binds) or 'nothing'}"
            for stage in self.stages
        ]
        return f"<Explanation of {len(self.layers)} groups of layers; bound: {', '.join(bound)}>"


def explain(plan: PlanSpec, costs: CostModel, options: WhatIfOptions | None = None) -> Explanation:
    """Give the reasons for `plan`; PlanMismatchError unless it was made with `costs`."""
    planned = planned_assignment(plan, costs)
    return Explanation(
        costs=costs,
        stages=stage_limits(planned),
        layers=layer_reasons(planned),
        answers=ask(planned, options or WhatIfOptions()),
        simulated=planned.simulate(),
    )


def stage_limits(planned: PlannedAssignment) -> tuple[StageLimits, ...]:
    problem, times = planned.problem, planned.times
    form = decode_round_form(problem)
    round_s = form.rounds_s(times.decode_s.max())
    around_s = form.trips_s(times.decode_s.sum())
    prefill_s = max(times.prefill_s.max(), form.prefill_floor_s)
    decode_s = max(times.decode_s.max(), form.decode_floor_s)
    limits = []
    for stage in range(problem.stages):
        spare_bytes = float(problem.memory_bytes[stage] - times.bytes[stage])
        spare_decode_s = min(decode_s - times.decode_s[stage], max(0.0, round_s - around_s))
        steps = [
            _least_step(planned, stage, table)
            for table in (problem.layer_bytes, problem.prefill_s, problem.decode_s)
        ]
        limits.append(
            StageLimits(
                stage=stage,
                memory=Headroom(spare_bytes, steps[0]),
                prefill=Headroom(float(prefill_s - times.prefill_s[stage]), steps[1]),
                decode=Headroom(float(spare_decode_s), steps[2]),
                prefill_price=_price(planned, stage, "prefill", float(prefill_s)),
                decode_price=_price(planned, stage, "decode", float(decode_s)),
            )
        )
    return tuple(limits)


def _least_step(planned: PlannedAssignment, stage: int, table: FloatArray) -> float:
    row, available = table[stage], planned.problem.available[stage]
    mine = set(planned.bitwidth[slice(*planned.first_layer[stage : stage + 2])])
    usable = [choice for choice in range(len(row)) if available[choice]]
    steps = [row[choice] for choice in usable]
    steps += [row[more] - row[less] for less in mine for more in usable if more > less]
    return min((float(step) for step in steps if step > 0), default=math.inf)


def _price(planned: PlannedAssignment, stage: int, phase: Phase, scale_s: float) -> float:
    """Seconds a batch per second that a pass of this stage takes longer, for a small rise."""
    rise_s = NUDGE * scale_s
    if rise_s == 0:
        return 0.0
    problem, raise_s = planned.problem, np.zeros(planned.problem.stages)
    raise_s[stage] = rise_s
    if phase == "prefill":
        slower = replace(problem, fixed_prefill_s=problem.fixed_prefill_s + raise_s)
    else:
        slower = replace(problem, fixed_decode_s=problem.fixed_decode_s + raise_s)
    times = stage_times(slower, planned.first_layer, planned.bitwidth)
    return (times.latency_s - planned.times.latency_s) / rise_s


def layer_reasons(planned: PlannedAssignment) -> tuple[LayerReason, ...]:
    problem, bounds = planned.problem, planned.first_layer
    spare = problem.memory_bytes - planned.times.bytes
    known: dict[tuple[object, ...], tuple[Alternative, ...]] = {}
    reasons = []
    for unit, choice in enumerate(planned.bitwidth):
        stage = planned.stage_of(unit)
        edges = (unit == bounds[stage], unit == bounds[stage + 1] - 1)
        key = (stage, choice, *edges, problem.sensitivity[unit].tobytes())
        if key not in known:
            known[key] = tuple(_alternatives(planned, unit, stage))
        reasons.append(
            LayerReason(
                layers=planned.layers(unit),
                stage=stage,
                bits=problem.bitwidths[choice],
                spare_bytes=float(spare[stage]),
                alternatives=known[key],
                exchange=_exchange(planned, unit, stage),
            )
        )
    return tuple(reasons)


def _alternatives(planned: PlannedAssignment, unit: int, stage: int) -> Iterator[Alternative]:
    problem, present = planned.problem, planned.bitwidth[unit]
    for choice, bits in enumerate(problem.bitwidths):
        if choice == present or not problem.available[stage, choice]:
            continue
        changed = list(planned.bitwidth)
        changed[unit] = choice
        effect = planned.effect(planned.first_layer, changed)
        extra = problem.layer_bytes[stage, choice] - problem.layer_bytes[stage, present]
        room = None if effect.fits else _best_room(planned, unit, changed, stage)
        yield Alternative(bits, float(extra), effect, room)


def _exchange(planned: PlannedAssignment, unit: int, stage: int) -> Exchange | None:
    problem, bits = planned.problem, np.array(planned.bitwidth)
    members = np.arange(*planned.first_layer[stage : stage + 2])
    others = members[bits[members] != bits[unit]]
    if others.size == 0:
        return None
    omega, mine, theirs = problem.sensitivity, bits[unit], bits[others]
    change = omega[unit, theirs] + omega[others, mine] - omega[unit, mine] - omega[others, theirs]
    best = int(change.argmin())
    partner = int(others[best])
    return Exchange(
        layers=planned.layers(partner),
        bits=problem.bitwidths[int(theirs[best])],
        quality_s=problem.theta * float(change[best]),
    )


def _best_room(
    planned: PlannedAssignment, unit: int, changed: list[int], stage: int
) -> Room | None:
    options = chain(_moves(planned, unit, changed, stage), _lowered(planned, unit, changed, stage))
    fitting = (room for room in options if room.effect.fits)
    return min(fitting, key=lambda room: room.effect.objective_s, default=None)


def _moves(planned: PlannedAssignment, unit: int, changed: list[int], stage: int) -> Iterator[Room]:
    """Yield moves of the stage's first group to the stage before, or its last to the one after."""
    problem, bounds = planned.problem, planned.first_layer
    if bounds[stage + 1] - bounds[stage] < 2:
        return
    for to_stage, edge in ((stage - 1, bounds[stage]), (stage + 1, bounds[stage + 1] - 1)):
        if not 0 <= to_stage < problem.stages:
            continue
        shifted = list(bounds)
        shifted[max(stage, to_stage)] += 1 if to_stage < stage else -1
        if not set(problem.joined).isdisjoint(shifted):
            continue
        choices = [changed[edge]] if edge == unit else range(len(problem.bitwidths))
        for choice in choices:
            if problem.available[to_stage, choice]:
                bitwidth = [*changed[:edge], choice, *changed[edge + 1 :]]
                effect = planned.effect(shifted, bitwidth)
                yield Room(planned.layers(edge), to_stage, problem.bitwidths[choice], effect)


def _lowered(
    planned: PlannedAssignment, unit: int, changed: list[int], stage: int
) -> Iterator[Room]:
    """Yield, for each bitwidth, the group of the stage that loses least when lowered to it."""
    problem, bounds = planned.problem, planned.first_layer
    omega = problem.sensitivity
    others = [each for each in range(bounds[stage], bounds[stage + 1]) if each != unit]
    for present in {changed[each] for each in others}:
        members = [each for each in others if changed[each] == present]
        for choice in np.flatnonzero(problem.available[stage, :present]).tolist():
            loss = omega[members, choice] - omega[members, present]
            chosen = members[int(loss.argmin())]
            bitwidth = [*changed[:chosen], choice, *changed[chosen + 1 :]]
            effect = planned.effect(planned.first_layer, bitwidth)
            yield Room(planned.layers(chosen), stage, problem.bitwidths[choice], effect)

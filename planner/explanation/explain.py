"""Why a plan is as it is: what binds each stage, and what other bits would bring for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, get_args

import numpy as np

from planner.costs.model import CostModel
from planner.costs.placing import UnitChoice
from planner.explanation.planned_assignment import (
    Effect,
    Part,
    PlannedAssignment,
    planned_assignment,
)
from planner.explanation.what_if import Answers, WhatIfOptions, ask
from planner.optimiser.assignment import spare_host_bytes, stage_times
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
    """A way to make room on a stage: `layers`, or their `part`, go to `to_stage`, or stay there at
    `bits`; `experts` have a choice of their own where they go along.
    """

    layers: range
    part: Part
    to_stage: int
    bits: int
    on_host: bool
    experts: UnitChoice | None
    effect: Effect


@dataclass(frozen=True)
class Alternative:
    """One layer (or group, or part) at other bits or on the host; `room` is the best single change
    that makes it fit, whose effect includes the new bits, None where it fits or no change does.
    """

    bits: int
    on_host: bool
    extra_bytes: float
    extra_host_bytes: float
    effect: Effect
    room: Room | None


@dataclass(frozen=True)
class Exchange:
    """Two groups of one stage that exchange bits; `quality_s`: theta times the change of omega."""

    layers: range
    part: Part
    bits: int
    on_host: bool
    quality_s: float


@dataclass(frozen=True)
class LayerReason:
    """Layers, or a part of them, decided together, and every other choice with its price;
    `spare_bytes` are left on the stage, `exchange` is the best one within it (None: all of the kind
    have the same bits).
    """

    layers: range
    part: Part
    stage: int
    bits: int
    on_host: bool
    spare_bytes: float
    spare_host_bytes: float
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
    row = table[stage]
    members = range(*planned.first_layer[stage : stage + 2])
    mine = {(planned.cell(unit, 0), planned.bitwidth[unit]): unit for unit in members}
    steps = _further_runs(planned, stage, row).tolist()
    for (first, present), unit in mine.items():
        better = (more for more in planned.usable(stage, unit) if _is_more(planned, more, present))
        steps += [row[first + more] - row[first + present] for more in better]
    return min((float(step) for step in steps if step > 0), default=math.inf)


def _further_runs(planned: PlannedAssignment, stage: int, row: FloatArray) -> FloatArray:
    """The least of `row` that each run of units between boundaries takes of a stage."""
    problem = planned.problem
    usable = np.where(problem.available[stage], row, np.inf)
    each = usable.reshape(problem.kinds, -1).min(axis=1)
    counts = np.unique(np.diff(problem.kinds_before[problem.open_boundaries], axis=0), axis=0)
    return np.asarray((counts * np.where(counts > 0, each, 0.0)).sum(axis=1))


def _is_more(planned: PlannedAssignment, more: int, present: int) -> bool:
    """Whether a choice has more bits than another, or as many on the device and not the host."""
    one, other = planned.chosen(more), planned.chosen(present)
    return (one.bits, not one.on_host) > (other.bits, not other.on_host)


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
    problem = planned.problem
    spare = problem.memory_bytes - planned.times.bytes
    spare_host = spare_host_bytes(problem, planned.times.host_bytes)
    known: dict[tuple[object, ...], tuple[Alternative, ...]] = {}
    reasons = []
    for unit, choice in enumerate(planned.bitwidth):
        stage, own = planned.stage_of(unit), planned.chosen(choice)
        edges = tuple(
            unit - run.start if unit in run else None for run in _edge_runs(planned, stage)
        )
        key = (stage, planned.cell(unit, choice), edges, problem.sensitivity[unit].tobytes())
        if key not in known:
            known[key] = tuple(_alternatives(planned, unit, stage))
        reasons.append(
            LayerReason(
                layers=planned.layers(unit),
                part=planned.part(unit),
                stage=stage,
                bits=own.bits,
                on_host=own.on_host,
                spare_bytes=float(spare[stage]),
                spare_host_bytes=float(spare_host[stage]),
                alternatives=known[key],
                exchange=_exchange(planned, unit, stage),
            )
        )
    return tuple(reasons)


def _edge_runs(planned: PlannedAssignment, stage: int) -> tuple[range, range]:
    """The first and the last units of a stage that only move together."""
    first, end = planned.first_layer[stage : stage + 2]
    borders = planned.problem.open_boundaries
    inner = borders[(borders > first) & (borders < end)].tolist()
    return range(first, [*inner, end][0]), range([first, *inner][-1], end)


def _alternatives(planned: PlannedAssignment, unit: int, stage: int) -> Iterator[Alternative]:
    problem, present = planned.problem, planned.bitwidth[unit]
    before = planned.cell(unit, present)
    for choice in planned.usable(stage, unit):
        if choice == present:
            continue
        changed = list(planned.bitwidth)
        changed[unit] = choice
        effect = planned.effect(planned.first_layer, changed)
        after = planned.cell(unit, choice)
        extra, extra_host = (
            float(table[stage, after] - table[stage, before])
            for table in (problem.layer_bytes, problem.host_bytes)
        )
        room = None if effect.fits else _best_room(planned, unit, changed, stage)
        yield Alternative(*planned.chosen(choice), extra, extra_host, effect, room)


def _exchange(planned: PlannedAssignment, unit: int, stage: int) -> Exchange | None:
    problem, bits = planned.problem, np.array(planned.bitwidth)
    members = np.arange(*planned.first_layer[stage : stage + 2])
    alike = problem.kind_of_layer[members] == problem.kind_of_layer[unit]
    width = np.array(problem.bitwidths)[bits]
    others = members[alike & (width[members] != width[unit])]
    if others.size == 0:
        return None
    omega, mine, theirs = problem.sensitivity, bits[unit], bits[others]
    change = omega[unit, theirs] + omega[others, mine] - omega[unit, mine] - omega[others, theirs]
    best = int(change.argmin())
    partner = int(others[best])
    own = planned.chosen(int(theirs[best]))
    return Exchange(
        layers=planned.layers(partner),
        part=planned.part(partner),
        bits=own.bits,
        on_host=own.on_host,
        quality_s=problem.theta * float(change[best]),
    )


def _best_room(
    planned: PlannedAssignment, unit: int, changed: list[int], stage: int
) -> Room | None:
    options = chain(_moves(planned, unit, changed, stage), _lowered(planned, unit, changed, stage))
    fitting = (room for room in options if room.effect.fits)
    return min(fitting, key=lambda room: room.effect.objective_s, default=None)


def _moves(planned: PlannedAssignment, unit: int, changed: list[int], stage: int) -> Iterator[Room]:
    """Yield moves of the stage's first run of units to the stage before, or last to the next."""
    bounds = planned.first_layer
    runs = _edge_runs(planned, stage)
    if runs[0].stop == bounds[stage + 1]:
        return
    for to_stage, run in zip((stage - 1, stage + 1), runs, strict=True):
        if not 0 <= to_stage < planned.problem.stages:
            continue
        shifted = list(bounds)
        shifted[max(stage, to_stage)] = run.stop if to_stage < stage else run.start
        own = {planned.part(unit) == "experts": changed[unit]} if unit in run else {}
        for bits in _choices_of_run(planned, run, to_stage, own):
            bitwidth = [*changed[: run.start], *bits, *changed[run.stop :]]
            yield _room(planned, run, to_stage, (shifted, bitwidth))


def _choices_of_run(
    planned: PlannedAssignment, run: range, stage: int, fixed: Mapping[bool, int]
) -> Iterator[list[int]]:
    """Yield choices for the units of a run: one for all experts, one for all else, so that they
    can be told in a few words; those `fixed` by whether they are for experts stay.
    """
    is_experts = [planned.part(unit) == "experts" for unit in run]
    usable = dict[bool, set[int]]()
    for unit, kind in zip(run, is_experts, strict=True):
        able = set(planned.usable(stage, unit))
        usable[kind] = usable.get(kind, able) & able
    for kind, choice in fixed.items():
        usable[kind] &= {choice}
    for chosen in product(*map(sorted, usable.values())):
        of_part = dict(zip(usable, chosen, strict=True))
        yield [of_part[kind] for kind in is_experts]


def _room(
    planned: PlannedAssignment,
    run: range,
    to_stage: int,
    assigned: tuple[Sequence[int], Sequence[int]],
) -> Room:
    """The units of a run on `to_stage`, as they are in the boundaries and choices `assigned`."""
    own = planned.chosen(assigned[1][run[0]])
    experts = [unit for unit in run[1:] if planned.part(unit) == "experts"]
    return Room(
        layers=range(planned.layers(run[0]).start, planned.layers(run[-1]).stop),
        part="layer" if len(run) > 1 else planned.part(run[0]),
        to_stage=to_stage,
        bits=own.bits,
        on_host=own.on_host,
        experts=planned.chosen(assigned[1][experts[0]]) if experts else None,
        effect=planned.effect(*assigned),
    )


def _lowered(
    planned: PlannedAssignment, unit: int, changed: list[int], stage: int
) -> Iterator[Room]:
    """Yield, for each smaller choice, the group of the stage and each kind that loses least."""
    problem, bounds = planned.problem, planned.first_layer
    omega = problem.sensitivity
    alike: dict[int, list[int]] = {}
    for each in range(bounds[stage], bounds[stage + 1]):
        if each != unit:
            alike.setdefault(planned.cell(each, changed[each]), []).append(each)
    for before, members in alike.items():
        present = changed[members[0]]
        for choice in planned.usable(stage, members[0]):
            after = planned.cell(members[0], choice)
            if not any(
                memory.layer_bytes[stage, after] < memory.layer_bytes[stage, before]
                for memory in problem.memories
            ):
                continue
            loss = omega[members, choice] - omega[members, present]
            chosen = members[int(loss.argmin())]
            bitwidth = [*changed[:chosen], choice, *changed[chosen + 1 :]]
            yield _room(planned, range(chosen, chosen + 1), stage, (bounds, bitwidth))

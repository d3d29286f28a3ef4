"""A finished plan on its cost model, by which any change to it can be priced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from planner.cluster.device import Device
from planner.cluster.groups import grouped_cluster
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.placing import UnitChoice
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.optimiser.assignment import (
    Assignment,
    AssignmentCosts,
    spare_host_bytes,
    stage_times,
)
from planner.optimiser.problem import AssignmentProblem, decode_round_form
from planner.plan.origin import with_planned
from planner.plan.simulate import first_rows
from planner.plan.spec import PlanSpec
from planner.search.qualities import bits_by_quality
from planner.search.request import PlanningRequest, costs_of
from planner.simulation.job_simulation import Forecast, forecast_assignment
from planner.simulation.simulation import Simulated, simulate_assignment
from planner.workload import MicroBatches
from quant.common.errors import CheckpointError, PlanMismatchError, SpecError

Part = Literal["layer", "rest", "experts"]
"""What of its layers a unit is: all, all but their experts, or these."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Effect:
    """The effect of a change to a plan; negative is better. `latency_s` is per batch,
    `decode_round_s` per token of every request, `quality_s` theta times the change of sensitivity,
    `short_bytes` what the worst stage lacks, `short_host_bytes` what the worst host does.
    """

    latency_s: float
    decode_round_s: float
    quality_s: float
    short_bytes: float
    short_host_bytes: float = 0.0

    @property
    def objective_s(self) -> float:
        return self.latency_s + self.quality_s

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0 and self.short_host_bytes == 0


@dataclass(frozen=True, eq=False)
class PlannedAssignment:
    """A plan on `problem`; `first_layer` [N+1] and `bitwidth` [L] count units: groups of
    `options.group` layers, or apart their experts and all else.
    """

    costs: CostModel
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    first_layer: tuple[int, ...]
    bitwidth: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.costs.options.group

    @property
    def times(self) -> AssignmentCosts:
        return stage_times(self.problem, self.first_layer, self.bitwidth)

    def layers(self, unit: int) -> range:
        return self.costs.placing.units.layers(unit)

    def layers_of(self, units: Iterable[int]) -> int:
        """How many layers have a part in `units`."""
        return len({layer for unit in units for layer in self.layers(unit)})

    def part(self, unit: int) -> Part:
        units = self.costs.placing.units
        if unit in units.of_experts:
            return "experts"
        return "rest" if unit in units.with_experts else "layer"

    def chosen(self, choice: int) -> UnitChoice:
        """What one of the problem's choices stands for."""
        return self.costs.placing.unit_choices[choice]

    def cell(self, unit: int, choice: int) -> int:
        """The column of the problem's tables for a unit at a choice."""
        return int(self.problem.kind_of_layer[unit]) * len(self.problem.bitwidths) + choice

    def usable(self, stage: int, unit: int) -> list[int]:
        """The choices at which a stage can run a unit."""
        choices = range(len(self.problem.bitwidths))
        return [each for each in choices if self.problem.available[stage, self.cell(unit, each)]]

    def stage_of(self, unit: int) -> int:
        return int(np.searchsorted(self.first_layer, unit, side="right")) - 1

    def effect(self, first_layer: Sequence[int], bitwidth: Sequence[int]) -> Effect:
        before, after = self.times, stage_times(self.problem, first_layer, bitwidth)
        rounds = (decode_round_s(self.problem, times) for times in (after, before))
        over = (after.bytes - self.problem.memory_bytes).max()
        spare_host = spare_host_bytes(self.problem, after.host_bytes).min()
        return Effect(
            latency_s=after.latency_s - before.latency_s,
            decode_round_s=next(rounds) - next(rounds),
            quality_s=self.problem.theta * (after.quality - before.quality),
            short_bytes=max(0.0, float(over)),
            short_host_bytes=max(0.0, -float(spare_host)),
        )

    def simulate(self) -> Simulated:
        rows = first_rows(self.costs.job, self.costs.workload.global_batch)
        return simulate_assignment(self.pass_table, self.sizes, rows)

    def forecast(self) -> Forecast:
        return forecast_assignment(self.pass_table, self.sizes)

    @property
    def pass_table(self) -> PassTable:
        placed = self.costs.placing.expanded(Assignment(self.first_layer, self.bitwidth, 0.0))
        return PassTable.of(self.costs, self.devices, *placed)


def planned_assignment(plan: PlanSpec, costs: CostModel) -> PlannedAssignment:
    """Put `plan` on its cost model, theta and bits; PlanMismatchError for another problem."""
    _check_same(plan, costs)
    most, chunk = plan.policy.max_batch_size, plan.policy.prefill_chunk_tokens
    options = replace(costs.options, max_batch_size=most, prefill_chunk_tokens=chunk)
    costs = replace(
        costs,
        theta=plan.solver.theta,
        head_on_first=plan.head_on_first,
        options=options,
        usable_bits=_usable_bits(plan, costs),
    )
    devices = grouped_cluster(costs.cluster, [stage.device_names for stage in plan.stages]).devices
    bounds = [*(stage.layers.start for stage in plan.stages), plan.model.layers]
    chosen = [choice for stage in plan.stages for choice in stage.choices]
    first_unit, choices = costs.placing.assigned(bounds, chosen)
    return PlannedAssignment(
        costs=costs,
        devices=devices,
        sizes=plan.micro_batches,
        problem=costs.grouped_problem(devices, plan.micro_batches),
        first_layer=first_unit,
        bitwidth=choices,
    )


def _usable_bits(plan: PlanSpec, costs: CostModel) -> tuple[int, ...] | None:
    if plan.beside.quality in (None, "fast"):
        return None
    used = [
        (costs.shape.layer(layer), bits)
        for stage in plan.stages
        for layer, each in zip(stage.layers, stage.choices, strict=True)
        for bits in (each.bits, each.expert_bits)
    ]
    every = (replace(costs, usable_bits=bits) for bits in bits_by_quality(costs.options.bits))
    return next(each.bits for each in every if all(each.is_usable(*own) for own in used))


def _used_bits(plan: PlanSpec) -> set[int]:
    choices = [choice for stage in plan.stages for choice in stage.choices]
    return {bits for each in choices for bits in (each.bits, each.expert_bits)}


def decode_round_s(problem: AssignmentProblem, times: AssignmentCosts) -> float:
    """Seconds of one more token for all: the slowest stage or link, or one way round."""
    form = decode_round_form(problem)
    rounds_s, trip_s = form.rounds_s(times.decode_s.max()), form.trips_s(times.decode_s.sum())
    return float(max(rounds_s, trip_s))


def _check_same(plan: PlanSpec, costs: CostModel) -> None:
    named = {name for stage in plan.stages for name in stage.device_names}
    used, own = _used_bits(plan), costs.cluster
    is_own = own.has_fingerprint(plan.cluster_fingerprint)
    cluster = plan.cluster_fingerprint if is_own else own.fingerprint()
    for what, planned, given in (
        ("cluster", plan.cluster_fingerprint, cluster),
        ("model", plan.model.fingerprint, costs.shape.fingerprint()),
        ("workload", plan.workload, costs.workload),
        ("devices", sorted(named), sorted(named & {each.name for each in costs.cluster.devices})),
        ("bitwidths", sorted(used), sorted(used & set(costs.options.bits))),
    ):
        if planned != given:
            raise PlanMismatchError(
                f"the plan's {what} ({planned}) and the cost model's ({given}) differ; explain a "
                "plan with the cost model it was made with"
            )


_ROUNDING = 1e-6
"""Relative difference up to which figures are the same: sums in another order."""

_OTHER_FIGURES = "the plan was changed, or made by another version of llmpq"
_REMEDY = "plan again with llmpq plan"


def rebuilt_costs(plan: PlanSpec) -> CostModel:
    """Make the cost model anew from the plan's origin; SpecError where the model, a file or this
    version's figures differ, or the plan has no origin.
    """
    origin = plan.origin
    if origin is None:
        raise SpecError(
            "the plan does not say what it was made from, so it cannot be explained or simulated: "
            "an earlier version of llmpq made it, or its cluster is one that no cluster file can "
            f"describe; {_REMEDY}"
        )
    changed = next(origin.changed_files(), None)
    if changed is not None:
        raise SpecError(
            f"{changed} is not what it was when the plan was made from it; put it back as it was, "
            f"or {_REMEDY}"
        )
    options = with_planned(origin.options, _used_bits(plan))
    options = replace(options, kv_bits=plan.kv_bits, head_bits=(plan.head_bits,))
    job = None if plan.job is None else plan.job.job
    cluster, shape = origin.cluster_spec(), _shape(plan)
    costs, _ = costs_of(PlanningRequest(cluster, shape, plan.workload, options, job))
    _check_figures(plan, costs)
    return costs


def _shape(plan: PlanSpec) -> ModelShape:
    source = plan.model.source
    try:
        shape = model_shape(source)
    except (SpecError, CheckpointError) as error:
        raise SpecError(
            f"the plan's model is needed to compute its costs again: {error}"
        ) from error
    if shape.fingerprint() != plan.model.fingerprint:
        raise SpecError(f"{source} is not the {plan.model.name} of the plan any more; {_REMEDY}")
    return shape


def _check_figures(plan: PlanSpec, costs: CostModel) -> None:
    try:
        times = planned_assignment(plan, costs).times
    except PlanMismatchError as error:
        what, _, _ = str(error).partition(";")
        raise SpecError(f"{_OTHER_FIGURES}: {what}; {_REMEDY}") from error
    for what, planned, computed in (
        ("latency in seconds", plan.predicted.objective_latency_s, times.latency_s),
        ("sensitivity", plan.solver.sensitivity, times.quality),
    ):
        if not math.isclose(planned, computed, rel_tol=_ROUNDING, abs_tol=_ROUNDING * 1e-6):
            raise SpecError(
                f"the plan's {what} is {planned:.6g}, computed again it is {computed:.6g}: "
                f"{_OTHER_FIGURES}; {_REMEDY}"
            )

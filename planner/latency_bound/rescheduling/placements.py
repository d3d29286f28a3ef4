"""The layers of a plan's stages where they lie, at the costs that they were planned with."""

from __future__ import annotations

from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec, devices_of
from planner.costs.model import CostModel
from planner.latency_bound.placing.placement import Placement
from planner.model.finding import ModelShape
from planner.optimiser.assignment import Assignment
from planner.options import AUTO, PlanOptions
from planner.plan.builder import Solution
from planner.plan.spec import PlanSpec
from planner.scheduling import BOUNDED
from planner.search.remedies import PlanningRequest
from planner.search.search import costs_of
from planner.workload import Job


def placements_of(
    plan: PlanSpec, cluster: ClusterSpec, shape: ModelShape, options: PlanOptions, job: Job
) -> tuple[Placement, ...]:
    """The placement of all stages; or that of those that decode, then that of those that prefill,
    as in `Placed`.
    """
    options = replace(
        options, policy=BOUNDED, group=1, in_flight=AUTO, kv_bits=plan.kv_bits, max_omega=None
    )
    costs, _ = costs_of(PlanningRequest.of(cluster, shape, job, options))
    prefills = () if plan.prefill_plan is None else (plan.prefill_plan,)
    return tuple(_placement(part, costs) for part in (plan, *prefills))


def _placement(plan: PlanSpec, costs: CostModel) -> Placement:
    devices = devices_of(costs.cluster, tuple(stage.device_names for stage in plan.stages))
    return Placement(costs, _solution(plan, costs, devices))


def _solution(plan: PlanSpec, costs: CostModel, devices: tuple[Device, ...]) -> Solution:
    bits = tuple(costs.options.bits.index(b) for stage in plan.stages for b in stage.bitwidths)
    ends = (stage.layers.stop for stage in plan.stages)
    assignment = Assignment((0, *ends), bits, 0.0, 0.0, "as it is", 0.0)
    return Solution(
        workload=plan.workload,
        devices=devices,
        sizes=plan.micro_batches,
        assignment=assignment,
        lower_bound=0.0,
        candidates=1,
        solved=0,
        seconds=0.0,
        head_on_first=plan.head_on_first,
    )

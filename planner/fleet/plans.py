"""The plans of a fleet's pipelines: one is built for each make-up, its copies on other devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from planner.cluster.device import Device
from planner.cluster.groups import ungrouped
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.fleet.makeups import example_devices
from planner.fleet.placing import Placed
from planner.fleet.pricing import Priced
from planner.plan.builder import build_plan
from planner.plan.origin import PlanOrigin, origin_of
from planner.plan.spec import PlanSpec, StagePlan
from planner.quality.importance import planned_importance
from planner.search.costs import files_of_costs


def fleet_plans(
    cluster: ClusterSpec,
    source: str,
    sensitivity_source: str,
    chosen: Sequence[Priced],
    placed: Sequence[Placed],
) -> Iterator[PlanSpec]:
    """Yield the plan of every pipeline; `source` is the model's."""
    nodes: dict[str, list[Device]] = {}
    for device in cluster.devices:
        nodes.setdefault(device.node, []).append(device)
    built: dict[int, PlanSpec] = {}
    for each in placed:
        priced = chosen[each.column]
        if each.column not in built:
            built[each.column] = _example_plan(priced, source, sensitivity_source)
        names = dict(
            zip(
                (d.name for d in ungrouped(example_devices(priced.make_up, _kinds(priced, each)))),
                (device.name for block in each.blocks for device in block),
                strict=True,
            )
        )
        used = list(chain.from_iterable(each.blocks))
        whole = [d for node in dict.fromkeys(d.node for d in used) for d in nodes[node]]
        origin = _origin(replace(cluster, devices=tuple(whole)), used, priced.costs)
        part = replace(cluster, devices=tuple(d for d in whole if d in used))
        plan = _renamed(built[each.column], names)
        yield replace(
            plan, cluster=cluster.name, cluster_fingerprint=part.fingerprint(), origin=origin
        )


def _kinds(priced: Priced, placed: Placed) -> dict[int, Device]:
    """An example of each kind that the make-up has."""
    pairs = zip(priced.make_up, placed.blocks, strict=True)
    return {block.kind: devices[0] for block, devices in pairs}


def _example_plan(priced: Priced, source: str, sensitivity_source: str) -> PlanSpec:
    """The plan on the example devices of the make-up, without origin."""
    plan = build_plan(priced.costs, source, priced.solution, sensitivity_source, ())
    if not plan.needs_importance(priced.costs.shape.stored is not None):
        return plan
    importance = planned_importance(priced.costs.options, priced.costs.shape)
    return replace(plan, importance=importance)


def _origin(whole: ClusterSpec, used: Sequence[Device], costs: CostModel) -> PlanOrigin | None:
    """The origin of a pipeline: its nodes, of which other pipelines have the other devices."""
    origin = origin_of(whole, costs.options, files_of_costs(costs.options))
    if origin is None:
        return None
    names = {device.name for device in used}
    return origin.without([d.name for d in whole.devices if d.name not in names])


def _renamed(plan: PlanSpec, names: Mapping[str, str]) -> PlanSpec:
    """The same plan on other devices."""

    def moved(stage: StagePlan) -> StagePlan:
        device = names[stage.device]
        return replace(
            stage,
            device=device,
            node=device.rpartition("/")[0],
            devices=tuple(names[name] for name in stage.devices),
        )

    return replace(
        plan,
        stages=tuple(map(moved, plan.stages)),
        unused_devices=tuple(names[name] for name in plan.unused_devices),
    )

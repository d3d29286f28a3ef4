"""Small models, clusters and lengths for tests of schedules, and placements made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.bounded_plan import bounded_options
from planner.latency_bound.placed_layers import PlacedLayers
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.family import mixed_shape
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.optimiser.assignment import Assignment
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.search.request import PlanningRequest, costs_of
from planner.workload import MicroBatches

TWO_BITS = PlanOptions(bits=(4, 16), head="last", memory_margin=0.0)
THREE_LAYERS = replace(model_shape("opt-1.3b"), layers=3, name="three layers of opt-1.3b")
LINEAR, FULL = (
    replace(kind, layers=3, name="three layers like qwen3.5-0.8b's")
    for kind in model_shape("qwen3.5-0.8b").kind_shapes
)
MIXED_LAYERS = mixed_shape([LINEAR, FULL, LINEAR])
SHORT = RequestLengths(
    LengthDistribution((600, 1400), (0.5, 0.5)), LengthDistribution((1, 3, 5), (0.2, 0.5, 0.3))
)
TASK_S = RequestLengths(
    LengthDistribution.truncated_normal(256, 252, 512),
    LengthDistribution.truncated_normal(32, 13, 80),
)


def small_cluster(
    gib: Sequence[float], kinds: Sequence[str] = ("T4", "V100-SXM2-32GB")
) -> ClusterSpec:
    """A node for each device, with so much memory."""
    nodes = [
        {"name": f"n{i}", "accelerators": {kind: 1}, "usable_memory_gib": each}
        for i, (kind, each) in enumerate(zip(kinds, gib, strict=True))
    ]
    network = {"internode_gbit_per_s": 25}
    return ClusterSpec.from_dict({"name": "small", "nodes": nodes, "network": network})


def bounded_costs(
    cluster: ClusterSpec,
    request: BoundRequest,
    shape: ModelShape = THREE_LAYERS,
    options: PlanOptions = TWO_BITS,
) -> CostModel:
    """The costs that a search for schedules has."""
    planned = PlanningRequest.of(cluster, shape, job_of(request), bounded_options(options))
    return costs_of(planned)[0]


def placement_of(
    costs: CostModel, devices: Sequence[Device], counts: Sequence[Sequence[int]]
) -> PlacedLayers:
    """The placement with so many layers of each bitwidth on each device."""
    ends = itertools.accumulate(map(sum, counts))
    bits = [b for stage in counts for b, count in enumerate(stage) for _ in range(count)]
    found = Assignment((0, *ends), tuple(bits), 1.0, 0.0, "by hand", 0.0)
    solution = Solution(
        costs.workload, tuple(devices), MicroBatches(1, 1), found, 0.0, 1, 1, 0.0, False
    )
    return PlacedLayers(costs, solution)


def every_placement(costs: CostModel) -> Iterator[PlacedLayers]:
    """Yield all placements on all orders of some of the devices, by layers of each bitwidth."""
    layers, choices = costs.shape.layers, len(costs.options.bits)
    devices = costs.cluster.devices
    for stages in range(1, len(devices) + 1):
        cells = list(_shares(layers, stages * choices))
        for order in itertools.permutations(devices, stages):
            for cell in cells:
                counts = [cell[j * choices : (j + 1) * choices] for j in range(stages)]
                if all(map(sum, counts)):
                    yield placement_of(costs, order, counts)


def _shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide a number into so many parts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in _shares(total - first, parts - 1))

"""Layers on devices in stage order, and whether requests in flight have room there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from planner.cluster.device import Device
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel, expanded
from planner.latency_bound.stage_times import PipelineTimes
from planner.latency_bound.steady_state.grid_times import GridTimes
from planner.micro_batches import MicroBatches
from planner.plan.builder import Solution, solution_quality
from planner.simulation.simulation import OccupiedStages, occupied_stages
from planner.workload import Workload


class Placement:
    """The assignment of `solution`, and its times and room for any schedule; `costs` are those that
    it was found with.
    """

    def __init__(self, costs: CostModel, solution: Solution) -> None:
        self.costs, self.solution = solution.costs(costs), solution
        first_layer, self.bitwidth = expanded(solution.assignment, costs.options.group)
        self.stages: OccupiedStages = occupied_stages(solution.devices, first_layer)

    @cached_property
    def times(self) -> GridTimes:
        """Seconds of passes on the stages, quick enough for a search."""
        return GridTimes(self.exact_times)

    @cached_property
    def exact_times(self) -> PipelineTimes:
        """Seconds of passes on the stages, as the plan has them."""
        stages = self.stages
        return PipelineTimes(self.costs, stages.devices, stages.first_layer, self.bitwidth)

    @cached_property
    def omega(self) -> float:
        """Summed sensitivity of the layers' bitwidths."""
        return solution_quality(self.costs, self.solution)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in stage order."""
        return self.stages.devices

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each stage [N]."""
        return tuple(stop - start for start, stop in pairwise(self.stages.first_layer))

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal placements."""
        names = tuple(device.member_names for device in self.devices)
        return names, self.stages.first_layer, self.bitwidth, self.costs.head_on_first

    def has_room(self, workload: Workload, sizes: MicroBatches) -> bool:
        """Whether every stage has room for requests of `workload` in micro-batches of `sizes`."""
        costs = replace(self.costs, workload=workload)
        for j, (device, layers) in enumerate(zip(self.devices, self.layer_counts, strict=True)):
            taken = self._weights[j] + layers * costs.kv_bytes_per_layer(device)
            if taken > costs.limit_bytes(device):
                return False
            if taken + costs.fixed_memory(self.devices, j, sizes).total > costs.limit_bytes(device):
                return False
        return True

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        """Bytes of the layers of each stage [N]."""
        costs, bounds = self.costs, self.stages.first_layer
        bits = [costs.options.bits[choice] for choice in self.bitwidth]
        weights = []
        for j, device in enumerate(self.devices):
            shape, dtype = costs.shape_on(device), costs.dtype(device)
            mine = bits[bounds[j] : bounds[j + 1]]
            weights.append(sum(layer_weight_bytes(shape, b, device, dtype) for b in mine))
        return tuple(weights)

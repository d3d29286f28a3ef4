"""Layers on devices in stage order: times, room, and how keys and values go between two of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from planner.cluster.device import Device
from planner.costs.communication import handover_terms
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel, expanded
from planner.costs.preemption import HostCopies, cache_tensors
from planner.latency_bound.stage_times import GridTimes, PipelineTimes
from planner.latency_bound.waa_sides import Handover, StageCopies
from planner.micro_batches import MicroBatches
from planner.plan.builder import Solution, solution_quality
from planner.simulation.simulation import OccupiedStages, occupied_stages
from planner.workload import Workload


class PlacedLayers:
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


Need = tuple[int, ...]


class KnownRoom:
    """Remembers what `has_room` said of needs, none of which takes less when a number rises."""

    def __init__(self, has_room: Callable[[Need], bool]) -> None:
        self._has_room = has_room
        self._known: dict[Need, bool] = {}
        self._most: list[Need] = []
        self._too_much: list[Need] = []

    def __call__(self, need: Need) -> bool:
        if need not in self._known:
            self._known[need] = self._asked(need)
        return self._known[need]

    def _asked(self, need: Need) -> bool:
        if any(_covers(each, need) for each in self._most):
            return True
        if any(_covers(need, each) for each in self._too_much):
            return False
        if self._has_room(need):
            self._most = [each for each in self._most if not _covers(need, each)] + [need]
            return True
        self._too_much = [each for each in self._too_much if not _covers(each, need)] + [need]
        return False


def _covers(more: Need, less: Need) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def handover_of(prefill: PlacedLayers, decode: PlacedLayers) -> Handover:
    """The handover between placements of all layers. Nodes send at once what they hold, each over
    its own link, and the slowest one counts.
    """
    cluster = prefill.costs.cluster
    message_s: dict[str, float] = defaultdict(float)
    token_s: dict[str, float] = defaultdict(float)
    for sender, receiver in zip(_owners(prefill), _owners(decode), strict=True):
        latency_s, byte_s = handover_terms(cluster, sender, receiver)
        message_s[sender.node] = max(message_s[sender.node], latency_s)
        token_s[sender.node] += byte_s * _token_bytes(prefill, sender)
    return Handover(
        _copies(prefill), _copies(decode), max(message_s.values()), max(token_s.values())
    )


def _owners(placement: PlacedLayers) -> list[Device]:
    """The device of each layer [L]."""
    counted = zip(placement.devices, placement.layer_counts, strict=True)
    return [device for device, layers in counted for _ in range(layers)]


def _copies(placement: PlacedLayers) -> StageCopies:
    """The copies of each stage; the ranks of a group copy theirs at once."""
    kv_bits = placement.costs.kv_bits
    return StageCopies.of(
        [
            HostCopies(
                layers * _token_bytes(placement, device) / device.degree,
                cache_tensors(kv_bits, layers),
                device.host_link_bytes_per_s,
            )
            for device, layers in zip(placement.devices, placement.layer_counts, strict=True)
        ]
    )


def _token_bytes(placement: PlacedLayers, device: Device) -> float:
    """Bytes of a token's keys and values in a layer, of all ranks of a device."""
    costs = placement.costs
    return device.degree * costs.kv_bytes_per_layer(device) / costs.workload.kv_tokens

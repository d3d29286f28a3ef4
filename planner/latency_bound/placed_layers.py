"""Layers on devices in stage order: times, room, the way between two sides, and how devices are
divided between these.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.cluster.device import Device
from planner.cluster.spec import equal_devices
from planner.costs.communication import HostCopies, cache_tensors, handover_terms
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel, expanded
from planner.costs.pass_times import OccupiedStages, PassTable, occupied_stages
from planner.latency_bound.timeline import GridTimes
from planner.latency_bound.waa_sides import Handover, StageCopies
from planner.plan.builder import Solution, solution_quality
from planner.scheduling import ScheduleKind
from planner.search.fitting import first_sets
from planner.search.in_flight import JobSearch
from planner.workload import Job, MicroBatches, Workload
from quant.common.errors import DoesNotFitError


class PlacedLayers:
    """The assignment of `solution`, found with `costs`, and its times and room for any schedule."""

    def __init__(self, costs: CostModel, solution: Solution) -> None:
        self.costs, self.solution = solution.costs(costs), solution
        first_layer, self.bitwidth = expanded(solution.assignment, costs.options.group)
        self.stages: OccupiedStages = occupied_stages(solution.devices, first_layer)

    @cached_property
    def times(self) -> GridTimes:
        return GridTimes(self.exact_times)

    @cached_property
    def exact_times(self) -> PassTable:
        stages = self.stages
        return PassTable.of(self.costs, stages.devices, stages.first_layer, self.bitwidth)

    @cached_property
    def omega(self) -> float:
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


def most_requests(costs: CostModel, job: Job, clock: Callable[[], float], sets: int) -> int:
    """The most requests in flight that one of the first so many `sets` of devices has room for; 0
    where not even one has.
    """
    one = costs.with_in_flight(job, 1)
    room = JobSearch(costs, job, clock)
    try:
        return max(room.most(devices) for devices in first_sets(one)[:sets])
    except DoesNotFitError:
        return 0


def handover_of(prefill: PlacedLayers, decode: PlacedLayers) -> Handover:
    """The handover between placements of all layers; nodes send at once and the slowest counts."""
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
    costs = placement.costs
    return device.degree * costs.kv_bytes_per_layer(device) / costs.workload.kv_tokens


MOST_DIVISIONS = 512
"""Divisions that are looked at: of larger clusters, devices go to a side in steps."""

TRIED_ALIKE, TRIED_MIXED = 2, 6
"""Divisions for which layers are placed, of equal devices and of different ones."""

PREFILL_TOKENS, DECODING = 2048, 64
"""Tokens of a prefill and requests of a decode step by which devices are compared."""


@dataclass(frozen=True)
class PhaseDivision:
    prefill: tuple[Device, ...]
    decode: tuple[Device, ...]


def balanced_divisions(kind: ScheduleKind, costs: CostModel, job: Job) -> list[PhaseDivision]:
    """The divisions to try, first the best balanced by what the kind goes by (ExeGPT section 4.1).

    WAA-C goes by computing time: both sides should serve equally many requests per second. WAA-M
    goes by memory: both should be filled alike. With equal devices that is a share of their number;
    the printed floors leave a device over, so the two numbers nearest to the share are tried. Where
    kinds differ, every number of each kind may prefill, so that devices rich in computing can go to
    one side and those rich in bandwidth to the other.
    """
    found = list(divisions(equal_devices(costs.cluster)))
    imbalance = _by_computing(costs, job) if kind == "waa-c" else _by_memory(costs, job)
    kinds = {device.cost_kind for device in costs.cluster.devices}
    tried = TRIED_ALIKE if len(kinds) == 1 else TRIED_MIXED
    return sorted(found, key=imbalance)[:tried]


def divisions(pools: Sequence[Sequence[Device]]) -> Iterator[PhaseDivision]:
    """Yield the divisions with some of each pool on either side, none empty; any number where these
    are few.
    """
    steps = 1
    while math.prod(len(_counts(len(pool), steps)) for pool in pools) > MOST_DIVISIONS:
        steps *= 2
    for counts in itertools.product(*(_counts(len(pool), steps) for pool in pools)):
        chosen = list(zip(pools, counts, strict=True))
        prefill = tuple(device for pool, count in chosen for device in pool[:count])
        decode = tuple(device for pool, count in chosen for device in pool[count:])
        if prefill and decode:
            yield PhaseDivision(prefill, decode)


def _counts(most: int, step: int) -> list[int]:
    return sorted({*range(0, most + 1, step), most})


def _by_computing(costs: CostModel, job: Job) -> Callable[[PhaseDivision], float]:
    rates = {device.name: _rates(costs, job, device) for device in costs.cluster.devices}

    def imbalance(division: PhaseDivision) -> float:
        prefill = sum(rates[device.name][0] for device in division.prefill)
        decode = sum(rates[device.name][1] for device in division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _rates(costs: CostModel, job: Job, device: Device) -> tuple[float, float]:
    """Requests per second that a device with all layers prefills, and decodes, at the fastest
    bitwidth for each.
    """
    lengths, latency, dtype = job.lengths, costs.latency, costs.dtype(device)
    prompt, context = round(lengths.mean_prompt), round(lengths.mean_context)
    at_once = max(1, PREFILL_TOKENS // prompt)
    bits = costs.options.bits
    prefill_s = min(latency.layer_prefill_s(device, b, at_once, prompt, dtype) for b in bits)
    step_s = min(latency.layer_decode_s(device, b, DECODING, context, dtype) for b in bits)
    steps = max(lengths.mean_output - 1, 1e-3)
    layers = costs.shape.layers
    return at_once / (layers * prefill_s), DECODING / (layers * step_s * steps)


def _by_memory(costs: CostModel, job: Job) -> Callable[[PhaseDivision], float]:
    """How unlike the filled shares of both sides are, with as many requests as fill all devices.
    Both have all layers: at the most bits with which two copies fill at most half of the memory,
    else the fewest.
    """
    devices = costs.cluster.devices
    first, offered = devices[0], _bytes(costs, devices)
    weights = [_weights(costs, first, bits) for bits in costs.options.bits]
    copy = max((each for each in weights if 4 * each <= offered), default=min(weights))
    token = costs.shape.layers * costs.kv_bytes_per_layer(first) / costs.workload.kv_tokens
    prompts, whole = job.lengths.mean_prompt, job.lengths.mean_reserved
    decoding = max(1.0, job.lengths.mean_output - 1)  # for each newcomer
    newcomers = max(0.0, offered - 2 * copy) / (token * (prompts + decoding * whole))

    def imbalance(division: PhaseDivision) -> float:
        prefill = (copy + newcomers * token * prompts) / _bytes(costs, division.prefill)
        decode = (copy + newcomers * token * decoding * whole) / _bytes(costs, division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _bytes(costs: CostModel, devices: Sequence[Device]) -> float:
    return float(sum(costs.limit_bytes(device) for device in devices))


def _weights(costs: CostModel, device: Device, bits: int) -> float:
    dtype = costs.dtype(device)
    return costs.shape.layers * layer_weight_bytes(costs.shape, bits, device, dtype)

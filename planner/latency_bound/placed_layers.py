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
from planner.cluster.groups import equal_devices
from planner.costs.communication import HostCopies, cache_tensors, handover_terms
from planner.costs.model import CostModel
from planner.costs.pass_times import OccupiedStages, PassTable, link_terms, occupied_stages
from planner.costs.stored_bytes import kept_of_requests, layer_weight_bytes, model_weight_bytes
from planner.latency_bound.timeline import GridTimes
from planner.latency_bound.waa_sides import Handover, StageCopies
from planner.plan.builder import Solution, solution_quality
from planner.scheduling import ScheduleKind
from planner.search.fitting import first_sets
from planner.search.in_flight import JobSearch
from planner.workload import Job, MicroBatches, Workload
from quant.common.errors import DoesNotFitError

DRIVER_S = 2e-3
"""Seconds from the end of a decode step on the last stage to the next one's beginning on the first,
by way of the driver: the least of 900 steps, in traces of runs on two CPUs (AMD EPYC, Zen 3)."""


class _DrivenPasses(PassTable):
    """With the driver's part, which steps of CPUs are not long enough to do without."""

    @cached_property
    def _links(self) -> list[tuple[float, float, float]]:
        *onward, (latency_s, token_s, request_s) = link_terms(self.costs, self.devices)
        last = self.devices[-1]
        driver_s = DRIVER_S if last.accelerator.is_cpu and not last.emulated else 0.0
        return [*onward, (latency_s + driver_s, token_s, request_s)]


class PlacedLayers:
    """The assignment of `solution`, found with `costs`, and its times and room for any schedule."""

    def __init__(self, costs: CostModel, solution: Solution) -> None:
        self.costs, self.solution = solution.costs(costs), solution
        first_layer, self.bitwidth = self.costs.placing.expanded(solution.assignment)
        self.stages: OccupiedStages = occupied_stages(solution.devices, first_layer)

    @cached_property
    def times(self) -> GridTimes:
        return GridTimes(self.exact_times)

    @cached_property
    def exact_times(self) -> PassTable:
        stages = self.stages
        return _DrivenPasses.of(self.costs, stages.devices, stages.first_layer, self.bitwidth)

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

    def kinds(self, stage: int) -> tuple[int, ...]:
        """The kind of each layer of a stage."""
        first, stop = self.stages.first_layer[stage : stage + 2]
        return self.costs.shape.kind_of_layer[first:stop]

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal placements."""
        names = tuple(device.member_names for device in self.devices)
        return names, self.stages.first_layer, self.bitwidth, self.costs.head_on_first

    def has_room(self, workload: Workload, sizes: MicroBatches) -> bool:
        costs = replace(self.costs, workload=workload)
        for j, device in enumerate(self.devices):
            kept = (costs.kv_bytes_per_layer(device, kind) for kind in self.kinds(j))
            taken = self._weights[j] + sum(kept)
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
            shapes, dtype = costs.shape_on(device).kind_shapes, costs.dtype(device)
            mine = zip(self.kinds(j), bits[bounds[j] : bounds[j + 1]], strict=True)
            weights.append(sum(layer_weight_bytes(shapes[k], b, device, dtype) for k, b in mine))
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
        return max(room.most(devices) for devices in itertools.islice(first_sets(one), sets))
    except DoesNotFitError:
        return 0


def handover_of(prefill: PlacedLayers, decode: PlacedLayers) -> Handover:
    """The handover between placements of all layers; nodes send at once and the slowest counts."""
    cluster, costs = prefill.costs.cluster, prefill.costs
    message_s: dict[str, float] = defaultdict(float)
    token_s: dict[str, float] = defaultdict(float)
    request_s: dict[str, float] = defaultdict(float)
    owners = zip(_owners(prefill), _owners(decode), costs.shape.kind_of_layer, strict=True)
    for sender, receiver, kind in owners:
        latency_s, byte_s = handover_terms(cluster, sender, receiver)
        message_s[sender.node] = max(message_s[sender.node], latency_s)
        token_bytes, state_bytes = kept_bytes(costs, sender, (kind,))
        token_s[sender.node] += byte_s * token_bytes
        request_s[sender.node] += byte_s * state_bytes
    slowest = (max(each.values()) for each in (message_s, token_s, request_s))
    return Handover(_copies(prefill), _copies(decode), *slowest)


def _owners(placement: PlacedLayers) -> list[Device]:
    """The device of each layer [L]."""
    counted = zip(placement.devices, placement.layer_counts, strict=True)
    return [device for device, layers in counted for _ in range(layers)]


def _copies(placement: PlacedLayers) -> StageCopies:
    costs, copies = placement.costs, []
    for j, device in enumerate(placement.devices):
        token_bytes, state_bytes = kept_bytes(costs, device, placement.kinds(j))
        own = [costs.shape.kind_shapes[kind] for kind in placement.kinds(j)]
        copies.append(
            HostCopies(
                token_bytes / device.degree,
                cache_tensors(costs.kv_bits, own),
                device.host_link_bytes_per_s,
                state_bytes / device.degree,
            )
        )
    return StageCopies.of(copies)


def kept_bytes(costs: CostModel, device: Device, kinds: Sequence[int]) -> tuple[float, float]:
    """Bytes that layers of these kinds on a device, or on all ranks of a group, keep of a token and
    of a request.
    """
    shapes, dtype = costs.shape_on(device).kind_shapes, costs.dtype(device)
    kept = [kept_of_requests(each, costs.workload, costs.kv_bits, dtype) for each in shapes]
    token, state = (sum(kept[kind][place] for kind in kinds) for place in (0, 1))
    return device.degree * token, device.degree * state


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
    lengths, dtype, shared = job.lengths, costs.dtype(device), job.heads.shared_tokens
    prompt, context = round(lengths.mean_prompt), round(lengths.mean_context)
    at_once = max(1, int(PREFILL_TOKENS // job.computed_tokens))
    prefill_s = step_s = 0.0
    for kind, count in enumerate(costs.shape.kind_counts):
        layer, bits = costs.latency.of_kind(kind), costs.options.bits
        prefills = (layer.layer_prefill_s(device, b, at_once, prompt, dtype, shared) for b in bits)
        steps = (layer.layer_decode_s(device, b, DECODING, context, dtype) for b in bits)
        prefill_s += count * min(prefills)
        step_s += count * min(steps)
    each = max(lengths.mean_output - 1, 1e-3)
    return at_once / prefill_s, DECODING / (step_s * each)


def _by_memory(costs: CostModel, job: Job) -> Callable[[PhaseDivision], float]:
    """How unlike the filled shares of both sides are, with as many requests as fill all devices.
    Both have all layers: at the most bits with which two copies fill at most half of the memory,
    else the fewest.
    """
    devices = costs.cluster.devices
    first, offered = devices[0], _bytes(costs, devices)
    weights = [_weights(costs, first, bits) for bits in costs.options.bits]
    copy = max((each for each in weights if 4 * each <= offered), default=min(weights))
    token, state = kept_bytes(costs, first, costs.shape.kind_of_layer)
    prompts, whole = job.lengths.mean_prompt, job.lengths.mean_reserved
    decoding = max(1.0, job.lengths.mean_output - 1)  # for each newcomer
    begun, going_on = token * prompts + state, decoding * (token * whole + state)
    newcomers = max(0.0, offered - 2 * copy) / (begun + going_on)

    def imbalance(division: PhaseDivision) -> float:
        prefill = (copy + newcomers * begun) / _bytes(costs, division.prefill)
        decode = (copy + newcomers * going_on) / _bytes(costs, division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _bytes(costs: CostModel, devices: Sequence[Device]) -> float:
    return float(sum(costs.limit_bytes(device) for device in devices))


def _weights(costs: CostModel, device: Device, bits: int) -> float:
    return model_weight_bytes(costs.shape, bits, device, costs.dtype(device))

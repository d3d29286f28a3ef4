"""Placements for schedules of kinds `waa-c` and `waa-m`: some stages prefill, and others decode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from planner.cluster.device import Device
from planner.cluster.groups import equal_devices
from planner.costs.model import CostModel
from planner.costs.stored_bytes import model_weight_bytes
from planner.latency_bound.alternation import (
    BEYOND,
    MOST_GROUPS,
    NEAR,
    SETTLING,
    KindPlanner,
    PlacingGoal,
    ScheduleSpace,
    scaled_count,
)
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.placed_layers import (
    LEAST_STEPS,
    PhaseDivision,
    PlacedLayers,
    WaaSides,
    handover_of,
    kept_bytes,
    most_requests,
)
from planner.latency_bound.schedules import (
    BoundRequest,
    cycle_of,
    estimated_waa,
    most_in_group,
    prefill_rate,
    prefill_sizes,
    round_s,
    shortest_round,
    waa_schedule,
)
from planner.latency_bound.simulate import ObservedRequests, RequestWatch, simulate_waa
from planner.latency_bound.timeline import Performance, Timeline, unlimited
from planner.latency_bound.waa_timeline import waa_timeline
from planner.schedule.job_passes import SteadyCycle
from planner.schedule.turns import SHORT_PROMPTS, WAITING
from planner.scheduling import STATIC, RequestSchedule, ScheduleKind
from planner.workload import MAX_REQUESTS, Job, MicroBatches, Workload
from quant.common.errors import InfeasibleError

SHARES = (0.5, 1 / 8)
"""Shares of the requests that stages which decode have room for, to begin with."""

SLACK = (0.25, 4.0)
"""Least and greatest factor by which a side that waits for the other one counts quality more."""


@dataclass(frozen=True, eq=False)
class WaaPlanner(KindPlanner):
    def starts(self) -> Iterator[PlacingGoal]:
        """Yield for each division some requests in flight, and one; for the best balanced also
        equal layers.
        """
        for division in self._divisions:
            most = self._most(division)
            for share in SHARES if most > 1 else ():
                yield PlacingGoal(self._schedule(max(1, int(share * most))), division=division)
        for division in self._divisions[:2]:
            yield PlacingGoal(self._schedule(1), division=division)
        for division in self._divisions[:1]:
            few = self._schedule(max(1, int(SHARES[-1] * self._most(division))))
            for bits in self.costs.bits:
                yield PlacingGoal(few, division=division, usable_bits=(bits,))

    def placed(self, start: PlacingGoal, theta: float, limit_s: float) -> WaaSpace:
        """The best layers of either side, with half of `theta` seconds a unit each;
        InfeasibleError.
        """
        division, schedule = start.division, start.schedule
        if division is None:
            raise InfeasibleError("no division of the devices")
        prefill, decode = (
            replace(self.costs.on(devices), theta=theta / 2 * slack)
            for devices, slack in zip((division.prefill, division.decode), start.slack, strict=True)
        )
        prefill = _prefilling(prefill, schedule, self.job, limit_s)
        decode = _decoding(decode, schedule, self.job, limit_s, start.free)
        of_decode, of_prefill = (self._best_layers(costs, start) for costs in (decode, prefill))
        return WaaSpace(self.kind, division, of_decode, of_prefill, self.job, self.request)

    @cached_property
    def _divisions(self) -> list[PhaseDivision]:
        return balanced_divisions(self.kind, self.costs, self.job)

    def _schedule(self, requests: int) -> RequestSchedule:
        return waa_schedule(self.kind, self.request.lengths, requests, 1, 1)

    def _most(self, division: PhaseDivision) -> int:
        """The most requests that memory has room for where they decode; 0 where not even one."""
        return most_requests(self.costs.on(division.decode), self.job, self.clock, 1)


def _prefilling(costs: CostModel, schedule: RequestSchedule, job: Job, limit_s: float) -> CostModel:
    size = prefill_sizes(schedule.prefill_requests, job.computed_tokens)[-1]
    largest = replace(schedule, prefill_micro_batch=size)
    workload = prompts_in_flight(largest, len(costs.cluster.devices), job)
    batch = workload.global_batch
    cycle = SteadyCycle(schedule.prefill_requests, 0, batch, job.prompts, 0.0, 1)
    options = replace(costs.options, policy=STATIC, decode_micro_batch=1, search_time_limit=limit_s)
    return replace(costs, workload=workload, cycle=cycle, options=options)


def _decoding(
    costs: CostModel, schedule: RequestSchedule, job: Job, limit_s: float, free: bool
) -> CostModel:
    options = replace(
        costs.options,
        prefill_micro_batch=1,
        decode_micro_batch=None if free else most_in_group(schedule),
        search_time_limit=limit_s,
    )
    workload = costs.in_flight(job, schedule.most_in_flight)
    return replace(costs, workload=workload, cycle=cycle_of(schedule, job, free), options=options)


def prompts_in_flight(schedule: RequestSchedule, stages: int, job: Job) -> Workload:
    """What stages that prefill have in flight, all as the longest prompt: a turn on each, or as
    many as the runtime has in micro-batches.
    """
    under_way = SHORT_PROMPTS * schedule.prefill_micro_batch * (stages + WAITING)
    requests = min(MAX_REQUESTS, schedule.prefill_requests * stages, under_way)
    return Workload(requests, job.lengths.longest_prompt, 1, heads=job.heads)


@dataclass(frozen=True, eq=False)
class WaaSpace(ScheduleSpace):
    """Layers on devices that prefill and on others that decode; the control is the number of
    requests that decode.
    """

    kind: ScheduleKind
    division: PhaseDivision
    decode: PlacedLayers
    prefill: PlacedLayers
    job: Job
    request: BoundRequest

    @property
    def placements(self) -> tuple[PlacedLayers, ...]:
        return self.decode, self.prefill

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        most = 1
        while most < self.job.prompts and self._decodes(self._of(2 * most)):
            most *= 2
        return (range(1, min(2 * most, self.job.prompts) + 1),)

    def around(self, point: ControlPoint) -> tuple[range, ...]:
        whole = self.ranges[0]
        return (range(whole.start, min(whole.stop, ceil(BEYOND * point[0]) + 1)),)

    def has_room(self, schedule: RequestSchedule) -> bool:
        return self._decodes(schedule) and self._prefills(schedule)

    def timeline(self, schedule: RequestSchedule, quantile: float) -> Timeline:
        return waa_timeline(self.sides, schedule, quantile)

    def observed(
        self, schedule: RequestSchedule, count: int, check_time: Callable[[], None] = unlimited
    ) -> ObservedRequests:
        watch = RequestWatch(SETTLING * schedule.decode_requests, count, check_time)
        generator, n_slots = np.random.default_rng(0), self._reservable_tokens(schedule)
        return simulate_waa(self.sides, schedule, watch, generator, n_slots)

    def _reservable_tokens(self, schedule: RequestSchedule) -> int:
        return self.decode.costs.in_flight(self.job, schedule.most_in_flight).reservable_tokens

    def start(self, schedule: RequestSchedule) -> PlacingGoal:
        """To place layers again; a side faster than it need be may have more bits, and counts
        quality more.
        """
        rate = self.estimate(schedule).requests_per_s
        low, high = SLACK
        prefill, decode = (min(high, max(low, each / rate)) for each in self._rates(schedule))
        return PlacingGoal(schedule, free=False, division=self.division, slack=(prefill, decode))

    def near(self, schedule: RequestSchedule) -> Iterator[PlacingGoal]:
        """Yield fewer and more requests that decode, one newcomer more, and quality counting
        otherwise.
        """
        steps, newcomers = self.request.lengths.outputs.mean - 1, schedule.prefill_requests
        counts = [scaled_count(schedule.decode_requests, ratio) for ratio in NEAR]
        for requests in (*counts, max(1, ceil((newcomers + 1) * steps))):
            other = replace(self._of(requests), prefill_micro_batch=1)
            yield PlacingGoal(other, free=False, division=self.division)
        low, high = SLACK
        for slack in ((low, high), (high, low)):
            yield PlacingGoal(schedule, free=False, division=self.division, slack=slack)

    def crossed(self, others: Sequence[ScheduleSpace]) -> Iterator[ScheduleSpace]:
        """Yield either side with the other sides of placements on the same devices."""
        for other in others:
            if isinstance(other, WaaSpace) and other.division == self.division:
                yield replace(self, decode=other.decode)
                yield replace(self, prefill=other.prefill)

    @cached_property
    def sides(self) -> WaaSides:
        handover = handover_of(self.prefill, self.decode)
        return WaaSides(self.prefill.times, self.decode.times, handover, self.request.lengths)

    def fitted(self, point: ControlPoint) -> tuple[RequestSchedule, bool]:
        """The schedule of a point, in prefill micro-batches of most requests, then least latency;
        whether any fits.
        """
        schedule = self._of(*point)
        fits = self._decodes(schedule)
        sizes = prefill_sizes(schedule.prefill_requests, self.job.computed_tokens)
        tried = [replace(schedule, prefill_micro_batch=size) for size in sizes]
        roomy = [each for each in tried if fits and self._prefills(each)]
        return max(roomy or tried[:1], key=self._merit), bool(roomy)

    def _merit(self, schedule: RequestSchedule) -> tuple[float, float]:
        found = self.estimate(schedule)
        return round(found.requests_per_s, 9), -found.latency_s

    def estimate(self, schedule: RequestSchedule) -> Performance:
        return estimated_waa(self.sides, schedule, self.request.quantile)

    def _of(self, requests: int) -> RequestSchedule:
        times, context = self.decode.times, self.job.lengths.mean_context
        most = min(requests, MOST_GROUPS * len(self.decode.devices))
        groups = shortest_round(times, requests, context, most)
        return waa_schedule(self.kind, self.request.lengths, requests, groups, 1)

    def _decodes(self, schedule: RequestSchedule) -> bool:
        workload = self.decode.costs.in_flight(self.job, schedule.most_in_flight)
        return self.decode.has_room(workload, MicroBatches(1, most_in_group(schedule)))

    def _prefills(self, schedule: RequestSchedule) -> bool:
        workload = prompts_in_flight(schedule, len(self.prefill.devices), self.job)
        return self.prefill.has_room(workload, MicroBatches(schedule.prefill_micro_batch, 1))

    def _rates(self, schedule: RequestSchedule) -> tuple[float, float]:
        """Requests per second that either side, prefill and decode, could serve by itself."""
        size, prompts = schedule.prefill_micro_batch, self.request.lengths.prompts
        groups, decoding = schedule.decode_micro_batches, schedule.decode_requests
        context, steps = self.job.lengths.mean_context, self.request.lengths.outputs.mean - 1
        together_s = round_s(self.sides.restore_and_decode, groups, decoding / groups, context)
        prefilled = prefill_rate(self.sides.prefill_and_keep, prompts, size)
        return prefilled, decoding / max(steps, LEAST_STEPS) / together_s


MOST_DIVISIONS = 512
"""Divisions that are looked at: of larger clusters, devices go to a side in steps."""

TRIED_ALIKE, TRIED_MIXED = 2, 6
"""Divisions for which layers are placed, of equal devices and of different ones."""

PREFILL_TOKENS, DECODING = 2048, 64
"""Tokens of a prefill and requests of a decode step by which devices are compared."""


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
    rates = {device.name: _served_by(costs, job, device) for device in costs.cluster.devices}

    def imbalance(division: PhaseDivision) -> float:
        prefill = sum(rates[device.name][0] for device in division.prefill)
        decode = sum(rates[device.name][1] for device in division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _served_by(costs: CostModel, job: Job, device: Device) -> tuple[float, float]:
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

"""Our RRA and WAA on equal GPUs, found by branch and bound on every layout (ExeGPT section 4.1).

Under WAA GPUs that decode come first in the cluster, those that prefill last. Tensor-parallel
groups of one degree are formed among those that decode first, then among the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from benchmarks.reproduction.latency_bounds.models import BITS, Layout, Pipeline, Work, layouts_of
from benchmarks.reproduction.latency_bounds.setting import (
    QUANTILE,
    Bounded,
    Setting,
    bounded_performance,
    waa_decode_requests,
)
from planner.costs.communication import HostCopies, cache_tensors
from planner.costs.stored_bytes import kv_token_bytes, layer_weight_bytes
from planner.latency_bound.branch_and_bound import ControlPoint
from planner.latency_bound.placed_layers import Handover, StageCopies, WaaSides
from planner.latency_bound.rra_timeline import rra_timeline
from planner.latency_bound.schedules import (
    Completions,
    rra_schedule,
    shortest_turns,
    waa_schedule,
)
from planner.latency_bound.simulate import (
    ObservedRequests,
    RequestWatch,
    simulate_rra,
    simulate_waa,
)
from planner.latency_bound.timeline import Performance, Timeline
from planner.latency_bound.waa_timeline import waa_timeline
from planner.lengths import RequestLengths
from planner.scheduling import SCHEDULE_TOLERANCE, RequestSchedule, ScheduleKind
from planner.workload import HOLES

EVERY_UP_TO, GROWTH = 24, 1.04
"""Newcomers and decode steps up to here are all tried; from there on each is larger by this."""


@dataclass(frozen=True, eq=False)
class RraSchedules:
    """Schedules of RRA on one layout.

    A point is the place of newcomers (B_E) in `newcomers`, which ascend, and that of decode steps
    (N_D) in `steps`, which descend: so both raise throughput and latency. There is a group of
    requests for each stage, as far as there are newcomers for all of them. Of latency `quantile` is
    that over all requests, or without one the output is bounded of which `setting` says so.
    """

    setting: Setting
    layout: Layout
    pipeline: Pipeline
    quantile: float | None = None
    known: dict[ControlPoint, Performance] = field(default_factory=dict)
    _prefills: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[range, range]:
        return range(len(self.newcomers)), range(len(self.steps))

    @cached_property
    def newcomers(self) -> tuple[int, ...]:
        """Newcomers that are tried, up to those that have room where a turn comes only after the
        longest output.
        """
        lengths = self.setting.lengths
        phases = Completions(lengths.outputs, lengths.outputs.longest).phases
        slots = self.pipeline.token_slots(Work(1, 1.0, 1, 1))
        most = int(slots / reserved_tokens(lengths, phases))
        return tuple(numbers_up_to(max(1, most)))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Decode steps that are tried: among others all by which the bounded output ends with the
        last step of a phase, where latency is least.
        """
        bounded = max(1, self.setting.bounded_output - 1)
        longest = max(1, self.setting.lengths.outputs.longest - 1)
        even = {math.ceil(bounded / phases) for phases in range(1, bounded + 1)}
        return tuple(sorted({*numbers_up_to(longest), *even}, reverse=True))

    def label(self, point: ControlPoint) -> str:
        return f"B_E={self.newcomers[point[0]]}, N_D={self.steps[point[1]]}{self.layout.label}"

    def performance(self, point: ControlPoint) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""
        return self.performance_of(self.newcomers[point[0]], self.steps[point[1]])

    def performance_of(self, newcomers: int, steps: int) -> Performance:
        schedule, fits = self.schedule(newcomers, steps)
        timeline = self.timeline(schedule, self.setting.lengths)
        return bounded_performance(timeline, self.setting, self.quantile, fits)

    def timeline(self, schedule: RequestSchedule, lengths: RequestLengths) -> Timeline:
        """The timeline of a schedule for requests of these lengths."""
        return rra_timeline(self.pipeline.grid_times, lengths, schedule, self.quantile or QUANTILE)

    def observed(
        self, schedule: RequestSchedule, watch: RequestWatch, seed: int
    ) -> ObservedRequests:
        """Simulate the events of a schedule, at the times before the grid."""
        generator = np.random.default_rng(seed)
        return simulate_rra(self.pipeline.times, self.setting.lengths, schedule, watch, generator)

    def schedule_at(self, point: ControlPoint) -> RequestSchedule:
        return self.schedule(self.newcomers[point[0]], self.steps[point[1]])[0]

    def schedule(self, newcomers: int, steps: int) -> tuple[RequestSchedule, bool]:
        """The schedule with the best prefill micro-batch that has room, and whether any has."""
        lengths, groups = self.setting.lengths, min(len(self.pipeline.stages), newcomers)
        sizes = self._sizes(math.ceil(newcomers / groups), groups)
        schedule = rra_schedule(lengths, newcomers, steps, groups, sizes[0])
        for size in sizes:
            chosen = replace(schedule, prefill_micro_batch=size)
            if rra_has_room(self.pipeline, lengths, chosen):
                return chosen, True
        return schedule, False

    def _sizes(self, newcomers: int, groups: int) -> tuple[int, ...]:
        """Prefill micro-batches for so many newcomers of a group, the best one first."""
        if (newcomers, groups) not in self._prefills:
            times, lengths = self.pipeline.grid_times, self.setting.lengths
            found = shortest_turns(times, lengths, newcomers, groups)
            self._prefills[newcomers, groups] = found
        return self._prefills[newcomers, groups]


def rra_of(setting: Setting, quantile: float | None = None) -> Bounded:
    """RRA on every layout of the model's GPUs."""
    return Bounded(tuple(_rra_schedules(setting, quantile)))


def _rra_schedules(setting: Setting, quantile: float | None) -> Iterator[RraSchedules]:
    model = setting.model
    for layout in layouts_of(model, model.count):
        devices = model.costs.cluster.devices
        pipeline = Pipeline.of(model.costs, devices, layout, setting.lengths, setting.host_s)
        if pipeline is not None:
            yield RraSchedules(setting, layout, pipeline, quantile)


def numbers_up_to(most: int) -> Iterator[int]:
    """Yield ascending whole numbers to try, from 1 to `most`."""
    number = 1
    while number < most:
        yield number
        number = max(number + 1, round(GROWTH * number) if number >= EVERY_UP_TO else 0)
    yield most


def reserved_tokens(lengths: RequestLengths, requests: float) -> float:
    """Token slots for so many requests in flight: each reserves its prompt and the longest output,
    and groups may be larger than planned by their tolerance (as in `llmpq plan`).
    """
    each = lengths.prompts.mean + lengths.outputs.longest
    return (1 + SCHEDULE_TOLERANCE) * requests * each / (1 - HOLES)


def rra_has_room(pipeline: Pipeline, lengths: RequestLengths, schedule: RequestSchedule) -> bool:
    """Whether memory has room for the requests in flight of a schedule."""
    most = (1 + SCHEDULE_TOLERANCE) * schedule.decode_requests
    group = math.ceil(most / schedule.decode_micro_batches)
    size, longest = schedule.prefill_micro_batch, lengths.outputs.longest
    work = Work(size, lengths.prompts.mean, group, longest)
    return pipeline.token_slots(work) >= reserved_tokens(lengths, schedule.decode_requests)


TURNS_UNDER_WAY = 2
"""Turns of prompts that memory of the stages that prefill has room for: the one that runs, and the
one whose keys and values are handed over."""
LOADS = (1, 4, 16, 64)
"""Newcomers of a turn for which GPUs are divided by computing."""


@dataclass(frozen=True, eq=False)
class Divided:
    """The pipelines of both phases, and what handing over takes."""

    prefill: Pipeline
    decode: Pipeline

    @cached_property
    def handover(self) -> Handover:
        """From the memory of stages that prefill through the hosts to stages that decode: copies of
        each stage, and the network between nodes.
        """
        costs = self.prefill.costs
        dtype = costs.dtype(self.prefill.stages[0])
        token_bytes = costs.shape.layers * kv_token_bytes(costs.shape, BITS, dtype)
        nodes = {device.node for device in self.prefill.stages}
        apart = not nodes >= {device.node for device in self.decode.stages}
        network_s = token_bytes / costs.cluster.internode_bytes_per_s / len(nodes)
        return Handover(_copies(self.prefill), _copies(self.decode), 0.0, apart * network_s)

    def sides(self, lengths: RequestLengths) -> WaaSides:
        """Both sides on the grid that searches have, for requests of these lengths."""
        times = self.prefill.grid_times, self.decode.grid_times
        return WaaSides(*times, self.handover, lengths)


@dataclass(frozen=True, eq=False)
class WaaSchedules:
    """Schedules of WAA on one layout.

    Points are (requests that decode B_D,), which raises throughput and latency; a turn has as many
    newcomers (B_E) as end in a round, but at least one. Requests that decode are in as many groups
    (B_m) as make a round shortest, which is best for both. `quantile` as of RRA.
    """

    setting: Setting
    kind: ScheduleKind
    layout: Layout
    divided: Divided
    quantile: float | None = None
    known: dict[ControlPoint, Performance] = field(default_factory=dict)

    @property
    def ranges(self) -> tuple[range]:
        return (range(1, self._most_decoding() + 1),)

    def label(self, point: ControlPoint) -> str:
        """The controls of a point as in table 6, and the GPUs that prefill."""
        gpus = sum(device.degree for device in self.divided.prefill.stages)
        schedule = self.schedule_at(point)
        controls = f"B_E={schedule.prefill_requests}, B_D={point[0]}"
        groups = schedule.decode_micro_batches
        return f"{controls}, B_m={groups}{self.layout.label}, {gpus} prefill"

    def performance(self, point: ControlPoint) -> Performance:
        """The performance of a point; latency is infinite where requests have no room."""
        return self.performance_of(self.schedule_at(point))

    def performance_of(self, schedule: RequestSchedule) -> Performance:
        timeline = self.timeline(schedule, self.setting.lengths)
        fits = waa_has_room(self.divided, self.setting.lengths, schedule)
        return bounded_performance(timeline, self.setting, self.quantile, fits)

    def timeline(self, schedule: RequestSchedule, lengths: RequestLengths) -> Timeline:
        """The timeline of a schedule for requests of these lengths."""
        both, own = self.divided, self.setting.lengths
        sides = self._sides if lengths is own else both.sides(lengths)
        return waa_timeline(sides, schedule, self.quantile or QUANTILE)

    def observed(
        self, schedule: RequestSchedule, watch: RequestWatch, seed: int
    ) -> ObservedRequests:
        """Simulate the events of a schedule, at the times before the grid."""
        both = self.divided
        exact = WaaSides(both.prefill.times, both.decode.times, both.handover, self.setting.lengths)
        return simulate_waa(exact, schedule, watch, np.random.default_rng(seed))

    @cached_property
    def _sides(self) -> WaaSides:
        return self.divided.sides(self.setting.lengths)

    def schedule_at(self, point: ControlPoint) -> RequestSchedule:
        (decoding,) = point
        lengths = self.setting.lengths
        groups = shortest_round(self.divided.decode, lengths, decoding)
        schedule = waa_schedule(self.kind, lengths, decoding, groups, 1)
        newcomers, prefill = schedule.prefill_requests, self.divided.prefill
        size = shortest_turns(prefill.grid_times, lengths, newcomers, 1)[0]
        return replace(schedule, prefill_micro_batch=size)

    def point_of(self, newcomers: int) -> ControlPoint:
        """The point with so many newcomers of a turn."""
        return (max(1, round(waa_decode_requests(self.setting.lengths.outputs, newcomers))),)

    def _most_decoding(self) -> int:
        each = reserved_tokens(self.setting.lengths, 1.0)
        return max(1, int(self.divided.decode.token_slots(Work(1, 1.0, 1, 1)) / each))


def waa_has_room(divided: Divided, lengths: RequestLengths, schedule: RequestSchedule) -> bool:
    """Whether either side has room: for requests that decode as with RRA, for turns of prompts
    under way.
    """
    prompt, longest = lengths.prompts.mean, lengths.outputs.longest
    size = schedule.prefill_micro_batch
    turns = TURNS_UNDER_WAY * schedule.prefill_requests * prompt
    if divided.prefill.token_slots(Work(size, prompt, 1, 1)) < turns:
        return False
    group = math.ceil(schedule.decode_requests / schedule.decode_micro_batches)
    room = divided.decode.token_slots(Work(1, prompt, group, longest))
    return room >= reserved_tokens(lengths, schedule.decode_requests)


def waa_of(setting: Setting, quantile: float | None = None) -> Bounded:
    """WAA-C and WAA-M on every layout of the model's GPUs."""
    return Bounded(tuple(_waa_schedules(setting, quantile)))


def _waa_schedules(setting: Setting, quantile: float | None) -> Iterator[WaaSchedules]:
    for layout in layouts_of(setting.model, setting.model.count):
        for gpus, kind in sorted(divisions(setting, layout.degree).items()):
            divided = divided_of(setting, layout, gpus)
            if divided is not None:
                yield WaaSchedules(setting, kind, layout, divided, quantile)


def divisions(setting: Setting, degree: int) -> dict[int, ScheduleKind]:
    """Numbers of GPUs that prefill: by computing at several loads, and by memory. Beside the exact
    ones there are those that keep groups of GPUs whole.
    """
    count = setting.model.count
    shares: list[tuple[ScheduleKind, float]]
    shares = [("waa-c", computing_share(setting, load)) for load in LOADS]
    shares.append(("waa-m", memory_share(setting)))
    found: dict[int, ScheduleKind] = {}
    for kind, share in shares:
        for whole in (1, degree):
            gpus = min(count - whole, max(whole, whole * round(share * count / whole)))
            if 0 < gpus < count:
                found.setdefault(gpus, kind)
    return found


def divided_of(setting: Setting, layout: Layout, prefill_gpus: int) -> Divided | None:
    """Both pipelines of a layout; None where the groups do not come out even between them, or one
    has more stages than the model has layers.
    """
    costs, more = setting.model.costs, (setting.lengths, setting.host_s)
    devices, degree = costs.cluster.devices, layout.degree
    decode_gpus = len(devices) - prefill_gpus
    first = min(layout.grouped, decode_gpus // degree * degree)
    if layout.grouped - first > prefill_gpus // degree * degree:
        return None
    decode = Pipeline.of(costs, devices[:decode_gpus], Layout(degree, first), *more)
    own = devices[decode_gpus:][::-1]
    prefill = Pipeline.of(costs, own, Layout(degree, layout.grouped - first), *more)
    return None if decode is None or prefill is None else Divided(prefill, decode)


def computing_share(setting: Setting, newcomers: int) -> float:
    """The share of computing that is prefill with so many newcomers: C_E / (C_E + C_D)."""
    costs, lengths = setting.model.costs, setting.lengths
    device = costs.cluster.devices[0]
    dtype = costs.dtype(device)
    decoding = max(1, round(waa_decode_requests(lengths.outputs, newcomers)))
    prompt, context = lengths.prompts.mean, lengths.prompts.mean + lengths.outputs.mean / 2
    prefill_s = costs.latency.layer_prefill_s(device, BITS, newcomers, round(prompt), dtype)
    decode_s = costs.latency.layer_decode_s(device, BITS, decoding, round(context), dtype)
    return prefill_s / (prefill_s + decode_s)


def memory_share(setting: Setting) -> float:
    """The share of memory that the stages that prefill need, where all of it is in use."""
    costs, lengths = setting.model.costs, setting.lengths
    device = costs.cluster.devices[0]
    shape, dtype = costs.shape, costs.dtype(device)
    weights = shape.layers * layer_weight_bytes(shape, BITS, device, dtype)
    token = shape.layers * kv_token_bytes(shape, BITS, dtype)
    left = setting.model.count * costs.limit_bytes(device) - 2 * weights
    decode = reserved_tokens(lengths, waa_decode_requests(lengths.outputs, 1.0))
    prefill = TURNS_UNDER_WAY * lengths.prompts.mean
    newcomers = max(0.0, left / token / (decode + prefill))
    return (weights + newcomers * prefill * token) / (left + 2 * weights)


def _copies(pipeline: Pipeline) -> StageCopies:
    """Copies of keys and values between the memory of each stage and its host."""
    costs, copies = pipeline.costs, []
    counted = zip(pipeline.stages, pairwise(pipeline.first_layer), strict=True)
    for device, (start, stop) in counted:
        layers, shape = stop - start, costs.shape_on(device)
        token_bytes = layers * kv_token_bytes(shape, BITS, costs.dtype(device))
        tensors = cache_tensors(BITS, [shape] * layers)
        copies.append(HostCopies(token_bytes, tensors, device.host_link_bytes_per_s))
    return StageCopies.of(copies)


def shortest_round(decode: Pipeline, lengths: RequestLengths, requests: int) -> int:
    """Groups (B_m) of so many requests whose round is shortest: one for each stage, so that all are
    busy, or fewer, so that weights are read less often.
    """
    stages = len(decode.stages)
    counts = {1, 2 * stages, *(-(-stages // part) for part in (1, 2, 4))}
    context = lengths.prompts.mean + lengths.outputs.mean / 2

    def round_s(groups: int) -> float:
        size = requests / groups
        compute_s, hop_s = decode.times.decode_s(size, context), decode.times.decode_hop_s(size)
        return float(max(groups * max(compute_s.max(), hop_s.max()), (compute_s + hop_s).sum()))

    return min(sorted(each for each in counts if each <= requests), key=round_s)

"""Layers on devices in stage order: times, room, and the way of keys and values from stages that
prefill to stages that decode (ExeGPT section 3).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from planner.cluster.device import Device
from planner.costs.communication import HostCopies, cache_tensors, handover_terms
from planner.costs.latency_model import near_length, unlike_prompts_s
from planner.costs.model import CostModel
from planner.costs.pass_times import OccupiedStages, PassTable, link_terms, occupied_stages
from planner.costs.stored_bytes import kept_of_requests, layer_weight_bytes
from planner.latency_bound.timeline import (
    GridTimes,
    ManyTimes,
    PassTimes,
    StageSeconds,
    Tandem,
    decodes_s,
    mean_prefill_s,
)
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.plan.builder import Solution, solution_quality
from planner.search.fitting import first_sets, unexplained
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
        fitting = itertools.islice(first_sets(one, unexplained), sets)
        return max(room.most(devices) for devices in fitting)
    except DoesNotFitError:
        return 0


LEAST_STEPS = 1e-9
"""Decode steps of a request that are counted where all answers have one token."""


@dataclass(frozen=True, eq=False)
class StageCopies:
    """Seconds in which each stage copies keys and values to or from its host [N], a request and a
    token.
    """

    request_s: FloatArray
    token_s: FloatArray

    @classmethod
    def of(cls, copies: Sequence[HostCopies]) -> StageCopies:
        request_s = np.array([each.one_way_s(0) for each in copies])
        return cls(request_s, np.array([each.one_way_s(1) for each in copies]) - request_s)

    def seconds(self, requests: float, tokens: float) -> FloatArray:
        """Seconds of so many requests with so many tokens together [N]."""
        return requests * self.request_s + tokens * self.token_s


@dataclass(frozen=True, eq=False)
class Handover:
    """Stages that prefill copy keys and values to their hosts (`keep`), those that decode from
    theirs (`restore`), between their kernels. From host to host each message takes `message_s`,
    `token_s` a token, and `request_s` a request, of its constant states.
    """

    keep: StageCopies
    restore: StageCopies
    message_s: float
    token_s: float
    request_s: float = 0.0

    def sent_s(self, requests: float, tokens: float) -> float:
        """Seconds of a message with so many prompts, of so many tokens together."""
        return self.message_s + self.request_s * requests + self.token_s * tokens


def going_on(outputs: LengthDistribution) -> float:
    """The share of requests that make decode steps at all."""
    return 1 - outputs.probabilities[0] if outputs.lengths[0] == 1 else 1.0


class _CopyingTimes(ManyTimes):
    """The `times` of stages that copy so much of a prompt, and `step_s` [N] a request of a step."""

    def __init__(self, times: StageSeconds, prompts: StageCopies, step_s: FloatArray) -> None:
        self._times, self._prompts, self._step_s = times, prompts, step_s
        self.stages, self.attention_s = times.stages, times.attention_s
        self.prefill_hop_s, self.decode_hop_s = times.prefill_hop_s, times.decode_hop_s

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompt_tokens)
        return self._times.prefill_s(requests, prompt_tokens) + copied_s

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._times.decode_s(requests, context_tokens) + requests * self._step_s

    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompts.mean)
        return mean_prefill_s(self._times, requests, prompts) + copied_s

    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        compute_s, hop_s = decodes_s(self._times, requests, context_tokens)
        return compute_s + requests[:, None] * self._step_s, hop_s


@lru_cache(maxsize=256)
def mean_context(lengths: RequestLengths) -> float:
    """Mean tokens before the new one, over the requests that decode at a time."""
    outputs = lengths.outputs
    return lengths.prompts.mean + (outputs.variance + outputs.mean**2) / outputs.mean / 2


@dataclass(frozen=True, eq=False)
class WaaSides:
    """Times of both sides without the copies of `handover`."""

    prefill: StageSeconds
    decode: StageSeconds
    handover: Handover
    lengths: RequestLengths

    @cached_property
    def prefill_and_keep(self) -> StageSeconds:
        """The times of stages that prefill, and keep what others decode with."""
        none = np.zeros(self.prefill.stages)
        goes_on = self.lengths.outputs.longest > 1  # which answers will end at once is not known
        kept = self.handover.keep if goes_on else StageCopies(none, none)
        return _CopyingTimes(self.prefill, kept, none)

    @cached_property
    def restore_and_decode(self) -> StageSeconds:
        """The times of stages that decode, in each of whose steps as many requests begin as end."""
        outputs, none = self.lengths.outputs, np.zeros(self.decode.stages)
        steps = max(outputs.mean - 1, LEAST_STEPS)
        restored_s = self.handover.restore.seconds(1.0, self.lengths.prompts.mean)
        step_s = going_on(outputs) / steps * restored_s
        return _CopyingTimes(self.decode, StageCopies(none, none), step_s)


class PipelineOfRequests:
    """A pipeline with these times. Stages copy keys and values of some prompts by `copies` (None:
    of none), and compute nothing meanwhile.
    """

    def __init__(self, times: StageSeconds, copies: StageCopies | None = None) -> None:
        self._times, self._copies = times, copies
        self.stages = times.stages
        self._tandem = Tandem(times.stages)
        self._steps: dict[tuple[int, int], PassTimes] = {}
        self._prompts: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}

    def decode(
        self,
        requests: int,
        context_tokens: int,
        at_s: float,
        copied: Sequence[int] = (),
    ) -> float:
        """When a decode step submitted at `at_s` is back; tokens before it are of all requests."""
        size, context = requests, near_length(round(context_tokens / requests))
        if (size, context) not in self._steps:
            compute_s, hop_s = (
                self._times.decode_s(size, context),
                self._times.decode_hop_s(size),
            )
            self._steps[size, context] = PassTimes.of(compute_s, hop_s)
        step = self._steps[size, context]
        if copied:
            step = PassTimes.of(step.compute_s + self._copies_s(copied), np.array(step.hop_s))
        return self._tandem.run(step, at_s)

    def prefill(self, prompts: Sequence[int], at_s: float, copied: Sequence[int] = ()) -> float:
        """When a micro-batch of these prompts submitted at `at_s` is back."""
        size, tokens = len(prompts), sum(prompts)
        compute_s = unlike_prompts_s(prompts, self._parts) + self._copies_s(copied)
        hop_s = self._times.prefill_hop_s(size, tokens / size)
        return self._tandem.run(PassTimes.of(compute_s, hop_s), at_s)

    def _parts(self, requests: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of attention and of the rest [N] for prompts that are all so long."""
        key = requests, length
        if key not in self._prompts:
            attention_s = self._times.attention_s(*key)
            self._prompts[key] = attention_s, self._times.prefill_s(*key) - attention_s
        return self._prompts[key]

    def _copies_s(self, prompts: Sequence[int]) -> FloatArray:
        """Seconds in which stages copy keys and values of prompts of so many tokens [N]."""
        if self._copies is None or not prompts:
            return np.zeros(self._times.stages)
        return self._copies.seconds(len(prompts), sum(prompts))


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


@dataclass(frozen=True)
class PhaseDivision:
    prefill: tuple[Device, ...]
    decode: tuple[Device, ...]

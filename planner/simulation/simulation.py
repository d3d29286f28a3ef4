"""Discrete-event simulation of one global batch: what every stage and link does, and when.

Stages and links serve first come, first served; a transfer keeps its link busy but not its stages.
Since the order of passes is known (`planner.schedule.static`), a recurrence over it gives every
event exactly: ragged last micro-batches, growing context, the turn from prefill to decode, and
waiting for links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cluster.device import Device
from planner.costs.communication import TOKEN_ID_BYTES, Transfers, hidden_bytes, transfer_terms
from planner.costs.latency_model import LayerSeconds
from planner.costs.model import CostModel
from planner.costs.unlike_prompts import near_length, unlike_prompts_s
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import FloatArray
from planner.phases import Phase
from planner.schedule.exegpt import RraSchedule
from planner.schedule.orca import MixedPass, OrcaSchedule
from planner.schedule.policy_sizes import OrcaSizes, Sizes, TurnSizes, policy_sizes
from planner.schedule.s3 import S3Schedule
from planner.schedule.static import JobRows, JobSchedule, Pass
from planner.scheduling import PREDICTING
from planner.workload import Workload
from quant.common.errors import SpecError
from quant.scheme import DTYPE_BYTES


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass: `compute` on each stage [N], `transfer` [N] to the next stage.

    The last transfer takes the tokens back to the first stage. `decode`: the part of `compute` [N]
    that the decode steps of a pass of both phases would take alone; empty for one of one phase.
    """

    compute: tuple[float, ...]
    transfer: tuple[float, ...]
    decode: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Simulated:
    """Start and end of M passes, in order of submission, on N stages and links; seconds from 0.

    The four arrays are [M, N]: stage j computes from `stage_start_s` to `stage_end_s`, the link
    from stage j to the next one (from the last to the first) is busy from `link_start_s` to
    `link_end_s`.
    """

    workload: Workload
    passes: tuple[Pass, ...]
    stage_start_s: FloatArray
    stage_end_s: FloatArray
    link_start_s: FloatArray
    link_end_s: FloatArray

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return int(self.stage_end_s.shape[1])

    @property
    def latency_s(self) -> float:
        """Seconds until the last token is back on the first stage."""
        return float(self.link_end_s[-1, -1])

    @property
    def prefill_s(self) -> float:
        """Seconds until every request has its first token; decoding may have begun before."""
        return float(self.link_end_s[self._rows_of("prefill"), -1][-1])

    @property
    def filled_s(self) -> float:
        """Seconds until the first request in every slot has its first token."""
        waiting = self.workload.global_batch
        rows = self._rows_of("prefill")
        for row in rows:
            waiting -= self.passes[row].requests
            if waiting <= 0:
                return float(self.link_end_s[row, -1])
        return float(self.link_end_s[rows[-1], -1])

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of all requests, each of which gets one in every pass."""
        return sum(each.requests for each in self.passes) / self.latency_s

    @property
    def busy_share(self) -> tuple[float, ...]:
        """The share of the latency in which each stage computes [N]."""
        busy_s = (self.stage_end_s - self.stage_start_s).sum(axis=0)
        return tuple(float(share) for share in busy_s / self.latency_s)

    def busy_s(self, phase: Phase) -> FloatArray:
        """Seconds in which each stage computes in `phase` [N]."""
        rows = self._rows_of(phase)
        busy: FloatArray = (self.stage_end_s[rows] - self.stage_start_s[rows]).sum(axis=0)
        return busy

    def _rows_of(self, phase: Phase) -> list[int]:
        return [row for row, each in enumerate(self.passes) if each.phase == phase]


def simulate(
    workload: Workload,
    sizes: Sizes,
    stages: int,
    seconds_of: Callable[[Pass], PassSeconds],
    rows: JobRows | None = None,
) -> Simulated:
    """Run one global batch over `stages` stages, or all of `rows` over as many slots as it has,
    with the sizes of a policy; `seconds_of` a pass gives `stages` entries each.

    Raises SpecError where micro-batches are empty or `seconds_of` has another number of stages.
    """
    if isinstance(sizes, MicroBatches) and min(sizes.prefill, sizes.decode, stages) < 1:
        raise SpecError(
            f"micro-batches of {sizes.prefill} and {sizes.decode} on {stages} stages cannot be "
            "simulated; give at least 1 of each"
        )
    rows = rows or JobRows.alike(workload)
    schedule = job_schedule(rows, workload.global_batch, sizes, stages)
    passes = tuple(schedule.passes())
    seconds = [seconds_of(each) for each in passes]
    for each in seconds:
        if len(each.compute) != stages or len(each.transfer) != stages:
            raise SpecError(
                f"a pass takes {len(each.compute)} computations and {len(each.transfer)} transfers "
                f"on {stages} stages; give one of both for each"
            )
    return simulate_passes(workload, passes, seconds)


def job_schedule(
    rows: JobRows, slots: int, sizes: Sizes, stages: int
) -> JobSchedule | OrcaSchedule | RraSchedule:
    """The schedule of `rows` under the policy whose sizes these are."""
    if isinstance(sizes, TurnSizes):
        return RraSchedule(rows, sizes, stages)
    if isinstance(sizes, OrcaSizes):
        schedule = S3Schedule if sizes.policy == PREDICTING else OrcaSchedule
        return schedule(rows, sizes, stages)
    return JobSchedule(rows, slots, sizes, stages)


def sizes_of_policy(costs: CostModel, sizes: MicroBatches) -> Sizes:
    """The sizes of the policy of `costs`."""
    return policy_sizes(costs.policy(sizes), costs.workload, sizes)


def simulate_passes(
    workload: Workload, passes: tuple[Pass, ...], seconds: Sequence[PassSeconds]
) -> Simulated:
    """Run `passes` [M] in their order, each of which takes its `seconds` [M]."""
    stages = len(seconds[0].compute)
    clock = PipelineClock(stages)
    starts = [clock.run(each, taken) for each, taken in zip(passes, seconds, strict=True)]
    start_s = np.array(starts).reshape(len(passes), stages, 2)
    return Simulated(
        workload=workload,
        passes=passes,
        stage_start_s=start_s[:, :, 0],
        stage_end_s=start_s[:, :, 0] + np.array([each.compute for each in seconds]),
        link_start_s=start_s[:, :, 1],
        link_end_s=start_s[:, :, 1] + np.array([each.transfer for each in seconds]),
    )


class PipelineClock:
    """Starts each computation or transfer when its input is there and its stage or link is free."""

    def __init__(self, stages: int) -> None:
        self._stage_free_s, self._link_free_s = [0.0] * stages, [0.0] * stages
        self.returned_s = [0.0]
        """0, and then when the result of each pass came back."""

    def run(self, each: Pass, taken: PassSeconds) -> list[tuple[float, float]]:
        """Run the next pass; returns when each stage computes and each link sends it [N]."""
        at_s = self.returned_s[each.results_before]
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        starts = []
        for j, compute_s in enumerate(taken.compute):
            computes_s = max(at_s, stage_free_s[j])
            stage_free_s[j] = computes_s + compute_s
            sends_s = max(stage_free_s[j], link_free_s[j])
            link_free_s[j] = at_s = sends_s + taken.transfer[j]
            starts.append((computes_s, sends_s))
        self.returned_s.append(at_s)
        return starts

    def finish(self, each: Pass, taken: PassSeconds) -> None:
        """Run the next pass as `run` does, for those who ask only when its result is back."""
        at_s = self.returned_s[each.results_before]
        stage_free_s, link_free_s = self._stage_free_s, self._link_free_s
        hops = zip(taken.compute, taken.transfer, strict=True)
        for j, (compute_s, transfer_s) in enumerate(hops):
            free_s = stage_free_s[j]
            stage_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + compute_s
            free_s = link_free_s[j]
            link_free_s[j] = at_s = (free_s if free_s > at_s else at_s) + transfer_s
        self.returned_s.append(at_s)


@dataclass(frozen=True)
class OccupiedStages:
    """The devices that hold layers, and `first_layer` [N+1] of the stages that they form."""

    devices: tuple[Device, ...]
    first_layer: tuple[int, ...]


def occupied_stages(devices: Sequence[Device], first_layer: Sequence[int]) -> OccupiedStages:
    """Leave out the stages that hold no layer, which are not run."""
    kept = [j for j in range(len(devices)) if first_layer[j] < first_layer[j + 1]]
    bounds = (*(int(first_layer[j]) for j in kept), int(first_layer[-1]))
    return OccupiedStages(tuple(devices[j] for j in kept), bounds)


def simulate_assignment(
    costs: CostModel,
    devices: Sequence[Device],
    sizes: MicroBatches,
    first_layer: Sequence[int],
    bitwidth: Sequence[int],
    rows: JobRows | None = None,
) -> Simulated:
    """Simulate the batch of `costs.workload`, or all of `rows`, on `devices` in stage order, as the
    runtime runs it.

    `first_layer` [N+1] and `bitwidth` [L] (indices into `costs.options.bits`) are by layer, not by
    group; stages without layers are left out. Every pass takes the latency model's time for its own
    size and context. Raises SpecError where the two do not cover the model's layers.
    """
    check_assignment(costs, devices, first_layer, bitwidth)
    stages = occupied_stages(devices, first_layer)
    timing = assignment_timing(costs, stages, bitwidth)
    policy = sizes_of_policy(costs, sizes)
    return simulate(costs.workload, policy, len(stages.devices), timing.seconds, rows)


def check_assignment(
    costs: CostModel,
    devices: Sequence[Device],
    first_layer: Sequence[int],
    bitwidth: Sequence[int],
) -> None:
    """Raise SpecError unless boundaries and bitwidths cover the model's layers."""
    layers = costs.shape.layers
    if len(first_layer) != len(devices) + 1 or len(bitwidth) != layers or first_layer[-1] != layers:
        raise SpecError(
            f"{layers} layers on {len(devices)} devices need {len(devices) + 1} boundaries up to "
            f"{layers} and {layers} bitwidths, not {list(first_layer)} and {len(bitwidth)}"
        )


def assignment_timing(
    costs: CostModel, stages: OccupiedStages, bitwidth: Sequence[int]
) -> AssignmentTiming:
    """The latency model's seconds on these stages; `bitwidth` [L] as in `simulate_assignment`."""
    bits = [costs.options.bits[choice] for choice in bitwidth]
    bounds = stages.first_layer
    counts = tuple(Counter(bits[bounds[j] : bounds[j + 1]]) for j in range(len(stages.devices)))
    return AssignmentTiming(costs, stages.devices, counts)


@dataclass(frozen=True)
class AssignmentTiming:
    """Seconds of passes from a latency model; `counts`: layers of each bitwidth, per stage [N]."""

    costs: CostModel
    devices: tuple[Device, ...]
    counts: tuple[Counter[int], ...]
    _passes: dict[tuple[Phase, int, int, int], PassSeconds] = field(default_factory=dict)
    _layers: dict[tuple[Phase, int, int], tuple[FloatArray, FloatArray]] = field(
        default_factory=dict
    )
    _whole: dict[tuple[Phase, int, int], FloatArray] = field(default_factory=dict)
    _links: list[tuple[float, float, float]] = field(default_factory=list)

    def seconds(self, each: Pass) -> PassSeconds:
        """Seconds of one pass; equal passes are computed once."""
        if isinstance(each, MixedPass):
            return self._mixed(each)
        if each.prompts:
            return PassSeconds(self._compute(each), self._transfer(each))
        key = (each.phase, each.requests, each.tokens, each.context_length)
        if key not in self._passes:
            self._passes[key] = PassSeconds(self._compute(each), self._transfer(each))
        return self._passes[key]

    def _mixed(self, each: MixedPass) -> PassSeconds:
        """Seconds of a pass of both phases, as those of `planner.plan.modelled_times`."""
        decode_s, prefill_s = np.zeros(len(self.devices)), np.zeros(len(self.devices))
        least_s = decode_s
        if each.decodes:
            decode_s = self._decode_s(each.decodes, near_length(each.decode_context))
        if each.parts:
            prefill_s = self._prefill_s([start + count for start, count in each.parts])
            if any(start for start, _ in each.parts):
                constant_s = self._prefill_s([1] * len(each.parts))
                earlier_s = self._prefill_s([max(1, start) for start, _ in each.parts])
                prefill_s = prefill_s + constant_s - earlier_s
            if each.decodes:
                least_s = self._decode_s(1, 1)
        both_s = prefill_s + decode_s - least_s
        compute_s = np.maximum(np.maximum(prefill_s, decode_s), both_s)
        transfer = self._mixed_transfer(each.all_tokens, each.requests)
        return PassSeconds(tuple(compute_s.tolist()), transfer, tuple(decode_s.tolist()))

    def _decode_s(self, requests: int, context: int) -> FloatArray:
        key: tuple[Phase, int, int] = "decode", requests, context
        if key not in self._whole:
            self._whole[key] = np.array(self.compute_s(*key))
        return self._whole[key]

    def _prefill_s(self, lengths: Sequence[int]) -> FloatArray:
        size = len(lengths)
        return np.array(self._compute(Pass("prefill", 0, 0, size, 1, 0, 0, tuple(lengths))))

    def _mixed_transfer(self, tokens: int, requests: int) -> tuple[float, ...]:
        """Seconds of the hops, which are linear in tokens, and the last one in requests."""
        if not self._links:
            self._links.extend(link_terms(self.costs, self.devices))
        return tuple(
            latency_s + tokens * per_token_s + requests * per_request_s
            for latency_s, per_token_s, per_request_s in self._links
        )

    def compute_s(self, phase: Phase, requests: int, length: int) -> tuple[float, ...]:
        """Compute seconds of every stage [N]; `length` is that of the prompt or the context."""
        tokens, context = (length, 0) if phase == "prefill" else (1, length)
        return self._compute(Pass(phase, 0, 0, requests, tokens, context, 0))

    def _compute(self, each: Pass) -> tuple[float, ...]:
        latency, first = self.costs.latency, self.devices[0]
        head_stage = self.costs.head_stage(len(self.devices))
        head = self.devices[head_stage]
        if each.prompts:
            stage_s = unlike_prompts_s(each.prompts, self.prefill_parts)
        else:
            length = each.tokens if each.phase == "prefill" else each.context_length
            attention_s, rest_s = self._layers_s(each.phase, each.requests, length)
            stage_s = attention_s + rest_s
        stage_s[0] += latency.embedding_s(first, each.all_tokens, self.costs.dtype(first))
        stage_s[head_stage] += latency.final_s(head, each.requests, self.costs.dtype(head))
        return tuple(stage_s.tolist())

    def prefill_parts(self, requests: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of attention and of the rest of each stage's layers, both [N], for prompts that
        are all so long.
        """
        return self._layers_s("prefill", requests, length)

    def _layers_s(self, phase: Phase, requests: int, length: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of attention and of the rest of each stage's layers, both [N], if all requests
        have this length.
        """
        key = phase, requests, length
        if key not in self._layers:
            kinds: dict[tuple[Hashable, int], LayerSeconds] = {}
            for device, counts in zip(self.devices, self.counts, strict=True):
                for bits in counts:
                    kind = device.time_kind, bits
                    if kind not in kinds:
                        dtype = self.costs.dtype(device)
                        kinds[kind] = self.costs.latency.layer_seconds(
                            device, bits, phase, requests, length, dtype
                        )
            stages = [
                [(count, kinds[device.time_kind, bits]) for bits, count in counts.items()]
                for device, counts in zip(self.devices, self.counts, strict=True)
            ]
            self._layers[key] = (
                np.array([sum(n * layer.attention_s for n, layer in own) for own in stages]),
                np.array([sum(n * layer.rest_s for n, layer in own) for own in stages]),
            )
        return self._layers[key]

    def _transfer(self, each: Pass) -> tuple[float, ...]:
        costs, prompt = self.costs, each.all_tokens / each.requests
        both = each.requests, each.requests
        hops = Transfers(costs.cluster, costs.shape, both, prompt, costs.head_on_first)
        dtypes = [costs.dtype(device) for device in self.devices]
        prefill, decode = hops.of_order(self.devices, dtypes)
        return tuple((prefill if each.phase == "prefill" else decode).tolist())


def link_terms(costs: CostModel, devices: Sequence[Device]) -> list[tuple[float, float, float]]:
    """Latency, seconds a token and seconds a request of `planner.costs.communication` [N]."""
    cluster, shape = costs.cluster, costs.shape
    terms = []
    for j, sender in enumerate(devices):
        receiver = devices[(j + 1) % len(devices)]
        latency_s, per_byte_s = transfer_terms(cluster, sender, receiver)
        dtype = costs.dtype(sender)
        if j < len(devices) - 1:
            terms.append((latency_s, hidden_bytes(shape, 1, dtype) * per_byte_s, 0.0))
            continue
        returned = TOKEN_ID_BYTES
        if costs.head_on_first:
            returned = shape.word_embedding_size * DTYPE_BYTES[dtype]
        terms.append((latency_s, 0.0, returned * per_byte_s))
    return terms

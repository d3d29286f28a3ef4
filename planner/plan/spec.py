"""The plan: what runs where, with how many bits, in which micro-batches, at what cost, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.dataclasses import dataclass

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.described import AcceleratorEntry, DescriptionError, described_accelerator
from planner.cluster.file import TimeScale
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.plan.file import Kind, Saved
from planner.plan.modelled_times import ModelledTimes
from planner.plan.origin import PlanOrigin
from planner.plan.parts import (
    MAX_BYTES,
    MAX_LAYERS,
    MAX_THREADS,
    STRICT,
    Backends,
    Bits,
    Bytes,
    Dtype,
    HeadBits,
    JobForecast,
    KvBits,
    LatencyForecast,
    LayerRange,
    Memory,
    PerplexityForecast,
    PlannedAdapters,
    PlannedImportance,
    PlannedWeights,
    PlansBeside,
    Positive,
    Prediction,
    QualityForecast,
    Rounding,
    Seconds,
)
from planner.scheduling import BOUNDED, KV_TOKEN_POLICIES, TOKEN_POLICIES, PolicyOptions
from planner.workload import MicroBatches, Workload
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS, ROUNDINGS, WEIGHTED

Role = Literal["both", "prefill", "decode"]

_WHERE_SET = frozenset(
    {
        *("state_bytes", "expert_bitwidths", "hosted_experts", "streams_from", "host_bytes"),
        "cache_tensors",
    }
)
"""Fields of a stage that files have where they say something, so that those of others are as they
were."""


@dataclass(frozen=True, config=STRICT)
class PlannedModel:
    source: str
    name: str
    model_type: str
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    fingerprint: str


@dataclass(frozen=True, config=STRICT)
class StagePlan:
    """One stage. `layers` is half-open; times are of a full micro-batch, and of its hidden states
    to the next stage (from the last: token ids back). `memory_limit_bytes` leaves
    `memory_margin_bytes` free. `modelled` seconds hold an emulated device; `described` are figures
    of an unregistered accelerator. `devices` are the ranks of a group (first: `device`), memory is
    then one rank's. `role`: its phase where others compute the other one. `state_bytes` of the KV
    cache are a request's, whatever its length. `expert_bitwidths`: bits of the experts of each
    layer, where these are others; `hosted_experts`: layers whose experts lie in the memory of the
    device's host, `host_bytes` in all, from where they stream to the device for passes of
    `streams_from` tokens (null: never). `cache_tensors` hold what a request keeps there.
    """

    index: int
    device: str
    accelerator: str
    node: str
    emulated: bool
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    custom_resource: str | None
    dtype: Dtype
    layers: LayerRange
    bitwidths: tuple[Bits, ...]
    backends: Backends
    memory: Memory
    memory_bytes: Bytes
    memory_limit_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)]
    prefill_s: Seconds
    decode_s: Seconds
    prefill_comm_s: Seconds
    decode_comm_s: Seconds
    provenance: str
    modelled: ModelledTimes | None = None
    memory_margin_bytes: Bytes = 0
    described: AcceleratorEntry | None = None
    devices: tuple[str, ...] = ()
    role: Role = "both"
    state_bytes: Bytes = 0
    expert_bitwidths: tuple[Bits, ...] = ()
    hosted_experts: tuple[int, ...] = ()
    streams_from: Annotated[int, Field(ge=1)] | None = None
    host_bytes: Bytes = 0
    cache_tensors: Annotated[int, Field(ge=0)] = 0

    @model_serializer(mode="wrap")
    def _content(self, serialized: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialized(self)
        return {key: value for key, value in content.items() if value or key not in _WHERE_SET}

    @property
    def choices(self) -> tuple[LayerChoice, ...]:
        hosted = set(self.hosted_experts)
        experts = self.expert_bitwidths or self.bitwidths
        each = zip(self.layers, self.bitwidths, experts, strict=True)
        return tuple(LayerChoice(bits, own, layer in hosted) for layer, bits, own in each)

    @property
    def device_names(self) -> tuple[str, ...]:
        return self.devices or (self.device,)

    @property
    def degree(self) -> int:
        return len(self.device_names)

    @property
    def label(self) -> str:
        kind, _, _ = self.device.rpartition(":")
        return f"{kind}:{'+'.join(name.rpartition(':')[2] for name in self.device_names)}"

    @property
    def kind(self) -> Accelerator:
        """The type of the device; SpecError for one that neither the registry nor the plan has."""
        if self.described is None:
            return find_accelerator(self.accelerator)
        try:
            return described_accelerator(self.accelerator, self.described)
        except DescriptionError as error:
            where = "described" if error.field is None else f"described.{error.field}"
            raise SpecError(f"{where}: {error}") from error


@dataclass(frozen=True, config=STRICT)
class SolverRecord:
    """`objective` is latency plus `theta` times the summed sensitivity; `gap` is relative to it."""

    objective_kind: str
    method: str
    solver: str
    status: str
    theta: float
    objective: float
    sensitivity: float
    gap: float
    seconds: float
    candidates: int
    solved: int


@dataclass(frozen=True, config=STRICT)
class Baseline:
    """A simpler plan; `bitwidth` None: mixed. All figures are None where it does not fit."""

    name: str
    bitwidth: int | None
    latency_s: Positive | None
    tokens_per_s: Positive | None
    sensitivity: float | None

    def __post_init__(self) -> None:
        figures = (self.latency_s, self.tokens_per_s, self.sensitivity)
        if None in figures and any(each is not None for each in figures):
            raise ValueError("give latency_s, tokens_per_s and sensitivity, or null for all three")


@dataclass(frozen=True, config=STRICT)
class PlanSpec(Saved):
    """Everything `llmpq run` needs, as versioned JSON with these very names. LM head and sampling
    live on the first stage with `head_on_first`, else on the last. `stand_in`: the small model that
    computes on emulated devices. With a `job`, `workload` has the requests in flight and
    `predicted` is the job's; `long_rows` plans rows beyond `workload`. `orca` and `s3` take
    micro-batches of at most `policy.max_batch_size` over the slots of `workload.kv_tokens`. Weights
    are rounded by `importance`, None: by what stages measure on a sample text when they
    load; embedding and LM head have `head_bits`.
    `prefill_plan`: stages that prefill for these, which only decode; each of both plans has all
    layers.
    """

    FILE_KIND: ClassVar[Kind] = "plan"

    version: int
    model: PlannedModel
    workload: Workload
    cluster: str
    cluster_fingerprint: str
    time_scale: TimeScale
    micro_batches: MicroBatches
    head_on_first: bool
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    unused_devices: tuple[str, ...]
    predicted: Prediction
    solver: SolverRecord
    sensitivity_source: str
    baselines: tuple[Baseline, ...] = field(default_factory=tuple)
    perplexity: PerplexityForecast | None = None
    quality: QualityForecast | None = None
    rounding: Rounding = ROUNDINGS[0]
    kv_bits: KvBits = FULL_BITS
    head_bits: HeadBits = FULL_BITS
    stand_in: Annotated[str, Field(min_length=1)] | None = None
    origin: PlanOrigin | None = None
    job: JobForecast | None = None
    beside: PlansBeside = field(default_factory=PlansBeside)
    long_rows: PlanSpec | None = None
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    importance: PlannedImportance | None = None
    latency: LatencyForecast | None = None
    prefill_plan: PlanSpec | None = None
    adapters: PlannedAdapters | None = None
    weights: PlannedWeights | None = None

    def needs_importance(self, shape: ModelShape) -> bool:
        """Whether weights, or keys at 8 bit, are rounded by importance; not codes that are kept."""
        if self.stand_in is not None:  # a small model at 16 bit computes
            return False
        rounded = bool(self.rounded_layers(shape)) or self.head_bits != FULL_BITS
        return (self.rounding == WEIGHTED and rounded) or self.kv_bits != FULL_BITS

    def rounded_layers(self, shape: ModelShape) -> list[int]:
        """The layers of which a run rounds weights; those of others are kept as they are stored."""
        found = []
        for stage in self.stages:
            for layer, each in zip(stage.layers, stage.choices, strict=True):
                kind = shape.layer(layer)
                first = len(kind.layer_linears)
                experts = kind.rounds(each.expert_bits, slice(first, None))
                if experts or kind.rounds(each.bits, slice(first)):
                    found.append(layer)
        return found

    @property
    def timed_sizes(self) -> tuple[float, float]:
        """Computed tokens of a prefill, requests of a step that are timed: full, or of a job mean
        ones.
        """
        sizes = self.micro_batches
        if self.job is None:
            prompt = self.workload.heads.computed(self.workload.prompt_length)
            return sizes.prefill * prompt, sizes.decode
        passes = self.job.passes
        return passes.prefill_requests * self.job.job.computed_tokens, passes.decode_requests

    @property
    def default_new_tokens(self) -> int | None:
        """The most tokens for rows without a limit of their own; None for `workload.new_tokens`."""
        return None if self.job is None else self.job.job.default_new_tokens

    def check(self, source: str = "plan") -> None:
        """Raise SpecError unless stages cover every layer once; bytes: see `planner.plan.check`."""
        problem = next(self._problems(), None)
        if problem is not None:
            raise SpecError(f"{source}: {problem}")

    def _problems(self) -> Iterator[str]:
        sizes, batch = self.micro_batches, self.workload.global_batch
        if not (1 <= sizes.prefill <= batch and 1 <= sizes.decode <= batch):
            yield (
                f"field micro_batches: {sizes.prefill} and {sizes.decode} requests of a batch of "
                f"{batch}; give 1 to {batch}"
            )
        policy, n_slots = self.policy, self.workload.n_slots
        if policy.name in TOKEN_POLICIES and policy.max_batch_size is None:
            yield f"field policy.max_batch_size: null; {policy.name} needs a number"
        if policy.name not in KV_TOKEN_POLICIES and n_slots is not None:
            yield (
                f"field workload.n_slots: {n_slots}, but policy {policy.name} gives all requests "
                "slots of one length; it must be null"
            )
        yield from self._schedule_problems()
        predicted, count = self.predicted, len(self.stages)
        slowest = (predicted.prefill_bottleneck, predicted.decode_bottleneck)
        if len(predicted.busy_share) != count or not all(0 <= each < count for each in slowest):
            yield f"field predicted: not of {count} stages; plan again"
        yield from self._device_problems()
        expected = 0
        for position, stage in enumerate(self.stages):
            where = f"field stages.{position}"
            if stage.index != position:
                yield (
                    f"{where}.index: {stage.index} where {position} belongs; keep the stages in "
                    "order"
                )
            if stage.layers.start != expected or len(stage.layers) != len(stage.bitwidths):
                yield (
                    f"{where}.layers: {stage.layers} with {len(stage.bitwidths)} bitwidths where "
                    f"layer {expected} should begin"
                )
            if len(stage.expert_bitwidths) not in (0, len(stage.layers)):
                yield (
                    f"{where}.expert_bitwidths: {len(stage.expert_bitwidths)} bitwidths of "
                    f"{len(stage.layers)} layers; give one a layer, or none"
                )
            if not set(stage.hosted_experts) <= {*stage.layers}:
                yield (
                    f"{where}.hosted_experts: {list(stage.hosted_experts)} where the stage has "
                    f"layers {stage.layers.start} to {stage.layers.stop - 1}"
                )
            expected = stage.layers.stop
        if expected != self.model.layers:
            yield f"stages hold {expected} of {self.model.layers} layers; plan again"

    def _schedule_problems(self) -> Iterator[str]:
        schedule, prefills = self.policy.schedule, self.prefill_plan
        if (self.policy.name == BOUNDED) != (schedule is not None):
            yield (
                f"field policy.schedule: {BOUNDED} needs one, and no other policy has one; plan "
                "with --max_request_latency_s"
            )
        if (schedule is not None and schedule.divides) != (prefills is not None):
            yield (
                "field prefill_plan: waa-c and waa-m need one, and no other schedule has one; plan "
                "again"
            )
        if prefills is None:
            return
        if prefills.prefill_plan is not None or prefills.model != self.model:
            yield f"field prefill_plan: not one of {self.model.name}; plan again"
        for plan, role in ((self, "decode"), (prefills, "prefill")):
            if any(stage.role != role for stage in plan.stages):
                yield f"a stage that should only {role} has another role"
        for name in ("kv_bits", "head_bits", "stand_in", "time_scale"):
            found, wanted = getattr(prefills, name), getattr(self, name)
            if found != wanted:
                yield (
                    f"field prefill_plan.{name}: {found!r} where the stages that decode have "
                    f"{wanted!r}; plan again"
                )
        yield from (f"field prefill_plan: {each}" for each in prefills._problems())

    def _device_problems(self) -> Iterator[str]:
        met: dict[str, str] = {}
        prefills = () if self.prefill_plan is None else self.prefill_plan.stages
        places = [
            (f"{part}stages.{stage.index}.device{'s' * bool(stage.devices)}", name)
            for part, stages in (("", self.stages), ("prefill_plan.", prefills))
            for stage in stages
            for name in stage.device_names
        ]
        places += [(f"unused_devices.{i}", name) for i, name in enumerate(self.unused_devices)]
        for where, device in places:
            if device in met:
                yield (
                    f"field {where}: {device!r:.80} stands in {met[device]} already; a device "
                    "holds one stage, or none: plan again"
                )
            met[device] = where


def parts_of(plan: PlanSpec) -> tuple[PlanSpec, ...]:
    """The plans that prefill and that decode, or `plan`; both have the origin of the whole."""
    prefills = plan.prefill_plan
    return (plan,) if prefills is None else (replace(prefills, origin=plan.origin), plan)


def all_stages(plan: PlanSpec) -> tuple[StagePlan, ...]:
    stages = [stage for part in parts_of(plan) for stage in part.stages]
    return tuple(replace(stage, index=number) for number, stage in enumerate(stages))


def undivided(plan: PlanSpec) -> PlanSpec:
    """Make one plan of all stages, to show and not to run: layers come twice."""
    prefills = plan.prefill_plan
    if prefills is None:
        return plan
    predicted = replace(
        plan.predicted,
        busy_share=prefills.predicted.busy_share + plan.predicted.busy_share,
        prefill_bottleneck=prefills.predicted.prefill_bottleneck,
        decode_bottleneck=len(prefills.stages) + plan.predicted.decode_bottleneck,
    )
    return replace(plan, stages=all_stages(plan), predicted=predicted, prefill_plan=None)

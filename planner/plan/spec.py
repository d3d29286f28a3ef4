"""The plan: what runs where, with how many bits, in which micro-batches, what it should cost, and
why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.described import AcceleratorEntry, DescriptionError, described_accelerator
from planner.cluster.file import TimeScale
from planner.micro_batches import MicroBatches
from planner.options import Quality
from planner.plan import file
from planner.plan.field_types import (
    MAX_BYTES,
    MAX_LAYERS,
    MAX_THREADS,
    STRICT,
    Backends,
    Bits,
    Bytes,
    Dtype,
    KvBits,
    LayerRange,
    Memory,
    Positive,
    Rounding,
    Seconds,
)
from planner.plan.forecasts import JobForecast, LatencyForecast
from planner.plan.modelled_times import ModelledTimes
from planner.plan.origin import PlanOrigin
from planner.scheduling import BOUNDED, KV_TOKEN_POLICIES, TOKEN_POLICIES, PolicyOptions
from planner.workload import MAX_REQUESTS, Workload
from quant.common.errors import SpecError
from quant.importance.header import FINGERPRINT_HEX
from quant.scheme import FULL_BITS, ROUNDINGS, WEIGHTED


@dataclass(frozen=True, config=STRICT)
class PlannedImportance:
    """The `fingerprint` of the numbers, and the `file` that held them when the plan was made."""

    fingerprint: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{FINGERPRINT_HEX}}}$")]
    file: Annotated[str, Field(min_length=1)]


Count = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class PlanChoice:
    """A plan: prompts in flight, generated tokens per second of the batch or the whole job, summed
    sensitivity, and the mean bitwidth of a layer.
    """

    in_flight: Count
    tokens_per_s: Positive
    sensitivity: Amount
    mean_bits: Positive

    def beats(self, other: PlanChoice) -> bool:
        return self.tokens_per_s > other.tokens_per_s and self.sensitivity < other.sensitivity


@dataclass(frozen=True, config=STRICT)
class QualityChoice:
    """The best plan of one quality; `theta` gives it again."""

    quality: Quality
    theta: Amount
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class MoreDevices:
    """The best plan with `count` more devices like those called `accelerator` on `node`."""

    accelerator: str
    node: str
    count: Count
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class PlansBeside:
    """Plans beside the one that was taken.

    `quality`: which of `qualities` the plan is; None where theta, a bound or a method decided.
    `full_precision`: the fastest plan with all layers in the most bits allowed, None where that
    does not fit or was not looked for. `curve`: the best plans found for other numbers in flight,
    at the plan's theta, ascending. `more_devices`: what one more device of each kind would bring.
    `beaten_by`: a plan with fewer prompts in flight that has more tokens per second and less
    sensitivity, where a batch was given for which there is one.
    """

    quality: Quality | None = None
    qualities: tuple[QualityChoice, ...] = ()
    full_precision: PlanChoice | None = None
    curve: tuple[PlanChoice, ...] = ()
    more_devices: tuple[MoreDevices, ...] = ()
    beaten_by: PlanChoice | None = None


Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, config=STRICT)
class PlannedModel:
    """The planned model: as the user named it, its family and the fingerprint of its shape."""

    source: str
    name: str
    model_type: str
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    fingerprint: str


@dataclass(frozen=True, config=STRICT)
class StagePlan:
    """One stage: its device, its layers with a bitwidth each, its memory and its times.

    `layers` is half-open; `backends` names the kernel backend of each bitwidth in use. Times are of
    one full micro-batch, transfers of its hidden states to the next stage (from the last: token ids
    back). `memory_limit_bytes` is what the plan may fill: the device's memory without
    `memory_margin_bytes`, which stay free. `modelled` has the seconds of any micro-batch, to which
    an emulated device is held. `described` are the figures of an accelerator that the registry does
    not have, as the cluster file stated them. `devices` are those of a tensor-parallel group, the
    first of which is `device`; memory is then that of one rank. Empty for a single device.
    `role`: the phase that the stage computes where others compute the other one.
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

    @property
    def device_names(self) -> tuple[str, ...]:
        return self.devices or (self.device,)

    @property
    def degree(self) -> int:
        return len(self.device_names)

    @property
    def label(self) -> str:
        """The device for people; of a group with the numbers of all ranks: `node0/T4-16GB:0+1`."""
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
class Prediction:
    """The time that one global batch, or a whole job, should take, by simulating what is run.

    `prefill_s` until every request has its first token, `decode_s` from then on (of a job, by the
    shares of the busiest stage's work); the bottlenecks
    are the stages that compute longest in a phase, `busy_share` is what each stage computes of the
    latency. `objective_latency_s` is the closed form of the plan's objective, by which plans were
    ranked.
    """

    latency_s: Positive
    prefill_s: Seconds
    decode_s: Seconds
    tokens_per_s: Positive
    prefill_bottleneck: int
    decode_bottleneck: int
    busy_share: tuple[float, ...]
    objective_latency_s: float


@dataclass(frozen=True, config=STRICT)
class PerplexityForecast:
    """The perplexity that the plan's bitwidths should cost, by the points of the omega file.

    `increase` over `baseline`, the perplexity at 16 bit on the text measured; `low` and `high` are
    the ends of its interval. Where `max_increase` was asked for, `max_omega` is the summed
    sensitivity that it came to.
    """

    baseline: float
    increase: float
    low: float
    high: float
    points: int
    max_increase: float | None = None
    max_omega: float | None = None


@dataclass(frozen=True, config=STRICT)
class SolverRecord:
    """Record of how the plan was found, and how far from the optimum it can be.

    `objective` is latency plus `theta` times the summed sensitivity; `gap` is relative to it.
    """

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
    """A simpler plan for the same cluster; `bitwidth` is None where bits are mixed.

    All figures are None where it does not fit.
    """

    name: str
    bitwidth: int | None
    latency_s: Positive | None
    tokens_per_s: Positive | None
    sensitivity: float | None

    def __post_init__(self) -> None:
        """Raise ValueError, which pydantic reports with the field, where only some are None."""
        if (
            len({each is None for each in (self.latency_s, self.tokens_per_s, self.sensitivity)})
            > 1
        ):
            raise ValueError("give latency_s, tokens_per_s and sensitivity, or null for all three")


@dataclass(frozen=True, config=STRICT)
class PlanSpec:
    """Everything `llmpq run` needs, as versioned JSON with these very names.

    With `head_on_first` LM head and sampling live on the first stage, else on the last. `rounding`
    is how stages round weights while they load. `stand_in`: the small model that computes in place
    of the planned one on emulated devices. `origin`: what the plan was made from, to explain it and
    to make it again when devices are lost. `job`: the forecast of a whole job, where one was
    planned: `workload` has as many requests as are in flight then, and `predicted` is of the job.
    `long_rows`: the plan for those of its rows that `workload` has no room for. `beside`: the
    figures of other plans. `policy` schedules the requests: with `orca` and `s3` in micro-batches
    of at most `policy.max_batch_size`, over the token slots of `workload.kv_tokens`. What was
    assumed of the predictor of `s3` is `job.job.predictor`. `importance`: what weights are rounded
    by; None: what stages measure on random ids when they load. `latency`: the forecast of a
    schedule under a bound on latency, with `exegpt`. `prefill_plan`: the plan of stages that
    prefill for these, which then only decode; each of both plans has all layers.
    """

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
    rounding: Rounding = ROUNDINGS[0]
    kv_bits: KvBits = FULL_BITS
    stand_in: Annotated[str, Field(min_length=1)] | None = None
    origin: PlanOrigin | None = None
    job: JobForecast | None = None
    beside: PlansBeside = field(default_factory=PlansBeside)
    long_rows: PlanSpec | None = None
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    importance: PlannedImportance | None = None
    latency: LatencyForecast | None = None
    prefill_plan: PlanSpec | None = None

    def needs_importance(self, stored: bool) -> bool:
        """Whether anything is rounded by importance: weights, or keys at 8 bit.

        `stored`: the checkpoint is quantized already, so that no weight is rounded.
        """
        if self.stand_in is not None:  # a small model at 16 bit computes
            return False
        rounds = any(bits != FULL_BITS for stage in self.stages for bits in stage.bitwidths)
        return self.kv_bits != FULL_BITS or (rounds and not stored and self.rounding == WEIGHTED)

    @property
    def timed_sizes(self) -> tuple[float, float]:
        """Tokens of a prefill and requests of a decode step whose seconds the stages state: full
        micro-batches of a batch, or those of mean size in a job.
        """
        sizes = self.micro_batches
        if self.job is None:
            return sizes.prefill * self.workload.prompt_length, sizes.decode
        passes = self.job.passes
        prompt = self.job.job.lengths.mean_prompt
        return passes.prefill_requests * prompt, passes.decode_requests

    @property
    def default_new_tokens(self) -> int | None:
        """The most tokens for rows without a limit of their own; None for `workload.new_tokens`."""
        return None if self.job is None else self.job.job.default_new_tokens

    def to_json(self) -> str:
        return file.to_text(_ADAPTER, self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; an existing file is replaced whole or not at all."""
        file.save(self.to_json(), path, "plan")

    @classmethod
    def load(cls, path: str | Path) -> PlanSpec:
        """Read a plan; raises `SpecError` naming file and field."""
        return cls.from_json(file.read(path), str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> PlanSpec:
        plan = file.parsed(text, source, "plan", _ADAPTER)
        plan.check(source)
        return plan

    def check(self, source: str = "plan") -> None:
        """Raise `SpecError` unless the stages, in order, cover every layer once, each on a device
        of its own. `planner.plan.check` checks bytes and kernels.
        """
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
        for name in ("kv_bits", "stand_in", "time_scale"):
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


_ADAPTER: TypeAdapter[PlanSpec] = TypeAdapter(PlanSpec)

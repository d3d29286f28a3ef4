"""The specification of one pipeline stage, or of the small model that plays it on this machine, and
the modelled times that an emulated one is held to, as drivers know them: without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actors.messages import MicroBatch
from planner.cluster.accelerators import Accelerator
from planner.costs.communication import HostCopies
from planner.model.shape import ModelShape
from planner.plan.kv_copies import host_copies
from planner.plan.modelled_times import ModelledTimes
from planner.plan.spec import PlanSpec, StagePlan
from planner.workload import window_room
from quant.common.errors import DeviceError, SpecError
from quant.scheme import FULL_BITS, ROUNDINGS


@dataclass(frozen=True)
class StageSpec:
    """One stage of a plan, as its actor needs it.

    `bitwidths`: one per layer of `layers`; `backends`: kernel backend per bitwidth (missing: the
    processor's preferred one); `slots`: most requests at a time; `max_tokens`: tokens of the
    longest request; `kv_tokens`: token slots of the KV cache, for all requests together;
    `memory_limit_bytes` (0: none) bounds weights and KV cache together. `accelerator` is the GPU
    that the process must find; None where the stage computes on the host's CPU. With
    `head_on_first` the last stage sends its final hidden states back to the first one.
    `rounding` is one of `quant.scheme.ROUNDINGS`; with `kv_bits` 8 keys and values are codes.
    `parked_tokens`: most tokens whose keys and values lie in host memory, of preempted requests and
    of heads that prompts share.
    `deterministic`: no token's result depends on which others are computed with it.
    `cuda_graphs`: decode steps are recorded and replayed where that can be done.
    `requests`: those in flight that the plan counts, by which windows have rooms (0: `slots`).
    The stage is divided among `degree` ranks, of which this is number `rank`; the memory limit is
    that of the rank. Experts have `expert_bitwidths`, one a layer, where these are others; those of
    layers in `hosted_experts` lie in the host's memory, from where they stream to the device for
    passes of `streams_from` tokens (None: never). `adapter`: the folder of one that is merged into
    the weights; `adapters`: `NAME=FOLDER` of those that requests choose. Embedding of tokens and LM
    head have `head_bits`.
    """

    index: int
    stages: int
    layers: range
    bitwidths: tuple[int, ...]
    dtype: str
    slots: int
    max_tokens: int
    kv_tokens: int
    backends: Mapping[int, str] = field(default_factory=dict)
    memory_limit_bytes: int = 0
    device_name: str = "CPU"
    accelerator: Accelerator | None = None
    head_on_first: bool = False
    rounding: str = ROUNDINGS[0]
    kv_bits: int = 16
    parked_tokens: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    requests: int = 0
    rank: int = 0
    degree: int = 1
    expert_bitwidths: tuple[int, ...] = ()
    hosted_experts: tuple[int, ...] = ()
    streams_from: int | None = None
    adapter: str | None = None
    adapters: tuple[str, ...] = ()
    head_bits: int = FULL_BITS

    def windows(self, shape: ModelShape) -> tuple[dict[int, int], dict[int, int]]:
        """How many tokens each layer sees that does not see all, in a model of this shape; and the
        token slots of a request's room in those that have rooms, as they are planned.
        """
        found = {layer: shape.layer(layer).sliding_window for layer in self.layers}
        windows = {layer: window for layer, window in found.items() if window is not None}
        requests = self.requests or self.slots
        rooms = {n: window_room(each, requests, self.kv_tokens) for n, each in windows.items()}
        return windows, {layer: room for layer, room in rooms.items() if room is not None}

    @property
    def name(self) -> str:
        """The stage for messages, with the rank where it has several."""
        return (
            f"rank {self.rank} of stage {self.index}" if self.degree > 1 else f"stage {self.index}"
        )

    @property
    def is_first(self) -> bool:
        """Whether the embedding lives here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm lives here."""
        return self.index == self.stages - 1

    @property
    def has_head(self) -> bool:
        """Whether LM head and sampling live here."""
        return self.is_first if self.head_on_first else self.is_last


def stage_spec(plan: PlanSpec, stage: StagePlan) -> StageSpec:
    """The specification of `stage` for its actor, whose slots are those of the policy `static`.

    It is that of rank 0; the others differ in `rank` alone. Emulated ranks compute as one: their
    modelled times hold for all of them, and their limits together for what one process has.
    """
    on_host = stage.emulated or stage.kind.is_cpu
    together = stage.degree if stage.emulated else 1
    return StageSpec(
        index=stage.index,
        stages=len(plan.stages),
        layers=stage.layers,
        bitwidths=stage.bitwidths,
        dtype=stage.dtype,
        slots=plan.workload.equal_slots,
        max_tokens=plan.workload.total_length,
        kv_tokens=plan.workload.kv_tokens,
        backends=dict(stage.backends),
        memory_limit_bytes=together * stage.memory_limit_bytes,
        device_name=stage.label,
        accelerator=None if on_host else stage.kind,
        head_on_first=plan.head_on_first,
        rounding=plan.rounding,
        kv_bits=plan.kv_bits,
        degree=stage.degree // together,
        expert_bitwidths=stage.expert_bitwidths,
        hosted_experts=stage.hosted_experts,
        streams_from=stage.streams_from,
        requests=plan.workload.global_batch,
        head_bits=plan.head_bits,
    )


def stand_in_spec(spec: StageSpec, shape: ModelShape) -> StageSpec:
    """`spec` with one layer of a small model of this `shape` in place of the planned ones.

    Plans may have more stages than the small model has layers: stages take its layers by turns,
    whose experts lie on the host where those of any planned layer do.
    Raises `SpecError` where the small model has no room for the planned requests.
    """
    if spec.max_tokens > shape.max_positions:
        raise SpecError(
            f"stand-in {shape.name} has {shape.max_positions} positions, but requests of the plan "
            f"are up to {spec.max_tokens} tokens long; take one with more positions"
        )
    layer = spec.index % shape.layers
    hosts = spec.hosted_experts and shape.layer(layer).experts is not None
    return replace(
        spec,
        layers=range(layer, layer + 1),
        bitwidths=(16,),
        expert_bitwidths=(),
        hosted_experts=(layer,) if hosts else (),
        backends={},
        dtype="float32",
        memory_limit_bytes=0,
        kv_bits=16,
        head_bits=16,
    )


def check_planned_memory(plan: PlanSpec) -> None:
    """Raise `DeviceError` where a stage that a stand-in plays would not fit its planned device."""
    for stage in plan.stages:
        if plan.stand_in is not None and stage.memory_bytes > stage.memory_limit_bytes:
            raise DeviceError(
                f"stage {stage.index} needs {stage.memory_bytes} bytes by the plan, but the "
                f"emulated {stage.device} offers {stage.memory_limit_bytes}; plan again, with "
                "fewer bits or a smaller batch"
            )


@dataclass(frozen=True)
class ScaledTimes:
    """A stage's modelled `times`, of which every second takes `scale` seconds. `copies`: those of
    its keys and values to host memory and back (None: they take no time).
    """

    times: ModelledTimes
    scale: float
    copies: HostCopies | None = None

    def compute_s(self, batch: MicroBatch) -> float:
        computing_s = self.times.pass_s(batch.starts, batch.counts)
        if self.copies is None:
            return self.scale * computing_s
        copied = (*batch.parks, *batch.restores, *batch.keeps)
        copying_s = sum(self.copies.one_way_s(each.tokens) for each in copied)
        return self.scale * (computing_s + copying_s)

    def transfer_s(self, batch: MicroBatch) -> float:
        tokens, answers = int(batch.counts.sum()), len(batch.sampled_rows)
        return self.scale * self.times.transfer_s(tokens, answers)


def emulated_times(plan: PlanSpec, stage: StagePlan) -> ScaledTimes | None:
    """The times that `stage` is held to; None where its device is real or takes no modelled time.

    Plans without tabulated times have constant ones, those of full micro-batches.
    """
    if not (stage.emulated and plan.time_scale):
        return None
    times = stage.modelled or ModelledTimes.constant(stage.prefill_s, stage.decode_s)
    return ScaledTimes(times, plan.time_scale, host_copies(plan)[stage.index])

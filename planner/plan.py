"""The plan: what runs where, with how many bits, in which micro-batches, what it should cost, and
why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from planner.memory import StageMemory
from planner.micro_batches import MicroBatches
from planner.workload import Workload
from quant.errors import SpecError

PLAN_VERSION = 1
_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _as_range(value: Any) -> Any:
    """`[first, end]` as a range; anything else is left for pydantic to refuse."""
    match value:
        case [int(first), int(end)] if not isinstance(value, range) and 0 <= first <= end:
            return range(first, end)
    return value


LayerRange = Annotated[
    range,
    BeforeValidator(_as_range),
    PlainSerializer(lambda layers: [layers.start, layers.stop], return_type=list[int]),
]


@dataclass(frozen=True, config=_STRICT)
class PlannedModel:
    """The planned model: as the user named it, its family and the fingerprint of its shape."""

    source: str
    name: str
    model_type: str
    layers: int
    fingerprint: str


@dataclass(frozen=True, config=_STRICT)
class StagePlan:
    """One stage: its device, its layers with a bitwidth each, its memory and its times.

    `layers` is half-open; `backends` names the kernel backend of each bitwidth in use. Times are of
    one full micro-batch, transfers of its hidden states to the next stage (from the last: token ids
    back).
    """

    index: int
    device: str
    accelerator: str
    node: str
    emulated: bool
    threads: int
    custom_resource: str | None
    dtype: str
    layers: LayerRange
    bitwidths: tuple[int, ...]
    backends: dict[int, str]
    memory: StageMemory
    memory_bytes: int
    memory_limit_bytes: int
    prefill_s: float
    decode_s: float
    prefill_comm_s: float
    decode_comm_s: float
    provenance: str


@dataclass(frozen=True, config=_STRICT)
class Prediction:
    """What one global batch should take, by the simulation of the schedule that is run.

    `prefill_s` until every request has its first token, `decode_s` from then on; the bottlenecks
    are the stages that compute longest in a phase, `busy_share` is what each stage computes of the
    latency. `objective_latency_s` is the closed form of the plan's objective, by which plans were
    ranked.
    """

    latency_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    prefill_bottleneck: int
    decode_bottleneck: int
    busy_share: tuple[float, ...]
    objective_latency_s: float


@dataclass(frozen=True, config=_STRICT)
class SolverRecord:
    """How the plan was found, and how far from the optimum it can be.

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


@dataclass(frozen=True, config=_STRICT)
class Baseline:
    """A simpler plan for the same cluster; `None` figures where it does not fit."""

    name: str
    bitwidth: int | None
    latency_s: float | None
    tokens_per_s: float | None
    sensitivity: float | None


@dataclass(frozen=True, config=_STRICT)
class Plan:
    """Everything `llmpq-dist` needs, as versioned JSON with these very names.

    With `head_on_first` LM head and sampling live on the first stage, else on the last.
    """

    version: int
    model: PlannedModel
    workload: Workload
    cluster: str
    cluster_fingerprint: str
    time_scale: float
    kv_bits: int
    micro_batches: MicroBatches
    head_on_first: bool
    stages: tuple[StagePlan, ...]
    unused_devices: tuple[str, ...]
    predicted: Prediction
    solver: SolverRecord
    sensitivity_source: str
    baselines: tuple[Baseline, ...] = field(default_factory=tuple)

    def to_json(self) -> str:
        """The plan as indented JSON."""
        return _ADAPTER.dump_json(self, indent=1).decode() + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; an existing file is replaced whole or not at all."""
        target = Path(path)
        aside = target.with_name(target.name + ".part")
        try:
            aside.write_text(self.to_json())
            os.replace(aside, target)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise SpecError(f"cannot write the plan to {target}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; raises `SpecError` naming file and field."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"cannot read plan {path}: {error}") from error
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """The plan in `text`; raises `SpecError` naming `source` and the field."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"{source}:{error.lineno}: not JSON: {error.msg}") from error
        if not isinstance(content, Mapping) or "stages" not in content:
            raise SpecError(f"{source}: not a plan; make one with llmpq-algo -o plan.json")
        if content.get("version") != PLAN_VERSION:
            raise SpecError(
                f"{source}: plan version {content.get('version')!r}, this llmpq reads "
                f"{PLAN_VERSION}; plan again with llmpq-algo"
            )
        try:
            plan = _ADAPTER.validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise SpecError(f"{source}: field {where}: {first['msg']}") from error
        except SpecError as error:
            raise SpecError(f"{source}: {error}") from error
        plan.check(source)
        return plan

    def check(self, source: str = "plan") -> None:
        """Whether the stages, in order, cover every layer once; raises `SpecError`."""
        sizes, batch = self.micro_batches, self.workload.global_batch
        if not (1 <= sizes.prefill <= batch and 1 <= sizes.decode <= batch):
            raise SpecError(
                f"{source}: field micro_batches: {sizes.prefill} and {sizes.decode} requests of a "
                f"batch of {batch}; give 1 to {batch}"
            )
        expected = 0
        for position, stage in enumerate(self.stages):
            if stage.index != position:
                raise SpecError(
                    f"{source}: field stages.{position}.index: {stage.index} where {position} "
                    "belongs; keep the stages in order"
                )
            if stage.layers.start != expected or len(stage.layers) != len(stage.bitwidths):
                raise SpecError(
                    f"{source}: field stages.{position}.layers: {stage.layers} with "
                    f"{len(stage.bitwidths)} bitwidths where layer {expected} should begin"
                )
            expected = stage.layers.stop
        if expected != self.model.layers:
            raise SpecError(
                f"{source}: stages hold {expected} of {self.model.layers} layers; plan again"
            )


_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)

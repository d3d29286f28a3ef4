"""Measured seconds of tensor-parallel groups (splitwise-sim), and what the cost model says of them.

Of a row, the prompt phase is embedding, all layers over the prompts, and the head. A token is the
same with one token a request, at the context that is halfway through the new ones.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from planner.cluster.device import Device
from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import GroupLatency
from planner.costs.communication import Collectives
from planner.costs.machine import LAUNCH_S
from planner.costs.roofline import END_LAUNCHES, RooflineLatency, layer_launches
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from quant.scheme import DTYPE_BYTES

FloatArray = npt.NDArray[np.float64]

FILE = Path("tensor_parallel") / "splitwise_perf.csv"
ACCELERATORS = {"a100-80gb": "A100-SXM4-80GB", "h100-80gb": "H100-SXM5-80GB"}
MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
DTYPE = "float16"
LARGE_SUM_BYTES = 64 << 20
"""From here on sums among 8 GPUs are several times slower in these measurements, whose next smaller
ones have 56 MiB: 4096 tokens of LLaMA-2-70B, some more than 2048 of BLOOM. Why is not known."""
_BITS = 16


@dataclass(frozen=True)
class Setup:
    """A model on a group of so many GPUs."""

    model: str
    hardware: str
    degree: int

    @property
    def label(self) -> str:
        """The setup in words, such as `llama2-70b, 8 × A100-80GB`."""
        return f"{self.model}, {self.degree} × {self.hardware.upper()}"


@dataclass(frozen=True)
class Row:
    """A measurement: seconds of the prompt phase of a batch, and of one token of every request."""

    setup: Setup
    prompt_tokens: int
    batch_size: int
    new_tokens: int
    prompt_s: float
    token_s: float

    @property
    def is_artefact(self) -> bool:
        """Whether it is one of the two batches of 64 prompts on 2 GPUs, which are said to take an
        eighth of the seconds of 32 prompts, and a token of 64 requests less than one of 32.
        """
        return (self.setup.degree, self.batch_size) == (2, 64)


@dataclass(frozen=True)
class Factors:
    """What reality has of the datasheet's estimate, 1 where it is the same.

    Of the rates of arithmetic, memory and links, of the fixed seconds of a layer and of a sum, and
    of the rate of sums of at least `LARGE_SUM_BYTES`, which is a property of one degree.
    """

    arithmetic: float = 1.0
    bandwidth: float = 1.0
    layer: float = 1.0
    sum: float = 1.0
    link: float = 1.0
    large_sums: float = 1.0

    def of(self, device: Device) -> Device:
        """The device with these rates."""
        kind = device.accelerator
        faster = replace(
            kind,
            fp16_flops=kind.fp16_flops * self.arithmetic,
            memory_bytes_per_s=kind.memory_bytes_per_s * self.bandwidth,
        )
        rate = device.link_bytes_per_s * self.link
        return replace(device, accelerator=faster, link_bytes_per_s=rate)

    def more_s(self, shape: ModelShape, group: Device) -> float:
        """What the fixed seconds of a pass are more than the datasheet's, with those of embedding
        and head.
        """
        sums = 2 * (shape.layers + 1) * Collectives.of(group).wait_s
        layers = (shape.layers * layer_launches(shape) + 2 * END_LAUNCHES) * LAUNCH_S
        return (self.layer - 1) * layers + (self.sum - 1) * sums

    def more_of_sums_s(self, shape: ModelShape, group: Device, tokens: int) -> float:
        """What the large sums of a pass of so many tokens take beyond those at the usual rate."""
        summed = tokens * shape.hidden_size * DTYPE_BYTES[DTYPE]
        if group.degree == 1 or summed < LARGE_SUM_BYTES:
            return 0.0
        collectives = Collectives.of(group)
        moving_s = collectives.sum_s(summed) - collectives.sum_s(0)
        return (1 / self.large_sums - 1) * 2 * shape.layers * moving_s

    @property
    def at_other_degrees(self) -> Factors:
        """These factors where another number of GPUs shares a layer."""
        return replace(self, large_sums=1.0)

    @property
    def logarithms(self) -> FloatArray:
        """Logarithms of all factors [factors]."""
        return np.log(astuple(self))

    @classmethod
    def from_logarithms(cls, values: Sequence[float] | FloatArray) -> Factors:
        """The factors with these `logarithms` [factors]."""
        return cls(*np.exp(values).tolist())


DATASHEET = Factors()


def read_rows(data: Path) -> list[Row]:
    """Every measurement of the file under the folder of the reference data."""
    path = data / FILE
    if not path.is_file():
        raise SystemExit(f"{path} is missing; name the folder of the reference data with --data")
    with path.open(encoding="utf-8", newline="") as stream:
        return [
            Row(
                Setup(each["model"], each["hardware"], int(each["tensor_parallel"])),
                *(int(each[name]) for name in ("prompt_tokens", "batch_size", "new_tokens")),
                *(float(each[name]) / 1e3 for name in ("prompt_ms", "token_ms")),
            )
            for each in csv.DictReader(stream)
        ]


def measured_s(rows: Sequence[Row]) -> FloatArray:
    """Seconds of prompt phase and token of each row [rows, 2]."""
    return np.array([(row.prompt_s, row.token_s) for row in rows])


def predicted_s(rows: Sequence[Row], factors: Factors = DATASHEET) -> FloatArray:
    """The cost model's seconds of prompt phase and token of each row [rows, 2]."""
    return np.array([_predicted(row, factors) for row in rows])


def relative_errors(rows: Sequence[Row], factors: Factors = DATASHEET) -> FloatArray:
    """How far the cost model is off, as shares of what was measured [rows, 2]."""
    return predicted_s(rows, factors) / measured_s(rows) - 1


@cache
def _devices(hardware: str) -> tuple[Device, ...]:
    """Eight equal GPUs of a node."""
    return ClusterSpec.from_counts([ACCELERATORS[hardware]], [8]).devices


@cache
def _shape(model: str) -> ModelShape:
    return model_shape(MODELS[model])


def _predicted(row: Row, factors: Factors) -> tuple[float, float]:
    shape, setup = _shape(row.setup.model), row.setup
    group = group_of([factors.of(each) for each in _devices(setup.hardware)[: setup.degree]])
    times = GroupLatency(RooflineLatency(shape, own_layers=False), own_layers=False)
    batch, prompt = row.batch_size, row.prompt_tokens
    context = prompt + row.new_tokens // 2
    ends_s = factors.more_s(shape, group) + times.final_s(group, batch, DTYPE)
    prefill_s = times.layer_prefill_s(group, _BITS, batch, prompt, DTYPE)
    decode_s = times.layer_decode_s(group, _BITS, batch, context, DTYPE)
    sums_s = factors.more_of_sums_s(shape, group, batch * prompt)
    embedding_s = times.embedding_s(group, batch * prompt, DTYPE)
    return (
        ends_s + embedding_s + shape.layers * prefill_s + sums_s,
        ends_s + times.embedding_s(group, batch, DTYPE) + shape.layers * decode_s,
    )

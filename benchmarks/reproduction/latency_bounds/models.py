"""The models of ExeGPT's tables 1 and 2 with their tasks (table 3), and pipelines over equal GPUs.

Section 4.2, partial tensor parallelism: so many of the GPUs are in groups of one degree, the others
are stages of their own, and layers are spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.stats import skewnorm

from benchmarks.reproduction.gpts import shape_named
from planner.cluster.device import Device
from planner.cluster.groups import group_of
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.stored_bytes import kv_token_bytes, layer_weight_bytes
from planner.latency_bound.timeline import GridTimes, StageSeconds
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.options import PlanOptions
from planner.search.request import PlanningRequest, costs_of
from planner.workload import MicroBatches, Workload

WIDEST = 8.0
"""Deviations of a normal before it is cut, in multiples of the longest length: all but uniform."""


@dataclass(frozen=True)
class Stated:
    """A column of table 3: mean, deviation and longest in tokens, and the 99th percentile of
    outputs.
    """

    mean: float
    deviation: float
    longest: int
    quantile_99: int | None = None

    @property
    def cut(self) -> LengthDistribution:
        """The truncated normal with this mean and deviation after it is cut; where the deviation is
        more than any has on these lengths, the nearest, which is all but uniform.
        """
        return truncated_normal_of(self.mean, self.deviation, self.longest)

    @property
    def uncut(self) -> LengthDistribution:
        """The truncated normal with this mean and deviation before it is cut."""
        return LengthDistribution.truncated_normal(self.mean, self.deviation, self.longest)


@dataclass(frozen=True)
class Task:
    """A task by its letter in table 3."""

    name: str
    prompts: Stated
    outputs: Stated

    @property
    def lengths(self) -> RequestLengths:
        """Its lengths, as all simulations here have them."""
        return RequestLengths(self.prompts.cut, self.outputs.cut)


TASKS = {
    task.name: task
    for task in (
        Task("S", Stated(256, 252, 512), Stated(32, 13, 80, 63)),
        Task("T", Stated(128, 81, 256), Stated(128, 68, 320, 292)),
        Task("G", Stated(64, 23, 128), Stated(192, 93, 480, 417)),
        Task("C1", Stated(256, 115, 512), Stated(64, 30, 160, 137)),
        Task("C2", Stated(512, 252, 1024), Stated(256, 134, 640, 579)),
    )
}


@cache
def truncated_normal_of(mean: float, deviation: float, longest: int) -> LengthDistribution:
    """The truncated normal on 1 to `longest` tokens whose own mean and deviation come nearest."""

    def made(centre: float, scale: float) -> LengthDistribution:
        return LengthDistribution.truncated_normal(centre, scale, longest)

    return _fitted(made, mean, deviation, longest)


def skewed_normal_of(
    mean: float, deviation: float, longest: int, skewness: float
) -> LengthDistribution:
    """The skew normal distribution of this skewness before it is cut to 1 to `longest` tokens,
    whose own mean and deviation come nearest.
    """
    share = abs(skewness) ** (2 / 3)
    ratio = share / (share + ((4 - math.pi) / 2) ** (2 / 3))
    delta = math.copysign(math.sqrt(math.pi / 2 * ratio), skewness)
    shape = delta / math.sqrt(1 - delta**2)

    def made(centre: float, scale: float) -> LengthDistribution:
        edges = skewnorm.cdf(np.arange(longest + 1) + 0.5, shape, centre, scale)
        chances = np.diff(edges)
        kept = np.flatnonzero(chances > 0)
        shares = chances[kept] / chances[kept].sum()
        return LengthDistribution(tuple((kept + 1).tolist()), tuple(shares.tolist()))

    return _fitted(made, mean, deviation, longest)


def _fitted(
    made: Callable[[float, float], LengthDistribution], mean: float, deviation: float, longest: int
) -> LengthDistribution:
    """The distribution that is made of a centre and a scale so that its own mean and deviation come
    nearest to these.
    """

    def errors(parameters: npt.NDArray[np.float64]) -> list[float]:
        centre, logarithm = parameters.tolist()
        found = made(centre, math.exp(logarithm))
        return [found.mean / mean - 1, math.sqrt(found.variance) / deviation - 1]

    bounds = ([0.0, 0.0], [float(longest), math.log(WIDEST * longest)])
    best = least_squares(errors, [mean, math.log(deviation)], bounds=bounds).x
    return made(float(best[0]), math.exp(best[1]))


BITS = 16

_OPTIONS = PlanOptions(bits=(BITS,), theta=0.0, dtype="float16", head="last")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node of a cluster of table 2; rates of links in one direction."""

    name: str
    a_node: int
    link_gbyte_per_s: float
    internode_gbit_per_s: float


A40 = Gpus("A40", 8, 32.0, 100.0)
"""PCI Express 4.0 x16, without the NVLink bridge that joins A40 in pairs; 100 Gbit/s InfiniBand."""
A100 = Gpus("A100-SXM4-80GB", 8, 300.0, 1600.0)
"""Azure's NDm A100 v4: NVLink 3.0, eight InfiniBand adapters of 200 Gbit/s."""


@dataclass(frozen=True)
class Model:
    """A model of table 1 on so many GPUs, the tasks that the paper runs on it (sections 7.3 and
    7.4), and whether it counts it among the small and mid-sized or the large ones.
    """

    name: str
    size: str
    gpus: Gpus
    count: int
    small_tasks: tuple[str, ...] = ()
    large_tasks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name with its GPUs."""
        return f"{self.name}, {self.count} {self.gpus.name.partition('-')[0]}"

    @property
    def tasks(self) -> tuple[str, ...]:
        """All its tasks, each once."""
        return tuple(dict.fromkeys((*self.small_tasks, *self.large_tasks)))

    @property
    def whole_node(self) -> int:
        """GPUs of a node, which FasterTransformer's tensor-parallel groups have."""
        return min(self.gpus.a_node, self.count)

    @property
    def cluster(self) -> ClusterSpec:
        """Its nodes."""
        nodes = [
            {
                "name": f"node{first // self.gpus.a_node}",
                "accelerators": {self.gpus.name: min(self.gpus.a_node, self.count - first)},
                "link_gbyte_per_s": self.gpus.link_gbyte_per_s,
            }
            for first in range(0, self.count, self.gpus.a_node)
        ]
        network = {"internode_gbit_per_s": self.gpus.internode_gbit_per_s}
        return ClusterSpec.from_dict({"name": self.label, "nodes": nodes, "network": network})

    @cached_property
    def costs(self) -> CostModel:
        """Seconds and bytes of its parts, by datasheets."""
        return costs_of(
            PlanningRequest(self.cluster, shape_named(self.size), Workload(1, 1, 1), _OPTIONS)
        )[0]


_SMALL, _LARGE = ("S", "T", "C1"), ("G", "C1", "C2")

MODELS = (
    Model("OPT 13B", "13B", A40, 4, small_tasks=_SMALL),
    Model("GPT-3 39B", "39B", A40, 16, small_tasks=_SMALL),
    Model("GPT-3 101B", "101B", A100, 16, small_tasks=_SMALL, large_tasks=_LARGE),
    Model("GPT-3 175B", "175B", A100, 16, large_tasks=_LARGE),
    Model("GPT-3 175B", "175B", A40, 32, large_tasks=_LARGE),
    Model("GPT-3 341B", "341B", A40, 48, large_tasks=_LARGE),
)
"""All but T5 11B: an encoder-decoder model, which llmpq does not run."""


TYPICAL_BATCH = 32
"""Requests of a decode step by which layers are spread over unlike stages."""


@dataclass(frozen=True)
class Layout:
    """How GPUs share layers: the first `grouped` ones in groups of `degree`."""

    degree: int = 1
    grouped: int = 0

    @property
    def label(self) -> str:
        """The groups after other controls; nothing where there are none."""
        return f", T_P={self.degree}x{self.grouped}" if self.grouped else ""

    def stages_of(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The stages on these GPUs, groups first."""
        starts = range(0, self.grouped, self.degree)
        groups = [group_of(devices[first : first + self.degree]) for first in starts]
        return (*groups, *devices[self.grouped :])


@dataclass(frozen=True)
class Work:
    """The most that a pipeline does at once, for its memory: requests of a prefill micro-batch and
    their mean prompt, requests of a decode step, and the longest output.
    """

    prefill_requests: int
    prompt_tokens: float
    decode_requests: int
    new_tokens: int


class _Hosted:
    """Seconds of stages whose hosts take `host_s` beside each pass."""

    def __init__(self, kernels: StageSeconds, host_s: float) -> None:
        self.stages, self.attention_s = kernels.stages, kernels.attention_s
        self.prefill_hop_s, self.decode_hop_s = kernels.prefill_hop_s, kernels.decode_hop_s
        self._kernels, self._host_s = kernels, host_s

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._kernels.prefill_s(requests, prompt_tokens) + self._host_s

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._kernels.decode_s(requests, context_tokens) + self._host_s


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in order, with the layers from `first_layer` [N+1]; a pass takes `host_s` more on each
    than its kernels do.
    """

    costs: CostModel
    stages: tuple[Device, ...]
    first_layer: tuple[int, ...]
    host_s: float = 0.0

    @classmethod
    def of(
        cls,
        costs: CostModel,
        devices: Sequence[Device],
        layout: Layout,
        lengths: RequestLengths,
        host_s: float = 0.0,
    ) -> Pipeline | None:
        """The pipeline of a layout; None where it has more stages than the model has layers."""
        stages = layout.stages_of(devices)
        if len(stages) > costs.shape.layers:
            return None
        speeds = [1 / _request_layer_s(costs, stage, lengths) for stage in stages]
        return cls(costs, stages, spread(costs.shape.layers, speeds), host_s)

    @cached_property
    def times(self) -> StageSeconds:
        """Seconds of its stages."""
        bitwidth = (0,) * self.costs.shape.layers
        found = PassTable.of(self.costs, self.stages, self.first_layer, bitwidth)
        return _Hosted(found, self.host_s) if self.host_s else found

    @cached_property
    def grid_times(self) -> GridTimes:
        """The same on a grid of sizes and lengths, as searches have them."""
        return GridTimes(self.times)

    def token_slots(self, work: Work) -> int:
        """Tokens whose keys and values have room beside weights and the activations of `work`;
        below 0 where the rest does not fit.
        """
        return min(self._slots_of(stage, work) for stage in range(len(self.stages)))

    def _slots_of(self, stage: int, work: Work) -> int:
        device = self.stages[stage]
        layers = self.first_layer[stage + 1] - self.first_layer[stage]
        each = Workload(
            max(work.prefill_requests, work.decode_requests),
            max(1, round(work.prompt_tokens)),
            work.new_tokens,
        )
        costs = replace(self.costs, workload=each)
        sizes = MicroBatches(work.prefill_requests, work.decode_requests)
        shape, dtype = costs.shape_on(device), costs.dtype(device)
        fixed = costs.fixed_memory(self.stages, stage, sizes).total
        weights = layers * layer_weight_bytes(shape, BITS, device, dtype)
        slot = layers * kv_token_bytes(shape, BITS, dtype)
        return (costs.limit_bytes(device) - fixed - weights) // slot


def spread(layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Boundaries [N+1] of stages whose slowest takes the least time, at least one layer each:
    `speeds` are layers per second.
    """
    counts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        soonest = min(range(len(speeds)), key=lambda j: (counts[j] + 1) / speeds[j])
        counts[soonest] += 1
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return tuple(bounds)


def _request_layer_s(costs: CostModel, device: Device, lengths: RequestLengths) -> float:
    """Seconds of a layer for a mean request: its prompt, and its share of decode steps."""
    latency, dtype = costs.latency, costs.dtype(device)
    prompt, output = lengths.prompts.mean, lengths.outputs.mean
    prefill_s = latency.layer_prefill_s(device, BITS, 1, round(prompt), dtype)
    context = round(prompt + output / 2)
    step_s = latency.layer_decode_s(device, BITS, TYPICAL_BATCH, context, dtype)
    return prefill_s + output * step_s / TYPICAL_BATCH


DEGREES = (2, 4, 8)
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the GPUs that are in groups."""


def layouts_of(model: Model, gpus: int) -> tuple[Layout, ...]:
    """Layouts of so many GPUs, each once: without groups, and with groups of every degree that a
    node has room for on a part of the GPUs or all.
    """
    found = [Layout()]
    for degree in DEGREES:
        if degree <= model.whole_node:
            counts = (degree * round(share * (gpus // degree)) for share in SHARES)
            found += [Layout(degree, count) for count in counts if count]
    return tuple(dict.fromkeys(found))

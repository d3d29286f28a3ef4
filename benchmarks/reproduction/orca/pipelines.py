"""Plans for models like those of ORCA's table 1, on pipelines of its A100-40GB, and for a small one
on two CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.reproduction.gpts import shape_named
from benchmarks.reproduction.orca.traces import Lengths
from planner.cluster.spec import ClusterSpec
from planner.costs.pass_times import PassTable, occupied_stages
from planner.explanation.planned_assignment import planned_assignment
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.modelled_times import ModelledTimes, modelled_times
from planner.plan.spec import PlanSpec
from planner.search.find import PricedPlan, find_plan
from planner.workload import MicroBatches, Workload
from quant.checkpoint.model_reference import DEMO
from quant.common.errors import InfeasibleError

GPU = "A100-SXM4-40GB"
GPUS_A_NODE = 8
NETWORK_GBIT_PER_S = 1600.0
"""Azure's ND96asr A100 v4, as in section 6."""
MOST_IN_FLIGHT = 512
PREFILL_MICRO_BATCH = 2
MOST_BATCH = 128
"""Requests of the largest micro-batch whose time is tabulated; fig. 10 goes as far."""


@dataclass(frozen=True)
class Setting:
    """A model, its GPUs, and the model of the paper in whose place it is.

    A stage is a tensor-parallel group of `degree` GPUs of a node, or a CPU of one thread, whose
    times are those of `profiles`, a file. Times are tabulated for micro-batches of up to
    `most_batch` requests.
    """

    model: str
    gpus: int
    paper: str
    gpu: str = GPU
    most_batch: int = MOST_BATCH
    degree: int = 1
    profiles: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.gpu == "CPU"


CPUS = Setting(DEMO, 2, "", gpu="CPU", most_batch=32)
"""SmolLM2-135M on two stages."""
SETTINGS = (
    Setting("13B", 1, "13B on 1 GPU"),
    Setting("opt-66b", 8, "101B on 8 GPUs", degree=8),
    Setting("101B", 8, "101B on 8 GPUs", degree=8),
    Setting("175B", 16, "175B on 2 stages of 8 GPUs", degree=8),
    Setting("341B", 32, "341B on 4 stages of 8 GPUs", degree=8),
)
"""As in table 1 of the paper, and OPT-66B in place of its 101B."""


@dataclass(frozen=True, eq=False)
class ModelledPipeline:
    """A plan, and the seconds of its stages for any micro-batch."""

    setting: Setting
    plan: PlanSpec
    times: tuple[ModelledTimes, ...]

    @property
    def kv_tokens(self) -> int:
        """Token slots of its KV cache."""
        return self.plan.workload.kv_tokens


def modelled_pipeline(setting: Setting, longest: Lengths) -> ModelledPipeline:
    """The plan at 16 bit with slots for as many of the `longest` request as memory has room for."""
    low, high = 1, MOST_IN_FLIGHT
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (low, middle - 1) if _priced(setting, longest, middle) is None else (middle, high)
        )
    priced = _priced(setting, longest, low)
    if priced is None:
        raise InfeasibleError(f"{setting.model} does not fit {setting.gpus} {setting.gpu}")
    return ModelledPipeline(setting, priced.plan, stage_times_of(priced, setting.most_batch))


def _priced(setting: Setting, longest: Lengths, in_flight: int) -> PricedPlan | None:
    firsts = range(0, setting.gpus, GPUS_A_NODE)
    counts = [min(GPUS_A_NODE, setting.gpus - first) for first in firsts]
    given = {"threads": 1, "memory_gib": 4} if setting.is_cpu else {}
    nodes = [
        {"name": f"node{first}", "accelerators": {setting.gpu: count}, **given}
        for first, count in zip(firsts, counts, strict=True)
    ]
    network = {"internode_gbit_per_s": NETWORK_GBIT_PER_S}
    cluster = ClusterSpec.from_dict({"name": "orca", "nodes": nodes, "network": network}, "orca")
    options = PlanOptions(
        bits=(16,),
        theta=0.0,
        dtype="auto" if setting.is_cpu else "float16",
        profiles=setting.profiles,
        head="last",
        method="uniform" if setting.degree == 1 else "auto",
        tensor_parallel=setting.degree,
        keep_all_devices=True,
        prefill_micro_batch=min(PREFILL_MICRO_BATCH, in_flight),
    )
    workload = Workload(in_flight, longest.prompt, longest.new)
    shape = model_shape(setting.model) if setting.is_cpu else shape_named(setting.model)
    try:
        return find_plan(cluster, shape, setting.model, workload, options)
    except InfeasibleError:
        return None


def stage_times_of(priced: PricedPlan, most_batch: int) -> tuple[ModelledTimes, ...]:
    """Times tabulated up to micro-batches larger than any; equal ones are one object."""
    planned = planned_assignment(priced.plan, priced.costs)
    occupied = occupied_stages(planned.devices, planned.first_layer)
    timing = PassTable(priced.costs, occupied, planned.bitwidth)
    most = max(most_batch, priced.plan.workload.global_batch)
    sizes = MicroBatches(most, most)
    found = modelled_times(priced.costs, occupied.devices, sizes, timing.compute_s)
    unique: dict[ModelledTimes, ModelledTimes] = {}
    return tuple(unique.setdefault(each, each) for each in found)

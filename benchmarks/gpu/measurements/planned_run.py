"""A plan for this GPU, run in this process: what was predicted, and what it took.

The OPT-1.3b-like model at each bitwidth, its embedding and LM head at each of theirs, with all bits
in turn from layer to layer, and as the planner mixes them where memory has room for part of the
weights only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.messages import MicroBatch, Request, Sampled, TokenIds
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage.spec import stage_spec
from actors.stage.stage import Stage
from benchmarks.gpu.findings import Findings, Place, Table
from benchmarks.gpu.measurements.layers import profile_of
from benchmarks.gpu.measurements.models import (
    IN_TURN,
    backends_here,
    in_turn,
    note_substitutes,
    opt_checkpoint,
    opt_config,
    planned_device,
    quiet,
    release,
    requests_of,
)
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import model_shape
from planner.optimiser.assignment import Assignment, evaluate
from planner.options import PlanOptions
from planner.plan.builder import Solution, build_plan
from planner.plan.parts import Prediction
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Workload
from quant.devices import local_processor
from quant.scheme import BITWIDTHS, FULL_BITS, HEAD_BITWIDTHS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline

WEIGHTS_WITH_ROOM = 0.5
"""Share of the 16-bit layers that the memory of the mixed plan has room for."""
PASSES = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of one global batch: all of it, and what prefill and decode micro-batches took."""

    latency_s: float
    prefill_s: float
    decode_s: float


class TimedPipeline(LocalPipeline):
    """A pipeline in this process that counts the seconds of each phase."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.prefill_s = self.decode_s = 0.0

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        """Compute the micro-batch now."""
        began = time.perf_counter()
        sampled = super().submit(batch, token_ids)
        seconds = time.perf_counter() - began
        if batch.is_decode:
            self.decode_s += seconds
        else:
            self.prefill_s += seconds
        return sampled


def run(findings: Findings, place: Place, _: str) -> None:
    """Plan, run and compare."""
    quiet()
    folder, spec, workload = opt_checkpoint(place), one_device(place), workload_of(place)
    profile = profile_of(place)
    findings.note(
        "predictions by profile take the layer times that part `layers` measured"
        if profile
        else "part `layers` has left no profile: predictions are the datasheet's alone"
    )
    dtype = spec.devices[0].compute_dtype()
    backends = backends_here(place, BITWIDTHS, dtype)
    note_substitutes(findings, place, backends, dtype)
    table = findings.table(
        f"{workload.global_batch} prompts of {workload.prompt_length} tokens, "
        f"{workload.new_tokens} new ones",
        bits="{}", phase="{}", datasheet="{:.3f} s", profile="{:.3f} s", measured="{:.3f} s",
        measured_over_datasheet="{:.2f}", measured_over_profile="{:.2f}",
        measured_tokens_per_s="{:.0f}",
    )  # fmt: skip
    for name, plan, cluster in plans(spec, folder, workload):
        by_profile = None if profile is None else predicted(cluster, plan, workload, profile)
        with findings.trying(name):
            measured = measure(with_backends(plan, backends), folder, place)
            _compare(findings, table, name, plan, by_profile, measured)
        release(place.device)


def workload_of(place: Place) -> Workload:
    """The paper's 32 prompts of 512 tokens and 100 new ones, or a small one."""
    return Workload(*place.size((32, 512, 100), (2, 16, 4)))


def one_device(place: Place) -> ClusterSpec:
    """A cluster of the device here."""
    return ClusterSpec("this GPU", (planned_device(place),), internode_bytes_per_s=1e9)


def plans(
    spec: ClusterSpec, folder: Path, workload: Workload
) -> Iterator[tuple[str, PlanSpec, ClusterSpec]]:
    """The plans to run, each with its name and the cluster it was planned for."""
    shape = model_shape(folder)
    layers = shape.layers
    uniform = {bits: fixed_plan(spec, folder, workload, [bits] * layers) for bits in BITWIDTHS}
    for bits in reversed(BITWIDTHS):
        yield f"{bits}", uniform[bits], spec
    for ends in reversed(HEAD_BITWIDTHS[:-1]):
        plan = fixed_plan(spec, folder, workload, [FULL_BITS] * layers, ends)
        yield f"{FULL_BITS}, embedding and head {ends}", plan, spec
    yield IN_TURN, fixed_plan(spec, folder, workload, in_turn(range(layers))), spec
    memory = uniform[FULL_BITS].stages[0].memory
    room = memory.total - round((1 - WEIGHTS_WITH_ROOM) * memory.weights)
    tight = replace(spec, devices=(replace(spec.devices[0], memory_bytes=room),))
    chosen = find_plan(tight, shape, str(folder), workload, PlanOptions(theta=1.0)).plan
    yield _described(chosen), chosen, tight


def fixed_plan(
    spec: ClusterSpec,
    folder: Path,
    workload: Workload,
    bitwidths: Sequence[int],
    head_bits: int = FULL_BITS,
) -> PlanSpec:
    """The plan of these bitwidths on one device, in the micro-batches that suit it best."""
    options = PlanOptions(theta=0.0, bits=tuple(set(bitwidths)), head_bits=(head_bits,))
    shape = model_shape(folder)
    found = find_plan(spec, shape, str(folder), workload, options).plan
    return priced(costs_of(PlanningRequest(spec, shape, workload, options))[0], found, bitwidths)


def predicted(spec: ClusterSpec, plan: PlanSpec, workload: Workload, profile: Path) -> Prediction:
    """Predict `plan` by the profile."""
    bitwidths, ends = plan.stages[0].bitwidths, (plan.head_bits,)
    options = PlanOptions(theta=0.0, bits=tuple(set(bitwidths)), head_bits=ends, profiles=profile)
    shape = model_shape(plan.model.source)
    costs, _ = costs_of(PlanningRequest(spec, shape, workload, options))
    return priced(costs, plan, bitwidths).predicted


def priced(costs: CostModel, like: PlanSpec, bitwidths: Sequence[int]) -> PlanSpec:
    """`like` with other bitwidths, by `costs`."""
    problem = costs.problem(costs.cluster.devices, like.micro_batches)
    choices = tuple(costs.options.bits.index(bits) for bits in bitwidths)
    bounds = (0, len(choices))
    objective = evaluate(problem, bounds, choices)
    assignment = Assignment(bounds, choices, objective, objective, "uniform", 0.0)
    placed = like.workload, costs.cluster.devices, like.micro_batches
    solution = Solution(*placed, assignment, objective)
    return build_plan(costs, like.model.source, solution, like.sensitivity_source, ())


def with_backends(plan: PlanSpec, backends: Mapping[int, str]) -> PlanSpec:
    """`plan` with the kernel backends that can be had here."""
    stages = tuple(
        replace(stage, backends={bits: backends[bits] for bits in stage.backends})
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def measure(plan: PlanSpec, folder: Path, place: Place) -> Measured:
    """The last of several passes over the workload: the others warm up."""
    device, workload = place.device, plan.workload
    processor = local_processor(device)
    stages = [Stage(stage_spec(plan, each), folder, device, processor) for each in plan.stages]
    vocabulary = opt_config(place).vocab_size
    requests = requests_of(
        workload.global_batch, workload.prompt_length, workload.new_tokens, vocabulary
    )
    return [one_pass(plan, stages, requests) for _ in range(place.size(PASSES, 1))][-1]


def one_pass(plan: PlanSpec, stages: Sequence[Stage], requests: Sequence[Request]) -> Measured:
    """Run all requests through the stages."""
    pipeline = TimedPipeline(stages)
    scheduler = StaticScheduler(QueueSizes.of(plan), len(stages))
    scheduler.add(requests)
    began = time.perf_counter()
    finished = sum(len(each) for each in drive(scheduler, pipeline))
    latency_s = time.perf_counter() - began
    if finished != len(requests):
        raise AssertionError(f"{finished} of {len(requests)} requests came back")
    return Measured(latency_s, pipeline.prefill_s, pipeline.decode_s)


def _described(plan: PlanSpec) -> str:
    """Describe a plan for little memory: how many layers have which bits, and what its ends."""
    counts = {bits: plan.stages[0].bitwidths.count(bits) for bits in BITWIDTHS}
    layers = ", ".join(f"{n} at {bits}" for bits, n in counts.items() if n)
    return f"planned: {layers}, embedding and head {plan.head_bits}"


def _compare(
    findings: Findings,
    table: Table,
    name: str,
    plan: PlanSpec,
    profile: Prediction | None,
    measured: Measured,
) -> None:
    """A row for each phase, and one for both together."""
    tokens = plan.workload.global_batch * plan.workload.new_tokens
    for phase in ("prefill", "decode", "latency"):
        own = getattr(measured, f"{phase}_s")
        by_datasheet = getattr(plan.predicted, f"{phase}_s")
        by_profile = None if profile is None else getattr(profile, f"{phase}_s")
        findings.row(
            table, name, phase, by_datasheet, by_profile, own, own / by_datasheet,
            own / by_profile if by_profile else None,
            tokens / own if phase == "latency" else None,
        )  # fmt: skip

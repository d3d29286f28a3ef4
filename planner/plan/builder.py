"""Building the plan that is written, shown and run from the assignment that the search chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from planner.adapters import adapter_folders
from planner.cluster.described import entry_of
from planner.cluster.device import Device
from planner.cluster.groups import ungrouped
from planner.costs.communication import cache_tensors
from planner.costs.hosting import host_bytes, host_threads
from planner.costs.memory import StageEnds, fixed_stage_memory, memory_with_layers, state_bytes
from planner.costs.model import CostModel
from planner.costs.pass_times import OccupiedStages, PassTable, occupied_stages
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.model.stored_bits import stored_words
from planner.optimiser.assignment import Assignment, AssignmentCosts, stage_times
from planner.optimiser.names import DEFAULT_SOLVER
from planner.plan.file import PLAN_VERSION
from planner.plan.modelled_times import ModelledTimes, modelled_times
from planner.plan.parts import (
    JobForecast,
    PlanChoice,
    PlannedAdapters,
    PlannedWeights,
    Prediction,
)
from planner.plan.spec import Baseline, PlannedModel, PlanSpec, SolverRecord, StagePlan
from planner.simulation.job_simulation import MOST_PASSES, Forecast, forecast_assignment
from planner.workload import MicroBatches, Workload
from quant.backends.table import backend_name
from quant.scheme import FULL_BITS

MOST_STREAMED_POWER = 20
"""Passes of a million tokens are more than any micro-batch has."""


@dataclass(frozen=True)
class Solution:
    """The assignment that won. `workload` has the requests in flight, `lower_bound` holds for every
    candidate; `max_batch_size`: requests of a micro-batch of both phases, where it was chosen.
    """

    workload: Workload
    devices: tuple[Device, ...]
    sizes: MicroBatches
    assignment: Assignment
    lower_bound: float = 0.0
    candidates: int = 1
    solved: int = 1
    seconds: float = 0.0
    head_on_first: bool = False
    solver: str = DEFAULT_SOLVER
    max_batch_size: int | None = None

    @property
    def gap(self) -> float:
        """The most that the plan can be from the optimum of the search, relative to it."""
        objective = self.assignment.objective
        return (objective - min(self.lower_bound, objective)) / objective if objective > 0 else 0.0

    def costs(self, searched: CostModel) -> CostModel:
        options = searched.options
        if self.max_batch_size is not None:
            options = replace(options, max_batch_size=self.max_batch_size)
        head = self.head_on_first
        return replace(searched, workload=self.workload, head_on_first=head, options=options)


def build_plan(
    costs: CostModel,
    source: str,
    solution: Solution,
    sensitivity_source: str,
    baselines: tuple[Baseline, ...] = (),
    forecast: Forecast | None = None,
) -> PlanSpec:
    """Build the plan; middle stages without layers drop out. Without `forecast` it is simulated."""
    costs = solution.costs(costs)
    cluster, shape = costs.cluster, costs.shape
    occupied = occupied_stages(solution.devices, costs.placing.expanded(solution.assignment)[0])
    times = _times(costs, solution, occupied.devices)
    forecast = forecast or forecast_solution(costs, solution)
    plan = PlanSpec(
        version=PLAN_VERSION,
        model=PlannedModel(source, shape.name, shape.model_type, shape.layers, shape.fingerprint()),
        workload=costs.workload,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint(),
        time_scale=cluster.emulate.time_scale if cluster.emulate else 0.0,
        kv_bits=costs.kv_bits,
        head_bits=shape.head_bits,
        micro_batches=solution.sizes,
        head_on_first=solution.head_on_first,
        stages=_stages(costs, solution, occupied),
        unused_devices=_unused(cluster.devices, occupied.devices),
        predicted=_prediction(forecast, times.latency_s),
        solver=_record(costs, solution, times.quality),
        sensitivity_source=sensitivity_source,
        baselines=baselines,
        rounding=costs.options.rounding,
        stand_in=cluster.emulate.stand_in if cluster.emulate else None,
        job=_job_forecast(costs, solution, forecast),
        policy=costs.policy(solution.sizes),
        adapters=_adapters(costs),
    )
    return replace(plan, weights=_weights(plan, shape))


def plan_choice(plan: PlanSpec) -> PlanChoice:
    """The plan as one choice among those for the same job; bits and sensitivity in the mean of both
    sides, where some stages prefill and others decode.
    """
    sides = [plan] if plan.prefill_plan is None else [plan, plan.prefill_plan]
    bits = [each for side in sides for stage in side.stages for each in stage.bitwidths]
    return PlanChoice(
        in_flight=plan.workload.global_batch,
        tokens_per_s=plan.predicted.tokens_per_s,
        sensitivity=max(0.0, fmean(side.solver.sensitivity for side in sides)),
        mean_bits=fmean(bits),
    )


def _weights(plan: PlanSpec, shape: ModelShape) -> PlannedWeights | None:
    words, kept = stored_words(shape), 0
    if not words:
        return None
    choices = [choice for stage in plan.stages for choice in stage.choices]
    for layer, choice in enumerate(choices):
        stored = shape.layer(layer).stored
        kept += stored is not None and choice.bits == stored.bits != FULL_BITS
    rounded = (choices[layer] for layer in plan.rounded_layers(shape))
    return PlannedWeights(words, kept, Counter(min(e.bits, e.expert_bits) for e in rounded))


def _adapters(costs: CostModel) -> PlannedAdapters | None:
    folders = adapter_folders(costs.options.adapters)
    ranks = tuple(dict(kind.adapter_ranks) for kind in costs.shape.kind_shapes)
    return PlannedAdapters(folders, ranks) if folders else None


def _unused(every: Sequence[Device], used: Sequence[Device]) -> tuple[str, ...]:
    names = {device.name for device in ungrouped(used)}
    return tuple(device.name for device in ungrouped(every) if device.name not in names)


def solution_quality(costs: CostModel, solution: Solution) -> float:
    return costs.placing.quality(solution.assignment)


def forecast_solution(
    costs: CostModel, solution: Solution, most_passes: int = MOST_PASSES
) -> Forecast:
    """Simulate the batch, or of a long job about `most_passes` passes."""
    costs = solution.costs(costs)
    first_layer, bitwidth = costs.placing.expanded(solution.assignment)
    table = PassTable.of(costs, solution.devices, first_layer, bitwidth)
    return forecast_assignment(table, solution.sizes, most_passes)


def _prediction(forecast: Forecast, objective_latency_s: float) -> Prediction:
    prefill_s, decode_s = forecast.busy_s
    return Prediction(
        latency_s=forecast.seconds,
        prefill_s=forecast.prefill_s,
        decode_s=forecast.seconds - forecast.prefill_s,
        tokens_per_s=forecast.tokens_per_s,
        prefill_bottleneck=int(prefill_s.argmax()),
        decode_bottleneck=int(decode_s.argmax()),
        busy_share=forecast.busy_share,
        objective_latency_s=objective_latency_s,
    )


def _job_forecast(costs: CostModel, solution: Solution, forecast: Forecast) -> JobForecast | None:
    passes = costs.passes(solution.sizes, len(solution.devices))
    if costs.job is None or passes is None:
        return None
    price = costs.cluster.price_per_hour
    return JobForecast(costs.job, forecast.seconds, forecast.tokens_per_s, passes, price)


def _record(costs: CostModel, solution: Solution, quality: float) -> SolverRecord:
    assignment, options = solution.assignment, costs.options
    return SolverRecord(
        objective_kind=options.objective if costs.job is None else "job",
        method=options.method,
        solver=solution.solver,
        status=assignment.status,
        theta=costs.theta,
        objective=assignment.objective,
        sensitivity=quality,
        gap=solution.gap,
        seconds=solution.seconds,
        candidates=solution.candidates,
        solved=solution.solved,
    )


def _stages(
    costs: CostModel, solution: Solution, occupied: OccupiedStages
) -> tuple[StagePlan, ...]:
    devices, bounds, sizes = occupied.devices, occupied.first_layer, solution.sizes
    _, bitwidth = costs.placing.expanded(solution.assignment)
    modelled = _modelled(costs, sizes, occupied, bitwidth)
    problem = costs.problem(devices, sizes)
    times = _times(costs, solution, devices)
    chosen = [costs.placing.choices[choice] for choice in bitwidth]
    stages = []
    for j, device in enumerate(devices):
        accelerator = device.accelerator
        dtype, layers = costs.dtype(device), range(bounds[j], bounds[j + 1])
        mine = chosen[layers.start : layers.stop]
        bits = tuple(choice.bits for choice in mine)
        experts = tuple(choice.expert_bits for choice in mine)
        hosted = tuple(i for i, choice in zip(layers, mine, strict=True) if choice.on_host)
        on_device = {*bits, *(each.expert_bits for each in mine if not each.on_host)}
        ends = StageEnds.of(j, len(devices), costs.head_on_first)
        work = costs.work_on(device, sizes)
        fixed = fixed_stage_memory(work, device, ends)
        memory = memory_with_layers(work, device, layers, mine, fixed)
        stages.append(
            StagePlan(
                index=j,
                device=device.name,
                accelerator=accelerator.name,
                node=device.node,
                emulated=device.emulated,
                threads=_threads(device, bool(hosted)),
                custom_resource=device.custom_resource,
                dtype=dtype,
                layers=layers,
                bitwidths=bits,
                backends={
                    b: backend_name(
                        device.processor, b, dtype, costs.shape.stored is not None, sizes.decode
                    )
                    for b in sorted(on_device)
                },
                memory=memory,
                memory_bytes=memory.total,
                memory_limit_bytes=costs.limit_bytes(device),
                memory_margin_bytes=device.memory_bytes - costs.limit_bytes(device),
                prefill_s=float(times.prefill_s[j]),
                decode_s=float(times.decode_s[j]),
                prefill_comm_s=float(problem.prefill_comm_s[j]),
                decode_comm_s=float(problem.decode_comm_s[j]),
                provenance=_provenance(costs, device, devices[(j + 1) % len(devices)]),
                modelled=modelled[j],
                described=None if accelerator.is_registered else entry_of(accelerator),
                devices=device.member_names if device.ranks else (),
                state_bytes=state_bytes(work, layers),
                expert_bitwidths=() if experts == bits else experts,
                hosted_experts=hosted,
                streams_from=_streams_from(costs, device, hosted, chosen),
                host_bytes=host_bytes(work.shape, layers, mine, dtype),
                cache_tensors=cache_tensors(costs.kv_bits, [work.shape.layer(i) for i in layers]),
            )
        )
    return tuple(stages)


def _times(costs: CostModel, solution: Solution, devices: tuple[Device, ...]) -> AssignmentCosts:
    found = solution.assignment
    if not costs.experts_apart:
        first_layer, bitwidth = costs.placing.expanded(found)
        bounds = occupied_stages(solution.devices, first_layer).first_layer
        return stage_times(costs.problem(devices, solution.sizes), bounds, bitwidth)
    bounds = occupied_stages(solution.devices, found.first_layer).first_layer
    return stage_times(costs.grouped_problem(devices, solution.sizes), bounds, found.bitwidth)


def _threads(device: Device, hosts: bool) -> int:
    return host_threads(device) if hosts and not device.emulated else device.threads or 1


def _streams_from(
    costs: CostModel, device: Device, hosted: Sequence[int], chosen: Sequence[LayerChoice]
) -> int | None:
    """The fewest tokens of a pass, but for a factor of two, for which the experts of a stage come
    to its device sooner than the host has multiplied; None: of no pass.
    """
    kinds, dtype = costs.shape.kind_of_layer, costs.dtype(device)
    counts = Counter((kinds[layer], chosen[layer].expert_bits) for layer in hosted)
    for power in range(MOST_STREAMED_POWER if counts else 0):
        tokens = 1 << power
        computed = streamed = 0.0
        for (kind, bits), count in counts.items():
            latency = costs.latency.of_kind(kind)
            each = latency.hosted_experts_s(device, bits, tokens, dtype)
            computed += count * each.there_s
            streamed += count * each.streamed_s
        if streamed < computed:
            return tokens
    return None


CPU_GUESS = "a guess: runs on a CPU took 2 to 5 times as long as such plans foretold"
"""What `benchmarks.speed.plans --no_measuring` showed on one without AVX-512."""


def _provenance(costs: CostModel, device: Device, following: Device) -> str:
    hop = costs.cluster.link_provenance(device, following)
    source = costs.latency.provenance(device, costs.dtype(device), costs.options.bits)
    text = f"{device.accelerator.name} {source}"
    if device.accelerator.is_cpu and source.startswith("estimated"):
        text += f"; {CPU_GUESS}"
    return text if hop is None else f"{text}; {hop}"


def _modelled(
    costs: CostModel, sizes: MicroBatches, occupied: OccupiedStages, bitwidth: Sequence[int]
) -> tuple[ModelledTimes | None, ...]:
    """Times that stages [N] keep to; None where the device is real or has no time scale."""
    devices, emulate = occupied.devices, costs.cluster.emulate
    if emulate is None or not emulate.time_scale:
        return (None,) * len(devices)
    timing = PassTable(costs, occupied, bitwidth)
    mixed = costs.policy(sizes).mixed_requests  # any number of them may be prompts, or parts
    sizes = MicroBatches(max(sizes.prefill, mixed), max(sizes.decode, mixed))
    times = modelled_times(costs, devices, sizes, timing.compute_s)
    return tuple(t if d.emulated else None for d, t in zip(devices, times, strict=True))

"""Building the plan that is written, shown and run from the assignment that the search chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.costs.memory import stage_memory
from planner.costs.model import CostModel, expanded
from planner.micro_batches import MicroBatches
from planner.optimiser.assignment import Assignment, stage_times
from planner.optimiser.solve_options import DEFAULT_SOLVER
from planner.plan.modelled_times import ModelledTimes, modelled_times
from planner.plan.spec import (
    PLAN_VERSION,
    Baseline,
    PlannedModel,
    PlanSpec,
    Prediction,
    SolverRecord,
    StagePlan,
)
from planner.simulation.simulation import (
    OccupiedStages,
    Simulated,
    assignment_timing,
    occupied_stages,
    simulate_assignment,
)
from quant.backends.selection import backend_name


@dataclass(frozen=True)
class Solution:
    """The assignment that won, for its device order and sizes, and how much work finding it was.

    `lower_bound` holds for every candidate that was considered.
    """

    devices: tuple[Device, ...]
    sizes: MicroBatches
    assignment: Assignment
    lower_bound: float
    candidates: int
    solved: int
    seconds: float
    head_on_first: bool = False
    solver: str = DEFAULT_SOLVER

    @property
    def gap(self) -> float:
        """The most that the plan can be from the optimum of the whole search, relative to it."""
        objective = self.assignment.objective
        return (objective - self.lower_bound) / objective if objective > 0 else 0.0


def build_plan(
    costs: CostModel,
    source: str,
    solution: Solution,
    sensitivity_source: str,
    baselines: tuple[Baseline, ...],
) -> PlanSpec:
    """The plan of `solution`; middle stages without layers drop out."""
    costs = replace(costs, head_on_first=solution.head_on_first)
    cluster, shape = costs.cluster, costs.shape
    first_layer, bitwidth = expanded(solution.assignment, costs.options.group)
    occupied = occupied_stages(solution.devices, first_layer)
    devices, bounds = occupied.devices, occupied.first_layer
    times = stage_times(costs.problem(devices, solution.sizes), bounds, bitwidth)
    return PlanSpec(
        version=PLAN_VERSION,
        model=PlannedModel(source, shape.name, shape.model_type, shape.layers, shape.fingerprint()),
        workload=costs.workload,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint(),
        time_scale=cluster.emulate.time_scale if cluster.emulate else 0.0,
        kv_bits=costs.kv_bits,
        micro_batches=solution.sizes,
        head_on_first=solution.head_on_first,
        stages=_stages(costs, solution.sizes, occupied, bitwidth),
        unused_devices=tuple(d.name for d in cluster.devices if d not in devices),
        predicted=_prediction(simulate_solution(costs, solution), times.latency_s),
        solver=_record(costs, solution, times.quality),
        sensitivity_source=sensitivity_source,
        baselines=baselines,
        rounding=costs.options.rounding,
        stand_in=cluster.emulate.stand_in if cluster.emulate else None,
    )


def solution_quality(costs: CostModel, solution: Solution) -> float:
    """Summed sensitivity of the solution's bitwidths."""
    _, bitwidth = expanded(solution.assignment, costs.options.group)
    return float(costs.sensitivity[range(len(bitwidth)), bitwidth].sum())


def simulate_solution(costs: CostModel, solution: Solution) -> Simulated:
    """Every event of one global batch under `solution`, which `PlanSpec.predicted` sums up."""
    costs = replace(costs, head_on_first=solution.head_on_first)
    first_layer, bitwidth = expanded(solution.assignment, costs.options.group)
    return simulate_assignment(costs, solution.devices, solution.sizes, first_layer, bitwidth)


def _prediction(simulated: Simulated, objective_latency_s: float) -> Prediction:
    return Prediction(
        latency_s=simulated.latency_s,
        prefill_s=simulated.prefill_s,
        decode_s=simulated.latency_s - simulated.prefill_s,
        tokens_per_s=simulated.tokens_per_s,
        prefill_bottleneck=int(simulated.busy_s("prefill").argmax()),
        decode_bottleneck=int(simulated.busy_s("decode").argmax()),
        busy_share=simulated.busy_share,
        objective_latency_s=objective_latency_s,
    )


def _record(costs: CostModel, solution: Solution, quality: float) -> SolverRecord:
    assignment, options = solution.assignment, costs.options
    bound = min(solution.lower_bound, assignment.objective)
    return SolverRecord(
        objective_kind=options.objective,
        method=options.method,
        solver=solution.solver,
        status=assignment.status,
        theta=options.theta,
        objective=assignment.objective,
        sensitivity=quality,
        gap=(assignment.objective - bound) / assignment.objective,
        seconds=solution.seconds,
        candidates=solution.candidates,
        solved=solution.solved,
    )


def _stages(
    costs: CostModel,
    sizes: MicroBatches,
    occupied: OccupiedStages,
    bitwidth: Sequence[int],
) -> tuple[StagePlan, ...]:
    devices, bounds = occupied.devices, occupied.first_layer
    modelled = _modelled(costs, sizes, occupied, bitwidth)
    problem = costs.problem(devices, sizes)
    times = stage_times(problem, bounds, bitwidth)
    bits = [costs.options.bits[choice] for choice in bitwidth]
    stages = []
    for j, device in enumerate(devices):
        dtype, mine = costs.dtype(device), tuple(bits[bounds[j] : bounds[j + 1]])
        memory = stage_memory(
            costs.shape,
            mine,
            costs.kv_bytes_per_layer(device),
            device,
            dtype,
            costs.fixed_memory(devices, j, sizes),
        )
        stages.append(
            StagePlan(
                index=j,
                device=device.name,
                accelerator=device.accelerator.name,
                node=device.node,
                emulated=device.emulated,
                threads=device.threads or 1,
                custom_resource=device.custom_resource,
                dtype=dtype,
                layers=range(bounds[j], bounds[j + 1]),
                bitwidths=mine,
                backends={
                    b: backend_name(device.processor, b, dtype, costs.shape.stored is not None)
                    for b in sorted(set(mine))
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
            )
        )
    return tuple(stages)


def _provenance(costs: CostModel, device: Device, following: Device) -> str:
    """Where the times of a stage and of its hop come from."""
    hop = costs.cluster.link_provenance(device, following)
    source = costs.latency.provenance(device, costs.dtype(device), costs.options.bits)
    text = f"{device.accelerator.name} {source}"
    return text if hop is None else f"{text}; {hop}"


def _modelled(
    costs: CostModel, sizes: MicroBatches, occupied: OccupiedStages, bitwidth: Sequence[int]
) -> tuple[ModelledTimes | None, ...]:
    """Times that each stage [N] keeps to; None where its device is real, or has no time scale."""
    devices, emulate = occupied.devices, costs.cluster.emulate
    if emulate is None or not emulate.time_scale:
        return (None,) * len(devices)
    timing = assignment_timing(costs, occupied, bitwidth)
    times = modelled_times(costs, devices, sizes, timing.compute_s)
    return tuple(t if d.emulated else None for d, t in zip(devices, times, strict=True))

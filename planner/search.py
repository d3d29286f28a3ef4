"""The search around the optimiser: every device order with every pair of micro-batch sizes (Alg.
1).

Each candidate gets a lower bound first; candidates are solved from the most promising on, each only
as far as it can beat the best plan found before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.assignment import solve
from planner.capacity import explain_infeasible, is_feasible
from planner.cluster import ClusterSpec
from planner.costs import CostModel, grouped
from planner.device import Device
from planner.latency import LatencyModel
from planner.micro_batches import MicroBatches, micro_batch_pairs
from planner.model_shape import ModelShape
from planner.options import PlanOptions
from planner.orders import device_orders
from planner.plan import Baseline, Plan
from planner.plan_builder import Solution, build_plan
from planner.problem import Assignment, AssignmentProblem, FloatArray, stage_times
from planner.profiles import latency_from_profiles
from planner.relaxation import lower_bound
from planner.remedies import remedies
from planner.roofline import RooflineLatency
from planner.sensitivity import default_sensitivity, load_sensitivity
from planner.workload import Workload
from quant.errors import InfeasibleError, SpecError


@dataclass(frozen=True)
class Candidate:
    """One device order with one pair of micro-batch sizes."""

    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    bound: float


def find_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The best plan for `shape` (found at `source`) on `cluster`.

    Raises `SpecError` for what cannot be planned as asked, `InfeasibleError` when nothing fits.
    """
    _check_length(shape, workload)
    latency = _latency_model(shape, options)
    sensitivity, sensitivity_source = _sensitivity(shape, options)
    costs = CostModel(cluster, shape, workload, options, latency, sensitivity)
    began = clock()
    candidates = _candidates(costs)
    solution = _best(candidates, options)
    solution = replace(solution, seconds=clock() - began)
    baseline = _uniform_baseline(candidates, workload)
    return build_plan(costs, source, solution, sensitivity_source, (baseline,))


def _check_length(shape: ModelShape, workload: Workload) -> None:
    if shape.model_type != "bloom" and workload.total_length > shape.max_positions:
        raise SpecError(
            f"{workload.prompt_length} prompt and {workload.new_tokens} new tokens are "
            f"{workload.total_length}, but {shape.name} has {shape.max_positions} positions; "
            "lower --s or --n"
        )


def _latency_model(shape: ModelShape, options: PlanOptions) -> LatencyModel:
    roofline = RooflineLatency(shape)
    if options.profiles is None:
        return roofline
    return latency_from_profiles(options.profiles, roofline, options.profile_use == "measured")


def _sensitivity(shape: ModelShape, options: PlanOptions) -> tuple[FloatArray, str]:
    """Omega `[layers, bitwidths]`, and where it comes from."""
    if options.omega_file is None:
        return default_sensitivity(shape, options.bits), "default: parameters x (2^b - 1)^-2"
    return load_sensitivity(options.omega_file, shape, options.bits), str(options.omega_file)


def _candidates(costs: CostModel) -> list[Candidate]:
    """All feasible candidates, most promising first; raises `InfeasibleError` if none is."""
    found: list[Candidate] = []
    tightest: tuple[tuple[Device, ...], AssignmentProblem] | None = None
    for devices in _orders(costs):
        for sizes in _sizes(costs.workload, len(devices), costs.options):
            problem = grouped(costs.problem(devices, sizes), costs.options.group)
            if is_feasible(problem):
                found.append(Candidate(devices, sizes, problem, lower_bound(problem)))
            elif tightest is None or problem.memory_bytes.sum() > tightest[1].memory_bytes.sum():
                tightest = devices, problem
    if not found and tightest is not None:
        devices, problem = tightest
        why = explain_infeasible(problem, [device.name for device in devices])
        raise InfeasibleError(f"{costs.shape.name} does not fit: {why}. {remedies(costs, devices)}")
    return sorted(found, key=lambda candidate: candidate.bound)


def _orders(costs: CostModel) -> Iterator[tuple[Device, ...]]:
    devices = costs.cluster.devices
    orders = device_orders(
        devices,
        type_of=lambda d: (d.accelerator.name, d.memory_bytes, d.threads),
        node_of=lambda d: d.node,
        all_orders=costs.options.all_orders,
    )
    return (tuple(devices[i] for i in order) for order in orders)


def _sizes(workload: Workload, stages: int, options: PlanOptions) -> Sequence[MicroBatches]:
    """Pairs to try; a size that the user fixed replaces the searched one."""
    batch = workload.global_batch
    for name in ("prefill_micro_batch", "decode_micro_batch"):
        fixed = getattr(options, name)
        if fixed is not None and fixed > batch:
            raise SpecError(f"{name} is {fixed}, more than the batch of {batch}")
    pairs = {
        MicroBatches(
            options.prefill_micro_batch or pair.prefill, options.decode_micro_batch or pair.decode
        )
        for pair in micro_batch_pairs(batch, stages)
    }
    return sorted(pairs, key=lambda pair: (pair.decode, pair.prefill))


def _best(candidates: Sequence[Candidate], options: PlanOptions) -> Solution:
    """The best of all candidates, each solved only as far as it can beat the others."""
    best: tuple[Candidate, Assignment] | None = None
    lowest = bound = math.inf
    solved = 0
    for candidate in candidates:
        if candidate.bound >= lowest * (1 - options.relative_gap):
            bound = min(bound, candidate.bound)
            continue
        assignment = solve(
            candidate.problem,
            method=options.method,
            solver=options.solver,
            time_limit_s=options.ilp_time_limit,
            relative_gap=options.relative_gap,
            upper_bound=lowest,
        )
        solved += 1
        bound = min(bound, assignment.bound)
        if assignment.objective < lowest:
            best, lowest = (candidate, assignment), assignment.objective
    if best is None:
        raise InfeasibleError("no candidate was solved in time; raise --ilp_time_limit")
    candidate, assignment = best
    return Solution(
        candidate.devices, candidate.sizes, assignment, bound, len(candidates), solved, 0.0
    )


def _uniform_baseline(candidates: Sequence[Candidate], workload: Workload) -> Baseline:
    """One bitwidth, layers spread evenly, the best order and micro-batches (LLM-PQ section 6.1)."""
    latency_s, bits = math.inf, None
    for candidate in candidates:
        try:
            assignment = solve(candidate.problem, method="uniform")
        except InfeasibleError:
            continue
        times = stage_times(candidate.problem, assignment.first_layer, assignment.bitwidth)
        if times.latency_s < latency_s:
            latency_s = times.latency_s
            bits = candidate.problem.bitwidths[assignment.bitwidth[0]]
    if bits is None:
        return Baseline("uniform", None, None, None)
    tokens = workload.global_batch * workload.new_tokens
    return Baseline("uniform", bits, latency_s, tokens / latency_s)

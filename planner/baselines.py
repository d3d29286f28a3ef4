"""The simpler plans of LLM-PQ section 6.1 for the same cluster, to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.candidates import orders_of, searched_sizes
from planner.costs import CostModel
from planner.device import Device
from planner.micro_batches import MicroBatches
from planner.offloading import estimate_offloading
from planner.optimiser.adabits import solve_adabits
from planner.optimiser.pipeedge import solve_pipeedge
from planner.optimiser.problem import Assignment, AssignmentProblem, stage_times
from planner.optimiser.solve_options import SolveOptions
from planner.optimiser.uniform import solve_uniform, uniform_candidate
from planner.plan import Baseline
from planner.plan_builder import Solution
from planner.simulation import simulate_assignment
from quant.errors import InfeasibleError

ADABITS_LIMIT_S = 10.0
OFFLOADED = {"flexgen": 16, "flexgen-int8": 8}


def baselines(costs: CostModel) -> tuple[Baseline, ...]:
    """Uniform, PipeEdge, adabits and, where their bitwidths are allowed, the offloading estimates.

    All but the estimates are simulated like the plan; the LM head is on the last stage.
    """
    costs = replace(costs, head_on_first=False)
    offloading = [
        _offloading(costs, name, bits)
        for name, bits in OFFLOADED.items()
        if bits in costs.options.bits
    ]
    found = [(name, find(costs)) for name, find in _FINDERS.items()]
    return (*(_simulated(costs, name, each) for name, each in found), *offloading)


def baseline_solution(costs: CostModel) -> tuple[CostModel, Solution]:
    """The plan of the baseline that `costs.options.method` names, to be run like any other.

    The LM head is on the last stage, layers are decided one by one; returned with the costs changed
    so. The lower bound is that of the baseline's own order and sizes. Raises InfeasibleError where
    it does not fit.
    """
    name = costs.options.method
    costs = replace(costs, head_on_first=False, options=replace(costs.options, group=1))
    found = _FINDERS[name](costs)
    if found is None:
        raise InfeasibleError(
            f"{name} has no plan: no one bitwidth of {list(costs.options.bits)} fits in any order "
            "of the devices; use method auto, allow fewer bits, or lower the batch"
        )
    assignment = RUNNABLE[name](costs.problem(found.devices, found.sizes))
    return costs, Solution(
        tuple(found.devices), found.sizes, assignment, assignment.bound, 1, 1, 0.0
    )


def _uniform(costs: CostModel) -> _Found | None:
    """One bitwidth, layers spread evenly, the best order and micro-batches."""
    best: _Found | None = None
    for devices in orders_of(costs, all_orders=False):
        for sizes in searched_sizes(costs.workload, len(devices), costs.options):
            problem = costs.problem(devices, sizes)
            try:
                found = uniform_candidate(problem)
            except InfeasibleError:
                continue
            times = stage_times(problem, found.first_layer, found.bitwidth)
            if best is None or times.latency_s < best.rank[0]:
                best = _Found((times.latency_s,), devices, sizes, found.first_layer, found.bitwidth)
    return best


def _pipeedge(costs: CostModel) -> _Found | None:
    """One bitwidth, partitioned for the prefill, the batch over the stages in both phases.

    Of all orders that keep equal devices together the one with the fastest prefill stage.
    """
    best: _Found | None = None
    for devices in orders_of(costs, all_orders=False):
        sizes = _even_share(costs, devices)
        problem = costs.problem(devices, sizes)
        try:
            found = solve_pipeedge(problem)
        except InfeasibleError:
            continue
        times = stage_times(problem, found.first_layer, found.bitwidth)
        slowest_s = max(float(times.prefill_s.max()), float(problem.prefill_comm_s.max()))
        rank = (-problem.bitwidths[found.bitwidth[0]], slowest_s)
        if best is None or rank < best.rank:
            best = _Found(rank, devices, sizes, found.first_layer, found.bitwidth)
    return best


def _adabits(costs: CostModel) -> _Found | None:
    """The best quality that memory allows, the batch over the stages in both phases (section 6.9).

    Of all orders that keep equal devices together the fastest.
    """
    best: _Found | None = None
    for devices in orders_of(costs, all_orders=False):
        sizes = _even_share(costs, devices)
        problem = costs.problem(devices, sizes)
        try:
            found = solve_adabits(problem, SolveOptions(time_limit_s=ADABITS_LIMIT_S))
        except InfeasibleError:
            continue
        times = stage_times(problem, found.first_layer, found.bitwidth)
        rank = (times.quality, times.latency_s)
        if best is None or rank < best.rank:
            best = _Found(rank, devices, sizes, found.first_layer, found.bitwidth)
    return best


@dataclass(frozen=True)
class _Found:
    """A baseline's assignment; of two the one with the lower `rank` is the baseline's choice."""

    rank: tuple[float, ...]
    devices: Sequence[Device]
    sizes: MicroBatches
    first_layer: Sequence[int]
    bitwidth: Sequence[int]


def _simulated(costs: CostModel, name: str, found: _Found | None) -> Baseline:
    if found is None:
        return Baseline(name, None, None, None, None)
    run = simulate_assignment(costs, found.devices, found.sizes, found.first_layer, found.bitwidth)
    used = {costs.options.bits[choice] for choice in found.bitwidth}
    quality = costs.sensitivity[range(len(found.bitwidth)), list(found.bitwidth)].sum()
    return Baseline(
        name,
        used.pop() if len(used) == 1 else None,
        run.latency_s,
        run.tokens_per_s,
        float(quality),
    )


def _offloading(costs: CostModel, name: str, bits: int) -> Baseline:
    """The estimate in the cluster's own order; hosts that state no memory are not limited."""
    devices = costs.cluster.devices
    problem = costs.problem(devices, _even_share(costs, devices))
    on_node = {node: sum(d.node == node for d in devices) for node in costs.cluster.nodes}
    host = [(d.host_memory_bytes or math.inf) / on_node[d.node] for d in devices]
    links = [device.link_bytes_per_s for device in devices]
    try:
        found = estimate_offloading(problem, bits, links, host)
    except InfeasibleError:
        return Baseline(name, None, None, None, None)
    return _baseline(costs, name, bits, found.latency_s)


_FINDERS: dict[str, Callable[[CostModel], _Found | None]] = {
    "uniform": _uniform,
    "pipeedge": _pipeedge,
    "adabits": _adabits,
}
RUNNABLE: dict[str, Callable[[AssignmentProblem], Assignment]] = {
    "uniform": solve_uniform,
    "pipeedge": solve_pipeedge,
}
"""Baselines that a plan can be made of by their names as method."""


def _even_share(costs: CostModel, devices: Sequence[Device]) -> MicroBatches:
    share = -(-costs.workload.global_batch // len(devices))
    return MicroBatches(share, share)


def _baseline(costs: CostModel, name: str, bits: int | None, latency_s: float) -> Baseline:
    if bits is None:
        return Baseline(name, None, None, None, None)
    tokens = costs.workload.global_batch * costs.workload.new_tokens
    quality = costs.sensitivity[:, costs.options.bits.index(bits)].sum()
    return Baseline(name, bits, latency_s, tokens / latency_s, float(quality))

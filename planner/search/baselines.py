"""The simpler plans of LLM-PQ section 6.1 for the same cluster, to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.micro_batches import MicroBatches
from planner.optimiser.capacity import is_feasible
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.pipeedge import solve_pipeedge
from planner.optimiser.heuristics.uniform import solve_uniform, uniform_candidate
from planner.optimiser.layer_choice import Candidate
from planner.optimiser.problem import Assignment, AssignmentProblem, StageTimes, stage_times
from planner.optimiser.quality_tables import QualityTables
from planner.optimiser.solve_options import SolveOptions
from planner.plan.builder import Solution
from planner.plan.spec import Baseline
from planner.search.fitting import (
    Fits,
    SizedProblem,
    equal_problems,
    fitting_problems,
    problems_near_share,
    smaller_equal_problems,
    smallest_sizes,
)
from planner.search.offloading import OffloadingEstimate, estimate_offloading
from planner.search.orders.enumeration import distinct_orders
from planner.simulation.simulation import simulate_assignment
from quant.common.errors import DoesNotFitError, InfeasibleError

ADABITS = SolveOptions(time_limit_s=10.0)
MOST_ORDERS = 24  # all of four unlike groups; further ones hardly differ
OFFLOADED = {"flexgen": 16, "flexgen-int8": 8}
RUNNABLE: dict[str, Callable[[AssignmentProblem], Assignment]] = {
    "uniform": solve_uniform,
    "pipeedge": solve_pipeedge,
}
"""Baselines that a plan can be made of by their names as method."""


def baselines(costs: CostModel) -> tuple[Baseline, ...]:
    """Uniform, PipeEdge, adabits, and the offloading estimates whose bitwidths are allowed."""
    offloading = [name for name, bits in OFFLOADED.items() if bits in costs.options.bits]
    return tuple(baseline(costs, name) for name in (*_POLICIES, *offloading))


def baseline(costs: CostModel, name: str) -> Baseline:
    """The baseline of that name; without figures where it does not fit.

    All but the offloading estimates are simulated like the plan; the LM head is on the last stage.
    """
    costs = _as_published(costs)
    try:
        if name in OFFLOADED:
            return _estimated(costs, name)
        return _simulated(name, _find(costs, name))
    except InfeasibleError:
        return Baseline(name, None, None, None, None)


def baseline_solution(costs: CostModel) -> tuple[CostModel, Solution]:
    """The plan of the baseline that `costs.options.method` names, to be run like any other.

    The LM head is on the last stage, layers are decided one by one, and the bitwidth is the only
    one; returned with the costs changed so. The lower bound is that of the baseline's own order and
    sizes. Raises DoesNotFitError where it does not fit.
    """
    name = costs.options.method
    found = _find(_as_published(costs), name)
    assignment = RUNNABLE[name](found.costs.problem(found.devices, found.sizes))
    bound = assignment.bound
    return found.costs, Solution(found.devices, found.sizes, assignment, bound, 1, 1, 0.0)


def baseline_fits(costs: CostModel) -> bool:
    """Whether `baseline_solution` has a plan: at the smallest micro-batches, if at any."""
    costs = _as_published(costs)
    policy, sizes = _POLICIES[costs.options.method], smallest_sizes(costs.options)
    return any(
        policy.fits(each.problem(devices, sizes))
        for each in _allowed(costs, policy)
        for devices in _orders(costs)
    )


def _as_published(costs: CostModel) -> CostModel:
    """The LM head on the last stage, and layers decided one by one."""
    return replace(costs, head_on_first=False, options=replace(costs.options, group=1))


@dataclass(frozen=True, eq=False)
class _Found:
    """What a baseline makes of one device order and pair of sizes, by the cost model it used."""

    costs: CostModel
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    assignment: Candidate | Assignment

    @property
    def times(self) -> StageTimes:
        """Of its stages."""
        return stage_times(self.problem, self.assignment.first_layer, self.assignment.bitwidth)

    @property
    def latency_s(self) -> float:
        """By the objective, without quality."""
        return self.times.latency_s

    @property
    def slowest_prefill_s(self) -> float:
        """Of the prefill's stages and transfers."""
        return float(max(self.times.prefill_s.max(), self.problem.prefill_comm_s.max()))

    @property
    def sensitivity(self) -> float:
        """Summed over layers."""
        return self.times.quality


Sized = Callable[[CostModel, Sequence[Sequence[Device]], Fits], Iterable[SizedProblem]]
"""The problems that a baseline looks at: orders with sizes of micro-batches that fit."""


@dataclass(frozen=True)
class _Policy:
    """How a baseline decides: the sizes it tries, its partition, what it looks for.

    Of the orders that keep equal devices together (up to `MOST_ORDERS`, of unlike ends first) and
    all sizes it takes the least by the first of `least`, of equal ones the least by the next. With
    `one_bitwidth` that is the highest at which anything fits. The second of `sized` counts where
    nothing fits by the first, at any bitwidth.
    """

    sized: tuple[Sized, ...]
    fits: Fits
    solve: Callable[[AssignmentProblem, QualityTables], Candidate | Assignment]
    least: tuple[Callable[[_Found], float], ...]
    one_bitwidth: bool = True


def _near_share(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> Iterator[SizedProblem]:
    """Every pair of sizes near the batch over the stages that fits."""
    for devices in orders:
        yield from problems_near_share(costs, devices, fits)


def _all_sizes(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> Iterator[SizedProblem]:
    """Where none does, smaller ones."""
    for devices in orders:
        yield from fitting_problems(costs, devices, fits)


def _fits_evenly(problem: AssignmentProblem) -> bool:
    """Whether some bitwidth fits where layers are spread evenly."""
    try:
        uniform_candidate(problem)
    except InfeasibleError:
        return False
    return True


_POLICIES = {
    "uniform": _Policy(
        (_near_share, _all_sizes),
        _fits_evenly,
        lambda problem, _: uniform_candidate(problem),
        (lambda found: found.latency_s,),
    ),
    "pipeedge": _Policy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        lambda problem, _: solve_pipeedge(problem),
        (lambda found: found.slowest_prefill_s,),
    ),
    "adabits": _Policy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        lambda problem, tables: solve_adabits(problem, ADABITS, tables),
        (lambda found: found.sensitivity, lambda found: found.latency_s),
        one_bitwidth=False,
    ),
}
"""Section 6.1, adabits section 6.9; Uniform spreads layers evenly, PipeEdge by prefill alone."""


def _find(costs: CostModel, name: str) -> _Found:
    """What the policy decides for; DoesNotFitError where nothing fits."""
    policy = _POLICIES[name]
    for sized in policy.sized:
        for each in _allowed(costs, policy):
            found = list(_solved(each, policy, sized))
            if found:
                return _least(found, policy.least)
    raise DoesNotFitError(
        f"{name} has no plan: no one bitwidth of {list(costs.options.bits)} fits in any order of "
        "the devices, at any micro-batch sizes allowed"
    )


def _allowed(costs: CostModel, policy: _Policy) -> Iterator[CostModel]:
    """The costs of the policy's plans; where they have one bitwidth, those of the highest first."""
    if not policy.one_bitwidth:
        return iter((costs,))
    return _highest_first(costs)


def _highest_first(costs: CostModel) -> Iterator[CostModel]:
    """For each bitwidth the cost model of a plan that has no other."""
    return (_of_one_bitwidth(costs, bits) for bits in reversed(costs.options.bits))


def _of_one_bitwidth(costs: CostModel, bits: int) -> CostModel:
    """The costs where no other bitwidth is used, and memory is kept for no other's kernels."""
    choice = costs.options.bits.index(bits)
    options = replace(costs.options, bits=(bits,))
    return replace(costs, options=options, sensitivity=costs.sensitivity[:, [choice]])


def _solved(costs: CostModel, policy: _Policy, sized: Sized) -> Iterator[_Found]:
    """The policy's assignment for every order and pair of sizes in which it has one."""
    tables = QualityTables(costs.sensitivity)
    for each in sized(costs, _orders(costs), policy.fits):
        found = policy.solve(each.problem, tables)
        yield _Found(costs, each.devices, each.sizes, each.problem, found)


def _orders(costs: CostModel) -> list[tuple[Device, ...]]:
    return list(islice(distinct_orders(costs.cluster.devices, all_orders=False), MOST_ORDERS))


def _least(found: list[_Found], figures: Sequence[Callable[[_Found], float]]) -> _Found:
    """The least by the first figure; what is within the solver's gap of it, by the next."""
    *first, last = figures
    for figure in first:
        limit = min(map(figure, found)) * (1 + ADABITS.relative_gap)
        found = [each for each in found if figure(each) <= limit]
    return min(found, key=last)


def _simulated(name: str, found: _Found) -> Baseline:
    costs, assignment = found.costs, found.assignment
    run = simulate_assignment(
        costs, found.devices, found.sizes, assignment.first_layer, assignment.bitwidth
    )
    used = {costs.options.bits[choice] for choice in assignment.bitwidth}
    return Baseline(
        name,
        used.pop() if len(used) == 1 else None,
        run.latency_s,
        run.tokens_per_s,
        found.sensitivity,
    )


def offloading(costs: CostModel, name: str) -> OffloadingEstimate:
    """FlexGen in the cluster's own order; hosts that state no memory are not limited.

    Raises InfeasibleError where the hosts' memory is short.
    """
    bits = OFFLOADED[name]
    costs = _as_published(_of_one_bitwidth(costs, bits))
    devices = costs.cluster.devices
    share = -(-costs.workload.global_batch // len(devices))
    sizes = MicroBatches(share, share)
    on_node = {node: sum(d.node == node for d in devices) for node in costs.cluster.nodes}
    host = [(d.host_memory_bytes or math.inf) / on_node[d.node] for d in devices]
    links = [device.host_link_bytes_per_s for device in devices]
    return estimate_offloading(costs.problem(devices, sizes), bits, links, host)


def _estimated(costs: CostModel, name: str) -> Baseline:
    found = offloading(costs, name)
    tokens = costs.workload.global_batch * costs.workload.new_tokens
    sensitivity = costs.sensitivity[:, costs.options.bits.index(found.bits)].sum()
    return Baseline(name, found.bits, found.latency_s, tokens / found.latency_s, float(sensitivity))

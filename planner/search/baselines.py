"""The baselines of LLM-PQ section 6.1: how each decides, as the plan itself and beside a plan.

The LM head is on the last stage and layers are decided one by one, as the systems were published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.optimiser.assignment import (
    Assignment,
    AssignmentCosts,
    OutOfTimeError,
    SolveOptions,
    stage_times,
)
from planner.optimiser.feasibility import is_feasible
from planner.optimiser.problem import AssignmentProblem, latency_form
from planner.optimiser.sensitivity_tables import LossTables
from planner.optimiser.solve import (
    OffloadingEstimate,
    estimate_offloading,
    pipeedge_assignment,
    solve_by,
    uniform_assignment,
)
from planner.optimiser.transfer import solve_adabits
from planner.options import AUTO
from planner.plan.builder import Solution
from planner.plan.spec import Baseline
from planner.search.candidate_search import SearchTime
from planner.search.candidates import Candidates
from planner.search.fitting import (
    Fits,
    SizedProblem,
    check_fixed_sizes,
    end_choices,
    equal_problems,
    fitting_sizes,
    sizes_near_share,
    smaller_equal_problems,
    smallest_sizes,
)
from planner.search.orders import canonical_devices, order_tree
from planner.simulation.job_simulation import Forecast, forecast_assignment
from planner.workload import MAX_REQUESTS, Job, MicroBatches
from quant.common.errors import DoesNotFitError, InfeasibleError

ADABITS_S = 10.0
ADABITS = SolveOptions(time_limit_s=ADABITS_S)
OFFLOADED = {"flexgen": 16, "flexgen-int8": 8}

NEARER = (2**0.5, 2**0.25, 2**0.125)
"""Ratios to the best number in flight so far, of those that are tried after it."""


@dataclass(frozen=True, eq=False)
class BaselineChoice:
    """A baseline's assignment for one device order and pair of sizes, and the costs it used."""

    costs: CostModel
    sized: SizedProblem
    assignment: Assignment

    @property
    def times(self) -> AssignmentCosts:
        return stage_times(
            self.sized.problem, self.assignment.first_layer, self.assignment.bitwidth
        )

    @property
    def slowest_prefill_s(self) -> float:
        """Seconds of the prefill's slowest stage or transfer."""
        floor_s = latency_form(self.sized.problem).prefill_floor_s
        return float(max(self.times.prefill_s.max(), floor_s))

    def forecast(self) -> Forecast:
        found = self.assignment.first_layer, self.assignment.bitwidth
        table = PassTable.of(self.costs, self.sized.devices, *found)
        return forecast_assignment(table, self.sized.sizes)


@dataclass(frozen=True)
class BaselinePolicy:
    """Of the orders and all sizes `sized` it takes the least by the first of `least`, of equal ones
    by the next; with `one_bitwidth` the highest that fits. The second of `sized` counts where
    nothing fits by the first.
    """

    sized: tuple[
        Callable[[CostModel, Sequence[Sequence[Device]], Fits], Iterable[SizedProblem]], ...
    ]
    fits: Fits
    solve: Callable[[AssignmentProblem, SolveOptions, LossTables], Assignment]
    least: tuple[Callable[[BaselineChoice], float], ...]
    one_bitwidth: bool = True

    def allowed(self, costs: CostModel) -> Iterator[CostModel]:
        """Yield the costs of its plans; with one bitwidth the costs of each, highest first."""
        if not self.one_bitwidth:
            yield costs
            return
        for bits in reversed(costs.options.bits):
            yield with_one_bitwidth(costs, bits)


def as_published(costs: CostModel) -> CostModel:
    return replace(costs.whole, head_on_first=False, options=replace(costs.options, group=1))


def with_one_bitwidth(costs: CostModel, bits: int) -> CostModel:
    """The costs where no other bitwidth is used, and no memory is kept for others' kernels."""
    choice = costs.options.bits.index(bits)
    options = replace(costs.options, bits=(bits,))
    experts = costs.expert_sensitivity
    return replace(
        costs,
        options=options,
        sensitivity=costs.sensitivity[:, [choice]],
        expert_sensitivity=None if experts is None else experts[:, [choice]],
    )


def baseline_orders(costs: CostModel) -> list[tuple[Device, ...]]:
    """One order for each pair of kinds at the ends, on which memory depends, and the most promising
    one by the search's bounds; stages between change little. SpecError for sizes that are wrong.
    """
    check_fixed_sizes(costs)
    together = replace(costs, options=replace(costs.options, all_orders=False))
    orders = list(end_choices(together))
    every = order_tree(canonical_devices(costs.cluster.devices), all_orders=False)
    if every.count > len(orders):  # of few devices these are all orders
        with suppress(DoesNotFitError):
            orders.append(Candidates(together).pop().devices)
    return list(dict.fromkeys(orders))


def choose(
    costs: CostModel,
    name: str,
    orders: Sequence[tuple[Device, ...]] | None = None,
    time_left: SearchTime | None = None,
) -> BaselineChoice:
    """The baseline's choice, of what there is time for; DoesNotFitError where nothing fits."""
    policy = POLICIES[name]
    orders = orders or baseline_orders(costs)
    for sized in policy.sized:
        for allowed in policy.allowed(costs):
            found, tables = list[BaselineChoice](), None
            for each in sized(allowed, orders, policy.fits):
                tables = tables or LossTables(each.problem)
                solved = policy.solve(each.problem, _limits(time_left), tables)
                found.append(BaselineChoice(allowed, each, solved))
                if time_left is not None and time_left.is_over:
                    break
            if found:
                return _least(found, policy.least)
            if time_left is not None and time_left.is_over:
                raise OutOfTimeError
    raise DoesNotFitError(
        f"{name} has no plan: no one bitwidth of {list(costs.options.bits)} fits in any order of "
        "the devices, at any micro-batch sizes allowed"
    )


def _limits(time_left: SearchTime | None) -> SolveOptions:
    if time_left is None:
        return ADABITS
    return replace(ADABITS, time_limit_s=min(ADABITS_S, time_left.next_s()))


def _least(
    found: list[BaselineChoice], figures: Sequence[Callable[[BaselineChoice], float]]
) -> BaselineChoice:
    *first, last = figures
    for figure in first:
        limit = min(map(figure, found)) * (1 + ADABITS.relative_gap)
        found = [each for each in found if figure(each) <= limit]
    return min(found, key=last)


def _of_each_order(
    sizes_of: Callable[[CostModel, Sequence[Device], Fits], list[MicroBatches]],
) -> Callable[[CostModel, Sequence[Sequence[Device]], Fits], Iterable[SizedProblem]]:
    return lambda costs, orders, fits: (
        SizedProblem.of(costs, devices, sizes)
        for devices in orders
        for sizes in sizes_of(costs, devices, fits)
    )


def _fits_evenly(problem: AssignmentProblem) -> bool:
    try:
        uniform_assignment(problem)
    except InfeasibleError:
        return False
    return True


POLICIES = {
    "uniform": BaselinePolicy(
        (_of_each_order(sizes_near_share), _of_each_order(fitting_sizes)),
        _fits_evenly,
        lambda problem, *_: uniform_assignment(problem),
        (lambda found: found.times.latency_s,),
    ),
    "pipeedge": BaselinePolicy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        lambda problem, *_: pipeedge_assignment(problem),
        (lambda found: found.slowest_prefill_s,),
    ),
    "adabits": BaselinePolicy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        solve_adabits,
        (lambda found: found.times.quality, lambda found: found.times.latency_s),
        one_bitwidth=False,
    ),
}
"""Section 6.1, adabits section 6.9; Uniform spreads layers evenly, PipeEdge by prefill alone."""


def baseline_solution(costs: CostModel) -> tuple[CostModel, Solution]:
    """The plan of the baseline that `costs.options.method` names, with the best number in flight,
    and the costs with its one bitwidth. The bound is of its own order and sizes. DoesNotFitError
    where it does not fit.
    """
    name, costs = costs.options.method, as_published(costs)
    if costs.job is not None and costs.options.in_flight == AUTO:
        found = _at_best_number(costs, costs.job)
    else:
        found = choose(costs, name)
    costs, sized = found.costs, found.sized
    assignment = solve_by(name, costs.problem(sized.devices, sized.sizes), SolveOptions())
    placed = costs.workload, sized.devices, sized.sizes
    return costs, Solution(*placed, assignment, assignment.bound)


def _at_best_number(costs: CostModel, job: Job) -> BaselineChoice:
    """The choice with which the job is simulated to end first, of numbers ever twice as many, then
    nearer the best.
    """
    least, tried = costs.workload.global_batch, dict[int, tuple[float, BaselineChoice]]()

    def fits(number: int) -> bool:
        try:
            found = choose(costs.with_in_flight(job, number), costs.options.method)
        except DoesNotFitError:
            if number == least:
                raise
            return False
        tried[number] = found.forecast().seconds, found
        return True

    number = least
    while number <= min(job.prompts, MAX_REQUESTS) and fits(number):
        number *= 2
    for ratio in NEARER:
        best = min(tried, key=lambda each: tried[each][0])
        for near in {round(best / ratio), min(job.prompts, round(best * ratio))} - {*tried}:
            if near >= least:
                fits(near)
    _, found = min(tried.values(), key=lambda each: each[0])
    return found


def baseline_fits(costs: CostModel) -> bool:
    """Whether `baseline_solution` has a plan: at the smallest micro-batches, if at any."""
    costs = as_published(costs)
    policy, sizes = POLICIES[costs.options.method], smallest_sizes(costs.options)
    return any(
        policy.fits(each.problem(devices, sizes))
        for each in policy.allowed(costs)
        for devices in baseline_orders(costs)
    )


def baselines(costs: CostModel, time_left: SearchTime | None = None) -> Iterator[Baseline]:
    """Yield uniform, PipeEdge, adabits, and the offloading estimates whose bitwidths are allowed;
    those for which there is time.
    """
    offloaded = [name for name, bits in OFFLOADED.items() if bits in costs.options.bits]
    orders = baseline_orders(as_published(costs))
    for name in (*POLICIES, *offloaded):
        if time_left is None or not time_left.is_over:
            with suppress(OutOfTimeError):
                yield baseline(costs, name, orders, time_left)


def baseline(
    costs: CostModel,
    name: str,
    orders: Sequence[tuple[Device, ...]] | None = None,
    time_left: SearchTime | None = None,
) -> Baseline:
    """The baseline of that name, simulated like the plan but for offloading; without figures where
    it does not fit.
    """
    try:
        if name in OFFLOADED:
            estimate, bits = offloading(costs, name), OFFLOADED[name]
            omega = float(costs.sensitivity[:, costs.options.bits.index(bits)].sum())
            rate = costs.generated_tokens / estimate.latency_s
            return Baseline(name, bits, estimate.latency_s, rate, omega)
        found = choose(as_published(costs), name, orders, time_left)
        run = found.forecast()
    except InfeasibleError:
        return Baseline(name, None, None, None, None)
    used = {found.costs.options.bits[choice] for choice in found.assignment.bitwidth}
    bits_used = used.pop() if len(used) == 1 else None
    return Baseline(name, bits_used, run.seconds, run.tokens_per_s, found.times.quality)


def offloading(costs: CostModel, name: str) -> OffloadingEstimate:
    """FlexGen in the cluster's order; hosts that state no memory have no limit. InfeasibleError."""
    bits = OFFLOADED[name]
    costs = as_published(with_one_bitwidth(costs, bits))
    devices = costs.cluster.devices
    share = -(-costs.workload.global_batch // len(devices))
    on_node = {node: sum(d.node == node for d in devices) for node in costs.cluster.nodes}
    host = [(d.host_memory_bytes or math.inf) / on_node[d.node] for d in devices]
    links = [device.host_link_bytes_per_s for device in devices]
    problem = costs.problem(devices, MicroBatches(share, share))
    return estimate_offloading(problem, bits, links, host)

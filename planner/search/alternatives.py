"""What people ask of a plan: other numbers in flight, other qualities, another GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.cluster.spec import grown, kinds_of_devices
from planner.costs.model import CostModel, expanded, grouped
from planner.micro_batches import MicroBatches
from planner.optimiser.names import BASELINE_METHODS
from planner.optimiser.solve import solve
from planner.options import PlanOptions
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.plan.forecasts import Prediction
from planner.plan.spec import MoreDevices, PlanChoice, PlansBeside, QualityChoice
from planner.search.candidate_search import SearchTime, search
from planner.search.in_flight import RANKING_PASSES, plan_solver
from planner.search.qualities import Chosen
from planner.workload import Job
from quant.common.errors import InfeasibleError

MOST_KINDS = 4
"""Kinds of device of which one more is tried; of clusters with more the first ones."""

ANSWER_GAP = 1e-2  # relative gap of answers, which are named with two or three digits
ANSWER_TIME = 0.125  # share of `search_time_limit` that the search for an answer has at most
CURVE_STEP = math.sqrt(2.0)
CURVE_REACH = 6  # points to either side of the plan's own
CURVE_SOLVE_S = 1.0

SMALLER_BATCHES = (0.75, 0.5)
"""Shares of a given batch that are tried as the number in flight."""


def plans_beside(
    chosen: Chosen, predicted: Prediction, time_left: SearchTime, clock: Callable[[], float]
) -> PlansBeside:
    """The plans beside the one that was chosen, searched for in the time that is left."""
    costs, finest = chosen.costs, chosen.finest
    about = _Plan(costs, chosen.solution, predicted.latency_s, time_left)
    beside = PlansBeside(
        quality=chosen.quality,
        qualities=tuple(
            QualityChoice(name, point.theta, choice(costs, point.plan, point.predicted_s))
            for name, point in chosen.qualities.items()
        ),
        full_precision=choice(costs, finest.plan, finest.predicted_s) if finest else None,
    )
    if costs.job is None:
        return replace(beside, beaten_by=_beaten_by(about, clock))
    if chosen.quality is None:
        return beside
    more = tuple(_more_devices(about, clock))
    return replace(beside, curve=tuple(_curve(about, costs.job)), more_devices=more)


def choice(costs: CostModel, solution: Solution, seconds: float) -> PlanChoice:
    _, bitwidth = expanded(solution.assignment, costs.options.group)
    return PlanChoice(
        in_flight=solution.workload.global_batch,
        tokens_per_s=solution.costs(costs).generated_tokens / seconds,
        sensitivity=solution_quality(costs, solution),
        mean_bits=sum(costs.options.bits[each] for each in bitwidth) / len(bitwidth),
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """The plan that is asked about: costs at its theta, predicted seconds, and the time for
    answers.
    """

    costs: CostModel
    solution: Solution
    predicted_s: float
    time_left: SearchTime

    def answer_options(self) -> PlanOptions:
        options = self.costs.options
        limit_s = min(ANSWER_TIME * options.search_time_limit, self.time_left.next_s())
        return replace(options, relative_gap=ANSWER_GAP, search_time_limit=limit_s)

    def choice(self, other: Solution) -> PlanChoice:
        """The figures of another solution, whose prediction is to its closed form as the plan's."""
        factor = self.predicted_s / self._closed_s(self.solution)
        return choice(self.costs, other, factor * self._closed_s(other))

    def cost_s(self, other: PlanChoice) -> float:
        """Seconds of the job under another plan, and what its sensitivity is worth."""
        return (
            self.costs.generated_tokens / other.tokens_per_s + self.costs.theta * other.sensitivity
        )

    def _closed_s(self, solution: Solution) -> float:
        quality_s = self.costs.theta * solution_quality(self.costs, solution)
        return solution.assignment.objective - quality_s


def _curve(plan: _Plan, job: Job) -> Iterator[PlanChoice]:
    """Yield the best plans for other numbers in flight that fit, on the plan's devices in its
    order.
    """
    own = plan.solution.workload.global_batch
    steps = range(-CURVE_REACH, CURVE_REACH + 1)
    numbers = {min(job.prompts, round(own * CURVE_STEP**step)) for step in steps} - {own, 0}
    for number in sorted(numbers):
        found = _at_number(plan, job, number)
        if found is not None:
            yield plan.choice(found)


def _at_number(plan: _Plan, job: Job, number: int) -> Solution | None:
    solution, options = plan.solution, plan.costs.options
    workload = plan.costs.in_flight(job, number)
    costs = replace(solution.costs(plan.costs), workload=workload)
    decode = -(-number // len(solution.devices))
    sizes = MicroBatches(min(solution.sizes.prefill, decode), decode)
    problem = grouped(costs.problem(solution.devices, sizes), options.group)
    try:
        limit_s = min(CURVE_SOLVE_S, plan.time_left.next_s())
        found = solve(problem, time_limit_s=limit_s, relative_gap=ANSWER_GAP)
    except InfeasibleError:
        return None
    return replace(solution, workload=workload, sizes=sizes, assignment=found)


def _more_devices(plan: _Plan, clock: Callable[[], float]) -> Iterator[MoreDevices]:
    """Yield what one more of each kind of device brings; nothing where a plan is better without."""
    used, number = len(plan.solution.devices), plan.solution.workload.global_batch
    most = number if plan.costs.job is None else plan.costs.job.prompts
    known = {number, min(most, round(number * (used + 1) / used))}
    for kind in kinds_of_devices(plan.costs.cluster)[:MOST_KINDS]:
        found = _with_one_more(plan, kind, known, clock)
        own = choice(plan.costs, plan.solution, plan.predicted_s)
        # A slow device more can cost more than it brings, and then is left out.
        best = min(own, found, key=plan.cost_s)
        yield MoreDevices(kind.accelerator.name, kind.node, 1, best)


def _with_one_more(
    plan: _Plan, kind: Device, known: set[int], clock: Callable[[], float]
) -> PlanChoice:
    options = replace(plan.answer_options(), keep_all_devices=True, tensor_parallel=1)
    cluster = grown(plan.costs.cluster, kind, 1)
    devices = (*plan.solution.devices, cluster.devices[-1])
    cluster = replace(cluster, devices=devices)
    costs = replace(plan.costs, cluster=cluster, options=options)
    found = plan_solver(costs, clock, known)(costs.theta, quick=True)
    return choice(costs, found, forecast_solution(costs, found, RANKING_PASSES).seconds)


def _beaten_by(plan: _Plan, clock: Callable[[], float]) -> PlanChoice | None:
    costs, batch = plan.costs, plan.costs.workload.global_batch
    own = choice(costs, plan.solution, plan.predicted_s)
    options = costs.options
    fixed = options.prefill_micro_batch or options.decode_micro_batch
    if own.sensitivity <= 0 or fixed or options.method in BASELINE_METHODS:
        return None
    for share in SMALLER_BATCHES:
        number = round(share * batch)
        if number < 1:
            return None
        fewer = replace(
            costs,
            workload=replace(costs.workload, global_batch=number),
            theta=costs.theta * number / batch,
            options=plan.answer_options(),
        )
        found = search(fewer, clock)
        other = choice(fewer, found, forecast_solution(fewer, found).seconds)
        if other.beats(own):
            return other
    return None

"""The search around the optimiser: every device order with every pair of micro-batch sizes (Alg.
1).

Each candidate gets a lower bound first; candidates are solved from the most promising on, each only
as far as it can beat the best plan found before.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.latency import RememberedLatency
from planner.costs.model import CostModel
from planner.model.finding import ModelShape
from planner.optimiser.auto import solve_automatically
from planner.optimiser.boxes.method import ROUNDING
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.transfer import solve_by_transfer
from planner.optimiser.milp.solvers import DEFAULT_SOLVER, SolverUnavailableError
from planner.optimiser.problem import Assignment, FloatArray
from planner.optimiser.quality_tables import QualityTables
from planner.optimiser.solve import solve
from planner.optimiser.solve_options import SolveOptions
from planner.options import AUTO, PlanOptions
from planner.plan.builder import Solution, build_plan, simulate_solution, solution_quality
from planner.plan.origin import origin_of
from planner.plan.spec import PlanSpec
from planner.profiles.links import links_beside
from planner.quality.perplexity_fit import omega_bound, perplexity_forecast
from planner.quality.sensitivity import Omega
from planner.search.baselines import RUNNABLE, baseline_fits, baseline_solution, baselines
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.cost_sources import files_of_costs, latency_model_of, omega_of
from planner.search.fitting import fitting_sets, misfit
from planner.search.orders.enumeration import distinct_sets, look_of_set
from planner.search.pareto import Point, fastest_within, finest_within
from planner.search.remedies import Planner, PlanningRequest, naming_remedies
from planner.stored_bits import with_stored_bits
from planner.workload import Workload, check_length
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError, SpecError
from quant.scheme import KV_BITWIDTHS

_Found = TypeVar("_Found")

DESCENT_GAP = 1e-2
"""Relative gap at which fewer devices are tried before the search goes on with more of them."""

LEAST_SOLVE_S = 0.1  # for a candidate that was begun before time was up

SHARING_METHODS = {
    "auto": solve_automatically,
    "transfer": solve_by_transfer,
    "adabits": solve_adabits,
}
"""Methods that take tables of sensitivities, which serve all candidates."""


class PlanSearch:
    """Solves candidates one by one, best bound first, until none can be better than the gap.

    Out of time (`search_time_limit`) it stops at the best plan so far, if there is one.
    """

    def __init__(self, options: PlanOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._start = clock()
        self._tables: QualityTables | None = None
        self._best: tuple[SearchCandidate, Assignment] | None = None
        self._bound = math.inf
        self._solved = 0

    def run(self, candidates: Candidates, gap: float) -> None:
        """Search `candidates` until none that is left can beat the best plan by more than `gap`."""
        while candidates.bound < self._lowest() * (1 - gap) and not self.is_over:
            self._try(candidates.pop())

    @property
    def best_devices(self) -> tuple[Device, ...] | None:
        """The devices of the best plan so far."""
        return None if self._best is None else self._best[0].devices

    @property
    def is_over(self) -> bool:
        """Whether time is up and there is a plan."""
        return self._best is not None and self._seconds_left() <= 0

    def solution(self, searched: Sequence[Candidates]) -> Solution:
        """The best plan of all that were `searched`; InfeasibleError if there is none.

        Its assignment is "optimal" only if that is proven over all candidates.
        """
        count = sum(candidates.count for candidates in searched)
        if self._best is None:
            raise InfeasibleError(
                f"method {self._options.method} has no plan for any of {count} candidates; "
                "use method auto"
            )
        candidate, assignment = self._best
        bound = min(self._bound, *(candidates.bound for candidates in searched))
        if assignment.status == "optimal" and bound < self._target() * (1 - ROUNDING):
            assignment = replace(assignment, status="time_limit")
        return Solution(
            candidate.devices,
            candidate.sizes,
            assignment,
            min(bound, assignment.objective),
            count,
            self._solved,
            self._clock() - self._start,
            candidate.head_on_first,
            self._options.solver,
        )

    def _seconds_left(self) -> float:
        return self._options.search_time_limit - (self._clock() - self._start)

    def _lowest(self) -> float:
        """The best objective so far, in seconds."""
        return math.inf if self._best is None else self._best[1].objective

    def _target(self) -> float:
        """Seconds below which a plan is still of interest."""
        return self._lowest() * (1 - self._options.relative_gap)

    def _try(self, candidate: SearchCandidate) -> None:
        """Solve one candidate, as far as it can beat the best."""
        self._solved += 1
        try:
            found = self._solve(candidate)
        except InfeasibleError:
            self._bound = min(self._bound, candidate.bound)
            return
        self._bound = min(self._bound, max(candidate.bound, found.bound))
        if found.objective < self._lowest():
            self._best = candidate, found

    def _solve(self, candidate: SearchCandidate) -> Assignment:
        """With the solver that was asked for, or from its first refusal on with HiGHS."""
        try:
            return self._solve_as_asked(candidate)
        except SolverUnavailableError as error:
            warnings.warn(f"{error}; going on with {DEFAULT_SOLVER}", stacklevel=2)
            self._options = replace(self._options, solver=DEFAULT_SOLVER)
            return self._solve_as_asked(candidate)

    def _solve_as_asked(self, candidate: SearchCandidate) -> Assignment:
        """By the method asked for; those that can share the tables of sensitivities do."""
        options, problem = self._options, candidate.problem
        sharing = SHARING_METHODS.get(options.method)
        limit_s = options.ilp_time_limit
        if self._best is not None:
            limit_s = min(limit_s, max(self._seconds_left(), LEAST_SOLVE_S))
        if sharing is None or options.solver != DEFAULT_SOLVER:
            return solve(
                problem,
                method=options.method,
                solver=options.solver,
                time_limit_s=limit_s,
                relative_gap=options.relative_gap,
                upper_bound=self._lowest(),
            )
        limits = SolveOptions(
            options.solver, limit_s, options.relative_gap, self._lowest(), self._clock
        )
        if self._tables is None:
            self._tables = QualityTables(problem.sensitivity)
        return sharing(problem, limits, self._tables)


def find_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PlanSpec:
    """The best plan for `shape` (found at `source`) on `cluster`.

    Raises `SpecError` for what cannot be planned as asked, `InfeasibleError` when nothing fits.
    """
    return find_priced_plan(cluster, shape, source, workload, options, clock).plan


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan and the cost model that it was found with, which explains and simulates it."""

    plan: PlanSpec
    costs: CostModel


def find_priced_plan(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    workload: Workload,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> PricedPlan:
    """As `find_plan`, with the costs."""
    request = PlanningRequest(cluster, shape, workload, options)
    with naming_remedies(request, REMEDY_PLANNER):
        found = _find(request, source, clock)
    origin = origin_of(cluster, options, files_of_costs(options))
    return replace(found, plan=replace(found.plan, origin=origin))


def _find(request: PlanningRequest, source: str, clock: Callable[[], float]) -> PricedPlan:
    """The plan, without its origin; what is refused is refused without remedies."""
    options = request.options
    if options.kv_bits == AUTO:
        return with_fitting_cache(
            options, lambda chosen: _find(replace(request, options=chosen), source, clock)
        )
    costs, omega = _costs_of(request)
    began = clock()
    chosen, solution = _solution(costs, options, clock)
    solution = replace(solution, seconds=clock() - began)
    plan = build_plan(chosen, source, solution, omega.source, baselines(costs))
    forecast = perplexity_forecast(omega, plan.solver.sensitivity, options.max_ppl_delta)
    return PricedPlan(replace(plan, perplexity=forecast), costs)


def with_fitting_cache(options: PlanOptions, find: Callable[[PlanOptions], _Found]) -> _Found:
    """What `find` makes of the options with the most bits of keys and values that fit."""
    fewest, *more = KV_BITWIDTHS
    for bits in reversed(more):
        with suppress(InfeasibleError):
            return find(replace(options, kv_bits=bits))
    return find(replace(options, kv_bits=fewest))


def _solution(
    costs: CostModel, asked: PlanOptions, clock: Callable[[], float]
) -> tuple[CostModel, Solution]:
    """The best one, or with the method of a baseline the paper's own plan of that name."""
    options = costs.options
    if options.method in RUNNABLE:
        if options.max_omega is not None or options.max_latency_s is not None:
            raise SpecError(
                f"method {options.method} makes one plan, without regard to max_omega, "
                "max_ppl_delta or max_latency_s; leave them out"
            )
        return baseline_solution(costs)
    try:
        return within_bounds(costs, clock)
    except BoundNotMetError as error:
        if asked.max_ppl_delta is None:
            raise
        text = (
            f"{error} (max_ppl_delta {asked.max_ppl_delta:g} allows a summed sensitivity of "
            f"{options.max_omega:g})"
        )
        raise BoundNotMetError(text, error.option, error.reachable) from error


def _fits(request: PlanningRequest) -> bool:
    """Whether memory allows a plan, at any micro-batch sizes."""
    return _succeeds(request, lambda costs: bool(fitting_sets(costs)))


def _plans(request: PlanningRequest) -> bool:
    """Whether the search has a candidate, and where there is a bound a plan within it."""

    def plan(costs: CostModel) -> bool:
        if costs.options.max_omega is None and costs.options.max_latency_s is None:
            sets = (replace(costs.cluster, devices=devices) for devices in fitting_sets(costs))
            return any(Candidates(replace(costs, cluster=cluster)).count for cluster in sets)
        return bool(within_bounds(costs))

    return _succeeds(request, plan)


def _succeeds(request: PlanningRequest, attempt: Callable[[CostModel], bool]) -> bool:
    """Whether an attempt with one of the sizes of keys and values is not refused."""
    bits = KV_BITWIDTHS if request.options.kv_bits == AUTO else (request.options.kv_bits,)
    for each in bits:
        with suppress(InfeasibleError, SpecError):
            costs, _ = _costs_of(request.with_options(kv_bits=each))
            runs = baseline_fits if costs.options.method in RUNNABLE else attempt
            if runs(costs):
                return True
    return False


REMEDY_PLANNER = Planner(_fits, _plans)


def _costs_of(request: PlanningRequest) -> tuple[CostModel, Omega]:
    return planning_costs(request.cluster, request.shape, request.workload, request.options)


def planning_costs(
    cluster: ClusterSpec, shape: ModelShape, workload: Workload, options: PlanOptions
) -> tuple[CostModel, Omega]:
    """The cost model that the options ask for, and the sensitivities it was made with.

    A bound of perplexity has become one of summed sensitivity.
    """
    options = with_stored_bits(options, shape)
    omega = omega_of(shape, options)
    if options.max_ppl_delta is not None:
        bound = omega_bound(omega, options.max_ppl_delta)
        options = replace(options, max_ppl_delta=None, max_omega=bound)
    return cost_model(cluster, shape, workload, options, omega.matrix), omega


def within_bounds(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostModel, Solution]:
    """The best solution, by theta or within the bound in the options, and its theta's costs."""
    options = costs.options
    if options.max_omega is None and options.max_latency_s is None:
        return costs, search(costs, clock)
    solve = theta_solver(costs, clock)
    if options.max_omega is not None:
        choice = fastest_within(solve, options.max_omega)
    else:
        choice = finest_within(solve, float(options.max_latency_s or 0.0))
    point = choice.point
    at_theta = replace(costs, options=replace(options, theta=point.theta))
    assignment = point.plan.assignment
    if assignment.status == "optimal" and choice.gap > options.relative_gap:
        assignment = replace(assignment, status="bounded")
    lower_bound = assignment.objective * (1 - choice.gap)
    return at_theta, replace(point.plan, assignment=assignment, lower_bound=lower_bound)


def theta_solver(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> Callable[[float], Point[Solution]]:
    """For the Pareto front: the search at any theta, as a point of latency and quality."""

    def solve_at(theta: float) -> Point[Solution]:
        priced = replace(costs, options=replace(costs.options, theta=theta))
        solution = search(priced, clock)
        quality = solution_quality(priced, solution)
        latency_s = solution.assignment.objective - theta * quality
        predicted_s = simulate_solution(priced, solution).latency_s
        return Point(theta, latency_s, quality, solution.lower_bound, solution, predicted_s)

    return solve_at


def search(costs: CostModel, clock: Callable[[], float] = time.perf_counter) -> Solution:
    """The best of every order and size of all devices, then of fewer while that is better.

    The bound holds for the candidates that were looked at: all devices, and each set of devices
    that lacks one of a set that had the best plan, or has one more.
    """
    runner = PlanSearch(costs.options, clock)
    searched: list[Candidates] = []
    pending, tried = distinct_sets(fitting_sets(costs)), set[Hashable]()
    while pending:
        for devices in pending:
            tried.add(look_of_set(devices))
            smaller = replace(costs, cluster=replace(costs.cluster, devices=devices))
            try:
                searched.append(Candidates(smaller))
            except DoesNotFitError:
                continue
            runner.run(searched[-1], max(DESCENT_GAP, costs.options.relative_gap))
        pending = _untried(costs, runner, tried)
        if not pending:
            for candidates in searched:
                runner.run(candidates, costs.options.relative_gap)
            pending = _untried(costs, runner, tried)
    if not searched:
        raise misfit(costs)
    return runner.solution(searched)


def _untried(
    costs: CostModel, runner: PlanSearch, tried: set[Hashable]
) -> list[tuple[Device, ...]]:
    """What to try next: the sets one device away from that of the best plan so far."""
    if costs.options.keep_all_devices or runner.is_over:
        return []
    every = costs.cluster.devices
    best = {device.name for device in runner.best_devices or every}
    near = distinct_sets(
        [device for device in every if (device.name in best) != (device is changed)]
        for changed in every
    )
    return [devices for devices in near if devices and look_of_set(devices) not in tried]


def cost_model(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload,
    options: PlanOptions,
    sensitivity: FloatArray,
) -> CostModel:
    """All that a search keeps fixed; `SpecError` for a workload longer than the model's context."""
    check_length(shape, workload)
    if options.profiles is not None:
        cluster = replace(cluster, measured_links=links_beside(options.profiles))
    latency = RememberedLatency(latency_model_of(cluster, shape, options))
    return CostModel(cluster, shape, workload, options, latency, sensitivity)

"""How many requests of a job are in flight at once. More share each pass over the weights, but take
memory from layers' bits, and a job ends with empty slots. From the most that fit, halves are tried,
then ever nearer neighbours of the best, none solved further than it can beat the best.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.optimiser.assignment import stage_times
from planner.optimiser.feasibility import is_feasible
from planner.optimiser.relaxation import lower_bound
from planner.options import AUTO, JOB_GAP
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.scheduling import PREDICTING, TOKEN_POLICIES
from planner.search.candidate_search import LOOKING, CandidateSearch, search, untried_sets
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.fitting import first_sets, fits_somehow, misfit
from planner.search.orders import cost_key
from planner.workload import MAX_REQUESTS, Job, MicroBatches
from quant.common.errors import DoesNotFitError

COARSE, NEAR = 2.0, 1.2
"""Ratios of neighbouring numbers in flight at first, and around a number that is known to be good.
"""

COARSE_GAP, EXPLORING_GAP = 3e-2, 5e-3
"""Relative gaps while only halves have been tried, and while neighbours still may be better."""

SLACK, FINALISTS, RANKING_PASSES = 0.05, 6, 4_000
"""The share by which the objective and the simulation may differ, so that plans within it are
simulated: at most so many, each for so many passes."""

WIDE_SLACK, APART = 0.15, 1.15
"""The share, and the ratio of numbers in flight, where lengths are predicted: then the simulation
differs more from the objective, and most in how many should be in flight. So half of those that are
simulated are the best of numbers that are so far apart."""

FEW_HALVES = 3  # of the number in flight that all devices have, tried with fewer devices

BATCH_SHARES = (0.75, 1.0, 1.25, 1.5, 2.0)
"""Sizes of a micro-batch of both phases that are tried, in even shares of the requests in flight:
more lets more of them in while they are short; fewer make steps shorter, and leave some waiting."""


class PlanSolver(Protocol):
    """Finds the best plan at a theta; `quick`: near plans found before; within `limit_s`, or
    `search_time_limit`.
    """

    def __call__(
        self, theta: float, *, quick: bool = False, limit_s: float | None = None
    ) -> Solution: ...


def plan_solver(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter, known: Iterable[int] = ()
) -> PlanSolver:
    """A solver for a batch, or a job with its best number in flight, searched from `known` ones."""
    if costs.job is not None and costs.options.in_flight == AUTO:
        return JobSearch(costs, costs.job, clock, known).solve

    found: list[Solution] = []

    def solve(theta: float, *, quick: bool = False, limit_s: float | None = None) -> Solution:
        at_theta = _limited(replace(costs, theta=theta), limit_s)
        is_near = quick and bool(found)
        found.append(_near(at_theta, found[-1], clock) if is_near else search(at_theta, clock))
        return found[-1]

    return solve


def _near(costs: CostModel, found: Solution, clock: Callable[[], float]) -> Solution:
    """The best plan of a batch with the order, the sizes and the head of one that was `found`."""
    costs, runner = found.costs(costs), CandidateSearch(costs.options, clock)
    problem = costs.grouped_problem(found.devices, found.sizes)
    same = found.workload, found.devices, found.sizes
    runner.consider(SearchCandidate(*same, problem, 0.0, found.head_on_first), 0.0)
    return runner.solutions([])[0]


def _limited(costs: CostModel, limit_s: float | None) -> CostModel:
    if limit_s is None:
        return costs
    return replace(costs, options=replace(costs.options, search_time_limit=limit_s))


class SearchEffort(NamedTuple):
    """How closely numbers in flight are looked at. `fine`: ratio of neighbours at last (throughput
    grows up to the last that fits). `around`: numbers tried around the best. `turns`: of numbers
    for an order and orders for a number. `exploring`, `proving`: candidates solved at a time, and
    in the end.
    """

    fine: float
    around: int
    turns: int
    exploring: int
    proving: int


_WHOLE, _QUICK = SearchEffort(1.01, 16, 4, 8, 16), SearchEffort(1.05, 0, 1, 4, 0)


class JobSearch:
    """Finds the plans of a job at one theta after another; each begins where others were best."""

    def __init__(
        self, costs: CostModel, job: Job, clock: Callable[[], float], known: Iterable[int] = ()
    ) -> None:
        options = costs.options
        options = replace(options, relative_gap=max(options.relative_gap, JOB_GAP))
        self._costs, self._job, self.clock = replace(costs, options=options), job, clock
        self.least = max(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)
        """The fewest in flight that fill the micro-batches that the user fixed."""
        self._most: dict[Hashable, int] = {}
        self._best = set(known)
        self._sets: list[tuple[Device, ...]] = []
        self._simulated_s: dict[Hashable, float] = {}

    def solve(self, theta: float, *, quick: bool = False, limit_s: float | None = None) -> Solution:
        """The best plan at `theta`, of all devices or fewer; the others as in `PlanSolver`."""
        costs = _limited(replace(self._costs, theta=theta), limit_s)
        one = costs.with_in_flight(self._job, self.least)
        run, seen = _Run(self, costs, _QUICK if quick else _WHOLE), set[Hashable]()
        sets: Iterable[tuple[Device, ...]] = self._sets[-1:] if quick else ()
        sets = sets or chain(first_sets(one), self._other_sets())
        while sets:
            for devices in sets:
                if run.runner.is_over:
                    break
                if cost_key(devices) not in seen:
                    seen.add(cost_key(devices))
                    run.search(devices, sorted(self._best))
            sets = [] if quick else untried_sets(one, run.runner, seen)
            if not sets:
                run.prove(self._costs.options.relative_gap)
                sets = [] if quick else untried_sets(one, run.runner, seen)
        if not run.searched:
            raise misfit(one)
        solutions = run.runner.solutions(run.searched)
        finalists = solutions[:1] if quick else _finalists(costs, solutions)
        found = self._best_simulated(costs, finalists)
        self._best.add(found.workload.global_batch)
        self._sets.append(found.devices)
        return found

    def _best_simulated(self, costs: CostModel, finalists: Sequence[Solution]) -> Solution:
        if len(finalists) == 1:
            return finalists[0]

        def objective_s(solution: Solution) -> float:
            found = solution.assignment
            key = (solution.workload, solution.devices, solution.sizes, solution.head_on_first)
            whole_key = (*key, found.first_layer, found.bitwidth)
            if whole_key not in self._simulated_s:
                simulated = forecast_solution(costs, solution, RANKING_PASSES)
                self._simulated_s[whole_key] = simulated.seconds
            quality_s = costs.theta * solution_quality(costs, solution)
            return self._simulated_s[whole_key] + quality_s

        return min(finalists, key=objective_s)

    def _other_sets(self) -> list[tuple[Device, ...]]:
        """Sets of devices besides all of them: those of earlier plans, or all but one kind and each
        kind alone, as leaving devices out one by one need not lead there.
        """
        options, devices = self._costs.options, self._costs.cluster.devices
        if self._sets or options.keep_all_devices or options.tensor_parallel not in (1, AUTO):
            return self._sets
        names = dict.fromkeys(device.accelerator.name for device in devices)
        parts = (
            tuple(device for device in devices if (device.accelerator.name == name) == alone)
            for name in names
            for alone in (True, False)
        )
        return [part for part in parts if part and len(part) < len(devices)]

    def at(self, costs: CostModel, devices: tuple[Device, ...], number: int) -> CostModel:
        return costs.on(devices).with_in_flight(self._job, number)

    def most(self, devices: tuple[Device, ...]) -> int:
        """The most requests that memory allows on these devices, and the job has; 0 for none."""
        key = cost_key(devices)
        if key not in self._most:
            limit = min(self._job.prompts, MAX_REQUESTS)
            batch = self._costs.options.max_batch_size  # of which each stage has one
            limit = min(limit, batch * len(devices)) if batch else limit
            self._most[key] = _greatest(
                limit, lambda number: fits_somehow(self.at(self._costs, devices, number))
            )
        return self._most[key]


class _Run:
    def __init__(self, job: JobSearch, costs: CostModel, effort: SearchEffort) -> None:
        self._job, self._costs, self._effort = job, costs, effort
        predicting = costs.options.policy in PREDICTING
        slack, kept = (WIDE_SLACK, None) if predicting else (SLACK, FINALISTS)
        self.runner = CandidateSearch(costs.options, job.clock, slack, kept)
        self.searched: list[Candidates] = []
        self._tried: set[tuple[Hashable, int]] = set()

    def search(self, devices: tuple[Device, ...], known: list[int]) -> None:
        """Search the numbers in flight of one set of devices, where it is not clearly behind:
        neighbours of the best with its order, then all orders with the best number, in turns.
        """
        most, best = self._job.most(devices), self.runner.best
        numbers = known or _halves(most)
        if best is not None:
            at = min(best.workload.global_batch, most)
            numbers = [at, *(() if known else _halves(at)[1:FEW_HALVES])]
            if self._costs.job is not None and most == self._costs.job.prompts:
                numbers.append(most)  # the whole job at once, which neighbours may not lead to
        for number in numbers:
            self._try(devices, max(min(number, most), self._job.least))
        gap = EXPLORING_GAP if known else COARSE_GAP
        self.runner.run(self.searched, gap, self._effort.exploring)
        ratio = NEAR if known else COARSE
        for _ in range(self._effort.turns):
            best = self.runner.best
            if best is None or set(best.devices) != set(devices):
                return
            self._try_neighbours(best, most, ratio)
            ratio, found = NEAR, self.runner.best or best
            self._try(devices, found.workload.global_batch)
            self.runner.run(self.searched, EXPLORING_GAP, self._effort.exploring)
            best = self.runner.best
            if best is None or _order_of(found) == _order_of(best):
                return

    def prove(self, gap: float) -> None:
        self.runner.run(self.searched, gap, self._effort.proving)

    def _try(self, devices: tuple[Device, ...], number: int) -> None:
        key, is_late = (cost_key(devices), number), self.runner.share_left < LOOKING
        if number < self._job.least or key in self._tried or self.runner.is_over:
            return
        if is_late and self.searched and self.runner.best is None:
            return  # what was found first is solved first
        self._tried.add(key)
        try:
            self.searched.append(Candidates(self._job.at(self._costs, devices, number)))
        except DoesNotFitError:
            return

    def _try_neighbours(self, best: SearchCandidate, most: int, ratio: float) -> None:
        """Try numbers ever nearer to the best, with its order and prefill sizes near its own; at
        last the most promising around it, since micro-batches that do not divide the slots make
        throughput jagged.
        """
        fine, tried = self._effort.fine, {best.workload.global_batch}
        while not self.runner.is_over:
            ratio = max(fine, ratio**0.5)
            best = self.runner.best or best
            at = best.workload.global_batch
            less, more = min(int(at / ratio), at - 1), max(math.ceil(at * ratio), at + 1)
            new = {number for number in (less, more) if self._job.least <= number <= most} - tried
            tried |= new
            for number in sorted(new):
                for candidate in self._alike(best, number):
                    self.runner.consider(candidate, EXPLORING_GAP)
            if not new and ratio == fine:
                break
        if self.runner.is_over:
            return
        at = (self.runner.best or best).workload.global_batch
        least = max(at / NEAR, min(at, self._job.least))
        around = np.linspace(least, min(most, at * NEAR), self._effort.around).round()
        left = sorted(set(around.astype(int).tolist()) - tried)
        promising = [each for number in left for each in self._alike(best, number)]
        promising.sort(key=lambda each: each.bound)
        for candidate in promising[: self._effort.exploring]:
            self.runner.consider(candidate, EXPLORING_GAP)

    def _alike(self, best: SearchCandidate, number: int) -> Iterator[SearchCandidate]:
        """What fits of so many in flight as `best`, with its prefill size, half and twice that."""
        costs = self._job.at(self._costs, best.devices, number)
        costs = replace(costs, head_on_first=best.head_on_first)
        options, own = costs.options, best.sizes.prefill
        decode = min(number, options.decode_micro_batch or -(-number // len(best.devices)))
        near = {own} if options.prefill_micro_batch else {own // 2, own, 2 * own}
        for prefill in sorted(near & set(range(1, number + 1))):
            sizes = MicroBatches(prefill, decode)
            problem = costs.grouped_problem(best.devices, sizes)
            if is_feasible(problem):
                bound = lower_bound(problem)
                same = best.devices, sizes, problem, bound, best.head_on_first
                yield SearchCandidate(costs.workload, *same)


def _finalists(costs: CostModel, solutions: Sequence[Solution]) -> list[Solution]:
    if costs.options.policy not in PREDICTING:
        return list(solutions[:FINALISTS])
    found = list(solutions[: FINALISTS // 2])
    for each in solutions[len(found) :]:
        number = each.workload.global_batch
        numbers = [other.workload.global_batch for other in found]
        if all(max(number, other) > APART * min(number, other) for other in numbers):
            found.append(each)
    return found[:FINALISTS]


def _order_of(candidate: SearchCandidate) -> Hashable:
    return candidate.devices, candidate.sizes, candidate.head_on_first


def _greatest(limit: int, fits: Callable[[int], bool]) -> int:
    """The greatest number up to `limit` that fits, as all smaller ones do; 0 if none does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    above = range(low + 1, min(high, limit + 1))
    return low + bisect_left(above, True, key=lambda number: not fits(number))


def _halves(most: int) -> list[int]:
    numbers = [most]
    while numbers[-1] > 1:
        numbers.append(int(numbers[-1] / COARSE))
    return numbers


def with_best_batch_size(costs: CostModel, solution: Solution) -> Solution:
    """The solution with the micro-batch of both phases (`orca`, `s3`) that is fastest by
    simulation; unchanged under other policies and a chosen size.
    """
    options = costs.options
    if options.policy not in TOKEN_POLICIES or options.max_batch_size is not None:
        return solution
    return min(
        _fitting_batches(costs, solution),
        key=lambda each: forecast_solution(costs, each, RANKING_PASSES).seconds,
    )


def _fitting_batches(costs: CostModel, solution: Solution) -> Iterator[Solution]:
    share, found = -(-solution.workload.global_batch // len(solution.devices)), solution.assignment
    sizes = {solution.sizes.decode, *(max(1, round(share * each)) for each in BATCH_SHARES)}
    for size in sorted(sizes):
        sized = replace(solution, max_batch_size=size)
        problem = sized.costs(costs).grouped_problem(solution.devices, solution.sizes)
        stages = stage_times(problem, found.first_layer, found.bitwidth)
        if size == solution.sizes.decode or (stages.bytes <= problem.memory_bytes).all():
            yield sized

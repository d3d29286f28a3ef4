"""The price of a make-up: the best plan of a pipeline of it, and the tokens per second of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.fleet.makeups import MakeUp, example_devices
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.search.candidate_search import LEAST_SOLVE_S
from planner.search.job.in_flight import RANKING_PASSES, plan_solver
from planner.search.memory_fit import fits_somehow
from planner.search.tradeoffs.qualities import TIE_BREAK, seconds_per_sensitivity
from planner.workload import Job
from quant.common.errors import InfeasibleError

ONE_S, FEW_DEVICES = 0.6, 6
"""Seconds after which the search for a plan of one make-up takes the best so far, where it has so
few devices; with more of them as many more seconds."""


@dataclass(frozen=True, eq=False)
class Priced:
    """A pipeline of one make-up, on example devices, with its plan and what that gives."""

    make_up: MakeUp
    costs: CostModel
    solution: Solution
    tokens_per_s: float
    sensitivity: float

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / sum(block.size for block in self.make_up)


@dataclass(eq=False)
class Pricing:
    """Prices make-ups of `kinds` of devices for their shares of `job`, until time is up.

    `shares`: by kind, the share of the job that one device is about to do. Time is up `limit_s`
    after `began_s`.
    """

    costs: CostModel
    job: Job
    kinds: tuple[Device, ...]
    shares: tuple[float, ...]
    began_s: float
    limit_s: float
    clock: Callable[[], float] = time.perf_counter
    priced: list[Priced] = field(default_factory=list)
    _tried: set[tuple[MakeUp, float]] = field(default_factory=set)
    _unfit: set[MakeUp] = field(default_factory=set)
    _seconds: dict[MakeUp, float] = field(default_factory=dict)

    def of_bits(self, bits: tuple[int, ...]) -> Pricing:
        """The same for layers that have only these bitwidths, in the time that is left."""
        costs = replace(self.costs, usable_bits=bits)
        return replace(self, costs=costs, priced=[], _tried=set(), _unfit=set())

    @property
    def is_over(self) -> bool:
        """Whether time is up."""
        return self.clock() >= self.began_s + self.limit_s

    @property
    def worst_sensitivity(self) -> float:
        """The summed sensitivity with the fewest bits; 1 where bits cost none."""
        return float(self.costs.sensitivity[:, 0].sum()) or 1.0

    def costs_of(self, make_up: MakeUp) -> CostModel:
        """The costs of a pipeline of this make-up, for its share of the job."""
        devices = example_devices(make_up, self.kinds)
        share = sum(self.shares[block.kind] * block.size for block in make_up)
        job = replace(
            self.job, prompts=max(1, min(self.job.prompts, round(share * self.job.prompts)))
        )
        options = replace(self.costs.options, keep_all_devices=True, tensor_parallel=1)
        cluster = replace(self.costs.cluster, devices=devices)
        return replace(self.costs, cluster=cluster, job=job, options=options)

    def speed(self, make_up: MakeUp) -> float:
        """The most tokens per second of a make-up's blocks, in groups or not; 0 where none fits."""
        alike = [(block.kind, block.size) for block in make_up]
        own = (
            each.tokens_per_s
            for each in self.priced
            if [(block.kind, block.size) for block in each.make_up] == alike
        )
        return max(own, default=0.0)

    def fits(self, make_up: MakeUp) -> bool:
        """Whether memory allows a pipeline of this make-up."""
        return fits_somehow(self.costs_of(make_up))

    def price(self, make_up: MakeUp, worth: float = TIE_BREAK) -> Priced | None:
        """Plan a pipeline: `worth` is the share of its time that the worst sensitivity counts for.

        None where it does not fit, was priced so before, or time is up.
        """
        same = tuple(sorted(make_up, key=repr))
        if self.is_over or (same, worth) in self._tried or same in self._unfit:
            return None
        self._tried.add((same, worth))
        costs = self.costs_of(make_up)
        costs = replace(costs, theta=worth * self._seconds_per_sensitivity(same, costs))
        try:
            solve = plan_solver(costs, self.clock)
            solution = solve(costs.theta, quick=True, limit_s=self._limit_s(make_up))
        except InfeasibleError:
            self._unfit.add(same)
            return None
        forecast = forecast_solution(costs, solution, RANKING_PASSES)
        self._seconds.setdefault(same, forecast.seconds)
        quality = solution_quality(costs, solution)
        self.priced.append(Priced(make_up, costs, solution, forecast.tokens_per_s, quality))
        return self.priced[-1]

    def _limit_s(self, make_up: MakeUp) -> float:
        """Seconds for the search for one plan: as its devices need them, of those that are left."""
        devices = sum(block.size // block.degree for block in make_up)
        left_s = self.began_s + self.limit_s - self.clock()
        return max(LEAST_SOLVE_S, min(ONE_S * max(1.0, devices / FEW_DEVICES), left_s))

    def _seconds_per_sensitivity(self, make_up: MakeUp, costs: CostModel) -> float:
        """About the seconds of a pipeline's share of the job, over the worst sensitivity."""
        worst = float(costs.sensitivity[:, 0].sum())
        if make_up in self._seconds and worst:
            return self._seconds[make_up] / worst
        return seconds_per_sensitivity(costs)

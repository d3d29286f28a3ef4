"""The plans that `job_plan` compares, by the planner's predictions for the same job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.planning.job_cases import RowLengths, Setting, best_number, sweep_numbers
from planner.costs.model import CostModel
from planner.explanation.planned_assignment import PlannedAssignment, planned_assignment
from planner.optimiser.assignment import stage_times
from planner.options import PlanOptions, Quality
from planner.plan.builder import forecast_solution, solution_quality
from planner.plan.spec import PlanSpec
from planner.schedule.static import JobRows
from planner.search.baselines.comparison import baseline
from planner.search.candidate_search import search
from planner.search.costs import planning_costs
from planner.search.memory_fit import fits_somehow
from planner.search.search import PricedPlan, find_plan, find_priced_plan
from planner.simulation.job_simulation import simulate_job, simulate_job_assignment
from planner.simulation.simulation import assignment_timing, occupied_stages
from planner.workload import Job
from quant.common.errors import InfeasibleError

BEFORE_IN_FLIGHT = 32
FLEXGEN = ("flexgen", "flexgen-int8")
BASELINES: dict[str, tuple[str, ...]] = {
    "Uniform": ("uniform",),
    "PipeEdge": ("pipeedge",),
    "FlexGen-like": FLEXGEN,
}
"""The planner's names of each; the best of several counts."""
COARSE, FINE = 1.3, 1.02
FILLS = 20
"""How often the slots are filled by the jobs that predictions are held against."""
CHECK_SEED = 1


@dataclass(frozen=True)
class Figures:
    """A contestant: prompts in flight, bits, tokens per second of the whole job."""

    in_flight: int
    bits: str
    tokens_per_s: float


@dataclass(frozen=True)
class Swept:
    """The default at one quality against the best fixed number in flight at the same objective.

    `score` and `best_score` are predicted seconds and theta times the sensitivity (simulated), the
    `closed` ones the same by the form that was minimised. `fast`: theta counts for nearly nothing.
    """

    quality: Quality
    in_flight: int
    best_in_flight: int
    score: float
    best_score: float
    closed: float
    best_closed: float
    tried: int

    @property
    def behind(self) -> float:
        """By which share the best of the sweep is better than the default, simulated."""
        return 1 - self.best_score / self.score

    @property
    def closed_behind(self) -> float:
        """The same by the closed form."""
        return 1 - self.best_closed / self.closed


@dataclass(frozen=True)
class Checked:
    """Predicted tokens per second of a job of `FILLS` times the slots, over the simulated ones of
    other rows of the same kind, less one: of the closed form, and of the plan's forecast.
    """

    closed_error: float
    forecast_error: float


@dataclass(frozen=True, eq=False)
class Contest:
    """One job on one cluster."""

    setting: Setting
    lengths: RowLengths
    prompts: int

    @cached_property
    def job(self) -> Job:
        """The job that is planned."""
        return self.lengths.job(self.prompts)

    @cached_property
    def _timed(self) -> tuple[PricedPlan, float]:
        began = time.process_time()
        setting = self.setting
        found = find_priced_plan(
            setting.cluster, setting.shape, setting.model, self.job, PlanOptions()
        )
        return found, time.process_time() - began

    @property
    def plan(self) -> PlanSpec:
        """The default plan."""
        return self._timed[0].plan

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the default plan took, with all that stands beside it."""
        return self._timed[1]

    @property
    def default(self) -> Figures:
        """The default plan's figures."""
        return figures(self.plan)

    @cached_property
    def before_plan(self) -> PlanSpec | None:
        """The plan for a batch of 32 of the longest rows; None where it does not fit."""
        setting, batch = self.setting, self.job.in_flight(BEFORE_IN_FLIGHT)
        options = PlanOptions(theta=setting.theta)
        try:
            return find_plan(setting.cluster, setting.shape, setting.model, batch, options)
        except InfeasibleError:
            return None

    def before(self) -> Figures | None:
        """The figures of that plan when the job is run with it, its slots refilled."""
        plan, setting = self.before_plan, self.setting
        if plan is None:
            return None
        options = PlanOptions(theta=setting.theta)
        costs, _ = planning_costs(setting.cluster, setting.shape, plan.workload, options)
        placed = _with_job(planned_assignment(plan, costs), self.job)
        run = simulate_job_assignment(
            placed.costs, placed.devices, placed.sizes, placed.first_layer, placed.bitwidth
        )
        return Figures(plan.workload.global_batch, bits_of(plan), run.tokens_per_s)

    def baselines(self) -> Mapping[str, Figures | None]:
        """Each baseline at its own best number in flight; None where it never fits."""
        return {name: self._baseline(kinds) for name, kinds in BASELINES.items()}

    def _baseline(self, kinds: tuple[str, ...]) -> Figures | None:
        costs, found = self._costs(PlanOptions(), 1), []
        for kind in kinds:

            def rate(number: int, kind: str = kind) -> float | None:
                return baseline(_in_flight(costs, number), kind).tokens_per_s

            best = best_number(rate, self.prompts, COARSE, FINE)
            if best is not None:
                chosen = baseline(_in_flight(costs, best[0]), kind)
                bits = str(chosen.bitwidth or "mixed")
                found.append(Figures(best[0], bits, best[1]))
        return max(found, key=lambda each: each.tokens_per_s, default=None)

    def swept(self, quality: Quality, step: float) -> Swept:
        """The plans of every number in flight of a sweep, at the theta of the default plan of this
        quality, beside that plan.
        """
        mine = next(each for each in self.plan.beside.qualities if each.quality == quality)
        priced = find_priced_plan(
            self.setting.cluster,
            self.setting.shape,
            self.setting.model,
            self.job,
            PlanOptions(quality=quality),
        ).plan
        theta = mine.theta
        quality_s = theta * priced.solver.sensitivity
        scores: dict[int, float] = {}
        closed: dict[int, float] = {}
        for number in sweep_numbers(self._most(), step):
            costs = self._costs(PlanOptions(theta=theta, in_flight=number), number)
            found = search(costs)
            simulated_s = forecast_solution(costs, found).seconds
            scores[number] = simulated_s + theta * solution_quality(costs, found)
            closed[number] = found.assignment.objective
        best = min(scores, key=lambda number: scores[number])
        return Swept(
            quality=quality,
            in_flight=priced.workload.global_batch,
            best_in_flight=best,
            score=priced.predicted.latency_s + quality_s,
            best_score=scores[best],
            closed=priced.predicted.objective_latency_s + quality_s,
            best_closed=min(closed.values()),
            tried=len(scores),
        )

    def checked(self) -> Checked:
        """The predictions for a job of `FILLS` times the slots against one of other rows."""
        found, plan = self._timed[0], self.plan
        slots = plan.workload.global_batch
        job = self.lengths.job(FILLS * slots)
        placed = _with_job(planned_assignment(plan, found.costs), job)
        layers = placed.first_layer, placed.bitwidth
        problem = placed.costs.problem(placed.devices, placed.sizes)
        closed_s = stage_times(problem, *layers).latency_s
        planned = simulate_job_assignment(placed.costs, placed.devices, placed.sizes, *layers)
        pairs = self.lengths.draw(FILLS * slots, CHECK_SEED)
        prompts, outputs = zip(*pairs, strict=True)
        stages = occupied_stages(placed.devices, placed.first_layer)
        timing = assignment_timing(placed.costs, stages, placed.bitwidth)
        rows, count = JobRows(prompts, outputs), len(stages.devices)
        run = simulate_job(rows, slots, placed.sizes, count, timing.seconds)
        return Checked(
            job.output_tokens / closed_s / run.tokens_per_s - 1,
            planned.tokens_per_s / run.tokens_per_s - 1,
        )

    def _most(self) -> int:
        """The most prompts in flight that memory allows."""
        costs = self._costs(PlanOptions(), 1)
        low, high = 1, self.prompts + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = fits_somehow(_in_flight(costs, middle))
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _costs(self, options: PlanOptions, number: int) -> CostModel:
        setting, workload = self.setting, self.job.in_flight(number)
        return planning_costs(setting.cluster, setting.shape, workload, options, self.job)[0]


def _in_flight(costs: CostModel, number: int) -> CostModel:
    assert costs.job is not None, "costs of a job"
    return replace(costs, workload=costs.in_flight(costs.job, number))


def _with_job(placed: PlannedAssignment, job: Job) -> PlannedAssignment:
    """The same assignment for another job."""
    return replace(placed, costs=replace(placed.costs, job=job))


def figures(plan: PlanSpec) -> Figures:
    """The figures of a job's plan."""
    assert plan.job is not None, "a plan of a job"
    return Figures(plan.workload.global_batch, bits_of(plan), plan.job.tokens_per_s)


def bits_of(plan: PlanSpec) -> str:
    """The one bitwidth of all layers, or their mean to a tenth."""
    counts = Counter(bits for stage in plan.stages for bits in stage.bitwidths)
    mean = sum(bits * count for bits, count in counts.items()) / counts.total()
    return str(next(iter(counts))) if len(counts) == 1 else f"{mean:.1f}"

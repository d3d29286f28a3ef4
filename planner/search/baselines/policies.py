"""How each baseline of LLM-PQ decides: one entry in `POLICIES`.

The LM head is on the last stage and layers are decided one by one, as the systems were published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.micro_batches import MicroBatches
from planner.optimiser.assignment import Assignment, StageTimes, stage_times
from planner.optimiser.bit_assignment import Candidate
from planner.optimiser.capacity import is_feasible
from planner.optimiser.heuristics.adabits import solve_adabits
from planner.optimiser.heuristics.pipeedge import pipeedge_candidate
from planner.optimiser.heuristics.uniform import uniform_candidate
from planner.optimiser.objectives import latency_form
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.sensitivity_tables import SensitivityTables
from planner.optimiser.solve_options import SolveOptions
from planner.search.candidates import Candidates
from planner.search.memory_fit import (
    Fits,
    SizedProblem,
    end_choices,
    equal_problems,
    fitting_problems,
    problems_near_share,
    smaller_equal_problems,
)
from quant.common.errors import DoesNotFitError, InfeasibleError

ADABITS = SolveOptions(time_limit_s=10.0)


@dataclass(frozen=True, eq=False)
class BaselineChoice:
    """A baseline's assignment for one device order and pair of sizes, and the costs it used."""

    costs: CostModel
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    assignment: Candidate | Assignment

    @property
    def times(self) -> StageTimes:
        return stage_times(self.problem, self.assignment.first_layer, self.assignment.bitwidth)

    @property
    def latency_s(self) -> float:
        """Latency by the objective, without quality."""
        return self.times.latency_s

    @property
    def slowest_prefill_s(self) -> float:
        """Seconds of the prefill's slowest stage or transfer."""
        return float(max(self.times.prefill_s.max(), latency_form(self.problem).prefill_floor_s))

    @property
    def sensitivity(self) -> float:
        """Sensitivity summed over layers."""
        return self.times.quality


Sized = Callable[[CostModel, Sequence[Sequence[Device]], Fits], Iterable[SizedProblem]]
"""The problems that a baseline looks at: orders with sizes of micro-batches that fit."""


@dataclass(frozen=True)
class Policy:
    """The decisions of a baseline: the sizes it tries, its partition, what it looks for.

    Of the orders of `baseline_orders` and all sizes it takes the least by the first of `least`, of
    equal ones the least by the next. With `one_bitwidth` that is the highest at which anything
    fits. The second of `sized` counts where nothing fits by the first, at any bitwidth.
    """

    sized: tuple[Sized, ...]
    fits: Fits
    solve: Callable[[AssignmentProblem, SensitivityTables], Candidate | Assignment]
    least: tuple[Callable[[BaselineChoice], float], ...]
    one_bitwidth: bool = True

    def allowed(self, costs: CostModel) -> Iterator[CostModel]:
        """Yield the costs of its plans; with one bitwidth the costs of each, highest first."""
        if not self.one_bitwidth:
            yield costs
            return
        for bits in reversed(costs.options.bits):
            yield with_one_bitwidth(costs, bits)


def choose(
    costs: CostModel, name: str, orders: Sequence[tuple[Device, ...]] | None = None
) -> BaselineChoice:
    """The baseline's choice; DoesNotFitError where nothing fits. `orders` are those of
    `baseline_orders` where they are known.
    """
    policy = POLICIES[name]
    orders = orders or baseline_orders(costs)
    for sized in policy.sized:
        for each in policy.allowed(costs):
            found = list(_solved(each, policy, sized(each, orders, policy.fits)))
            if found:
                return _least(found, policy.least)
    raise DoesNotFitError(
        f"{name} has no plan: no one bitwidth of {list(costs.options.bits)} fits in any order of "
        "the devices, at any micro-batch sizes allowed"
    )


def as_published(costs: CostModel) -> CostModel:
    """The costs with the LM head on the last stage, and layers decided one by one."""
    return replace(costs, head_on_first=False, options=replace(costs.options, group=1))


def with_one_bitwidth(costs: CostModel, bits: int) -> CostModel:
    """The costs where no other bitwidth is used, and no memory is kept for others' kernels."""
    choice = costs.options.bits.index(bits)
    options = replace(costs.options, bits=(bits,))
    return replace(costs, options=options, sensitivity=costs.sensitivity[:, [choice]])


def baseline_orders(costs: CostModel) -> list[tuple[Device, ...]]:
    """The device orders that a baseline tries: one for each pair of kinds at the ends, on which
    memory depends, and the most promising one by the bounds of the search. The stages between the
    ends change little: layers cost the same there wherever a device stands.
    """
    together = replace(costs, options=replace(costs.options, all_orders=False))
    orders = list(end_choices(together))
    with suppress(DoesNotFitError):
        orders.append(Candidates(together).pop().devices)
    return list(dict.fromkeys(orders))


def _solved(
    costs: CostModel, policy: Policy, problems: Iterable[SizedProblem]
) -> Iterator[BaselineChoice]:
    """Yield the policy's assignment for every order and pair of sizes in which it has one."""
    tables = SensitivityTables(costs.sensitivity)
    for each in problems:
        found = policy.solve(each.problem, tables)
        yield BaselineChoice(costs, each.devices, each.sizes, each.problem, found)


def _least(
    found: list[BaselineChoice], figures: Sequence[Callable[[BaselineChoice], float]]
) -> BaselineChoice:
    """The least by the first figure; by the next among those within the solver's gap of it."""
    *first, last = figures
    for figure in first:
        limit = min(map(figure, found)) * (1 + ADABITS.relative_gap)
        found = [each for each in found if figure(each) <= limit]
    return min(found, key=last)


def _near_share(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> Iterator[SizedProblem]:
    """Yield every order with every pair of sizes near the batch over the stages that fits."""
    for devices in orders:
        yield from problems_near_share(costs, devices, fits)


def _all_sizes(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> Iterator[SizedProblem]:
    """Yield the same, with smaller sizes for orders in which none of these fits."""
    for devices in orders:
        yield from fitting_problems(costs, devices, fits)


def _fits_evenly(problem: AssignmentProblem) -> bool:
    """Whether some bitwidth fits where layers are spread evenly."""
    try:
        uniform_candidate(problem)
    except InfeasibleError:
        return False
    return True


POLICIES = {
    "uniform": Policy(
        (_near_share, _all_sizes),
        _fits_evenly,
        lambda problem, _: uniform_candidate(problem),
        (lambda found: found.latency_s,),
    ),
    "pipeedge": Policy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        lambda problem, _: pipeedge_candidate(problem),
        (lambda found: found.slowest_prefill_s,),
    ),
    "adabits": Policy(
        (equal_problems, smaller_equal_problems),
        is_feasible,
        lambda problem, tables: solve_adabits(problem, ADABITS, tables),
        (lambda found: found.sensitivity, lambda found: found.latency_s),
        one_bitwidth=False,
    ),
}
"""Section 6.1, adabits section 6.9; Uniform spreads layers evenly, PipeEdge by prefill alone."""

"""Three plans side by side, `fast`, `balanced` and `high`, by rules that mean the same everywhere.

- `fast` has the most tokens per second (all sensitivity together counts for less than a thousandth
  of the time).
- `balanced` and `high` are near 16 bit: no layer has fewer than `NEAR_FULL_BITS`. Only where memory
  has no room for that have they fewer, at first 4 to 6, and none has 3 where all have room for 4.
- `balanced` takes the time of the fastest plan as one, and its sensitivity as a tenth, and has the
  least sum of both: it is one percent slower wherever that removes a tenth of that sensitivity.
- `high` has the least sensitivity of those at most a tenth slower than the fastest of such bits.

No rule knows seconds or the scale of an omega file. The sum being least, no plan of such bits has
both more tokens per second and less sensitivity than `balanced`, which is at most as much slower as
`high` and at least as good as `fast`. Beside the plan that is chosen stands what people ask of it:
other numbers in flight, other qualities, another GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.cluster.device import Device
from planner.cluster.spec import grown, kinds_of_devices
from planner.costs.model import CostModel
from planner.optimiser.assignment import SolveOptions
from planner.optimiser.boxes.few_bitwidths import LAST_SEARCHED
from planner.optimiser.names import BASELINE_METHODS
from planner.optimiser.problem import typical_objective_s
from planner.optimiser.solve import solve_by
from planner.options import AUTO, PLAN_TIME, PlanOptions, Quality
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.plan.parts import MoreDevices, PlanChoice, PlansBeside, Prediction, QualityChoice
from planner.search.candidate_search import SearchTime, search
from planner.search.fitting import groupings, searched_sizes
from planner.search.in_flight import COARSE_GAP, RANKING_PASSES, plan_solver
from planner.search.pareto import PlanT, PointSolver, ThetaPoint, theta_solver
from planner.workload import Job, MicroBatches
from quant.common.errors import InfeasibleError
from quant.scheme import NEAR_FULL_BITS

SLOWER = 0.1
"""Share of the most tokens per second that `high` gives up at most, and share of the fastest
plan's time that `balanced` takes its sensitivity for."""

LEAST_BITS = (NEAR_FULL_BITS, 4, 3)
"""No step ends at 5 or 6: with one prompt in flight that still fits, nearly all speed would be
given up for what 4 bit beside them loses more."""

TIE_BREAK = 3e-4  # share of the time that the worst sensitivity counts for in `fast`
TYPICAL_IN_FLIGHT = 64  # at which a job's time is guessed, to within a small factor
MOST_STEPS, STEP = 4, 4.0
"""Thetas that are tried for `high`: each this many times the one before, then between the two that
enclose the limit."""

Qualities = Mapping[Quality, ThetaPoint[Solution]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan that is taken, with the costs at its theta; `finest`: the fastest with the most bits
    only (None: does not fit).
    """

    costs: CostModel
    solution: Solution
    quality: Quality | None = None
    qualities: Qualities = field(default_factory=dict)
    finest: ThetaPoint[Solution] | None = None


def chosen_by_quality(costs: CostModel, quality: Quality, clock: Callable[[], float]) -> Chosen:
    """The plan of a quality, beside those of the others; InfeasibleError where none fits."""
    search_time = SearchTime(PLAN_TIME * costs.options.search_time_limit, clock)
    theta = TIE_BREAK * seconds_per_sensitivity(costs)
    solve = theta_solver(costs, clock, _good_numbers(costs, theta, clock, search_time), search_time)
    fast = solve(theta)
    good = (fast.plan.workload.global_batch,)

    def solver_of(usable: CostModel, known: tuple[int, ...]) -> PointSolver:
        same = usable.bits == costs.bits
        return solve if same else theta_solver(usable, clock, known, search_time)

    finest = _finest(costs, solver_of(replace(costs, usable_bits=(max(costs.bits),)), good), fast)
    for bits in bits_by_quality(costs.bits):
        usable, is_usable = replace(costs, usable_bits=bits), has_only(bits, costs, fast.plan)
        known = [point for point in (fast if is_usable else None, finest) if point is not None]
        looks = 1 if is_usable or costs.job is None else 2
        solve_usable = solver_of(usable, good if is_usable else ())
        try:
            found = _by_quality(solve_usable, looks, fast, known, finest, search_time)
        except InfeasibleError:
            continue
        point, of_point = found[quality], costs if quality == "fast" else usable
        return Chosen(replace(of_point, theta=point.theta), point.plan, quality, found, finest)
    raise AssertionError("the fastest plan has bits of the last ones")


def _good_numbers(
    costs: CostModel, theta: float, clock: Callable[[], float], search_time: SearchTime
) -> tuple[int, ...]:
    """A number in flight of a job that is good without 5 and 6 bit, whose searches prove more: with
    both the best numbers are hard to tell apart.
    """
    few = tuple(bits for bits in costs.bits if bits in LAST_SEARCHED)
    if costs.job is None or costs.options.in_flight != AUTO or few in ((), costs.bits):
        return ()
    rough = replace(costs.options, keep_all_devices=True, relative_gap=COARSE_GAP)
    usable = replace(costs, usable_bits=few, options=rough)
    solve = theta_solver(usable, clock, search_time=search_time)
    try:
        return (solve(theta, quick=True).plan.workload.global_batch,)
    except InfeasibleError:
        return ()


def bits_by_quality(bits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the bits of `balanced` and `high`: those near 16, then fewer too, step by step."""
    steps = (tuple(each for each in bits if each >= least) for least in LEAST_BITS)
    yield from filter(None, dict.fromkeys(steps))


def has_only(bits: tuple[int, ...], costs: CostModel, solution: Solution) -> bool:
    usable, placing = replace(costs, usable_bits=bits), costs.placing
    return all(
        usable.is_usable(costs.shape.layer(layer), placing.bits[choice])
        for unit, choice in enumerate(solution.assignment.bitwidth)
        for layer in placing.units.layers(unit)
    )


def _finest(
    costs: CostModel, solve: PointSolver, fast: ThetaPoint[Solution]
) -> ThetaPoint[Solution] | None:
    """The fastest plan with the most bits, with a theta at which none is better, if any fits."""
    try:
        found = solve(0.0, quick=True)
    except InfeasibleError:
        return None
    omega = costs.placing.sensitivity
    losses = omega - omega[:, [-1]]
    slower_s = max(0.0, found.predicted_s - fast.predicted_s)
    least = float(losses[losses > 0].min(initial=math.inf))
    return replace(found, theta=max(fast.theta, slower_s / least))


def _by_quality(
    solve: PointSolver,
    looks: int,
    fast: ThetaPoint[Solution],
    known: Sequence[ThetaPoint[Solution]],
    finest: ThetaPoint[Solution] | None,
    search_time: SearchTime,
) -> Qualities:
    """The plans of the qualities, of those `known` where time is up; a job whose bits were unknown
    needs so many `looks`.
    """
    if not fast.omega:
        return best_by_rules(fast, [fast])
    found = list(known)
    for _ in range(looks):
        if not found or not search_time.is_over:
            found.append(solve(theta_of_tenth(fast)))
    balanced, limit_s = found[-1], slowest_high_s(found)
    if balanced.omega and (finest is None or finest.predicted_s > limit_s):
        steps = towards_high(solve, balanced, limit_s)
        while not search_time.is_over and (step := next(steps, None)) is not None:
            found.append(step)
    return best_by_rules(fast, found)


def theta_of_tenth(point: ThetaPoint[PlanT]) -> float:
    """The theta at which all the sensitivity of a plan counts as a tenth of its time."""
    return SLOWER * point.predicted_s / point.omega


def slowest_high_s(found: Sequence[ThetaPoint[PlanT]]) -> float:
    """Seconds that the plan of quality `high` takes at most, by those of its bits."""
    return min(point.predicted_s for point in found) / (1 - SLOWER)


def best_by_rules(
    fast: ThetaPoint[PlanT], found: Sequence[ThetaPoint[PlanT]]
) -> Mapping[Quality, ThetaPoint[PlanT]]:
    """Best by each rule; by the prediction a search's best may be beaten by what another found."""
    fast = min((fast, *found), key=lambda point: (point.predicted_s, point.omega))
    limit_s = slowest_high_s(found)

    def loss(point: ThetaPoint[PlanT]) -> float:
        sensitivity = point.omega / fast.omega if fast.omega > 0 else 0.0
        return point.predicted_s / fast.predicted_s + SLOWER * sensitivity

    return {
        "high": min(
            (point for point in found if point.predicted_s <= limit_s),
            key=lambda point: (point.omega, point.predicted_s),
        ),
        "balanced": min(found, key=loss),
        "fast": fast,
    }


def towards_high(
    solve: Callable[..., ThetaPoint[PlanT]], balanced: ThetaPoint[PlanT], limit_s: float
) -> Iterator[ThetaPoint[PlanT]]:
    """Yield plans of ever less sensitivity than `balanced` has, about as slow as the limit."""
    low, high = max(balanced.theta, theta_of_tenth(balanced) / STEP), math.inf
    for _ in range(MOST_STEPS):
        theta = low * STEP if math.isinf(high) else math.sqrt(low * high)
        found = solve(theta, quick=True)
        yield found
        if found.predicted_s > limit_s:
            high = theta
        else:
            low = theta


def seconds_per_sensitivity(costs: CostModel) -> float:
    """About the seconds of a plan for a unit of the worst sensitivity; 0 where bits cost none."""
    worst = float(costs.sensitivity.max(axis=1).sum())
    if not worst:
        return 0.0
    if costs.job is not None:
        number = min(costs.job.prompts, TYPICAL_IN_FLIGHT)
        costs = costs.with_in_flight(costs.job, number)
    devices = costs.cluster.devices
    sizes = searched_sizes(costs, len(devices))[-1]
    return typical_objective_s(replace(costs, theta=0.0).problem(devices, sizes)) / worst


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
    about = _Plan(costs, chosen.solution, predicted.latency_s, time_left, clock)
    beside = PlansBeside(
        quality=chosen.quality,
        qualities=tuple(
            QualityChoice(name, point.theta, choice(costs, point.plan, point.predicted_s))
            for name, point in chosen.qualities.items()
        ),
        full_precision=choice(costs, finest.plan, finest.predicted_s) if finest else None,
        grouped=_in_groups(about),
    )
    if costs.job is None:
        return replace(beside, beaten_by=_beaten_by(about))
    if chosen.quality is None:
        return beside
    more = tuple(_more_devices(about))
    return replace(beside, curve=tuple(_curve(about, costs.job)), more_devices=more)


def choice(costs: CostModel, solution: Solution, seconds: float) -> PlanChoice:
    return PlanChoice(
        in_flight=solution.workload.global_batch,
        tokens_per_s=solution.costs(costs).generated_tokens / seconds,
        sensitivity=solution_quality(costs, solution),
        mean_bits=costs.placing.mean_bits(solution.assignment),
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """The plan that is asked about: costs at its theta, predicted seconds, time for answers."""

    costs: CostModel
    solution: Solution
    predicted_s: float
    time_left: SearchTime
    clock: Callable[[], float]

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
    """The best plans for other numbers in flight that fit, on the plan's devices in order."""
    own = plan.solution.workload.global_batch
    steps = range(-CURVE_REACH, CURVE_REACH + 1)
    numbers = {min(job.prompts, round(own * CURVE_STEP**step)) for step in steps} - {own, 0}
    for number in sorted(numbers):
        if plan.time_left.is_over:
            return
        found = _at_number(plan, job, number)
        if found is not None:
            yield plan.choice(found)


def _at_number(plan: _Plan, job: Job, number: int) -> Solution | None:
    solution = plan.solution
    costs = solution.costs(plan.costs).with_in_flight(job, number)
    decode = -(-number // len(solution.devices))
    sizes = MicroBatches(min(solution.sizes.prefill, decode), decode)
    problem = costs.grouped_problem(solution.devices, sizes)
    try:
        limit_s = min(CURVE_SOLVE_S, plan.time_left.next_s())
        limits = SolveOptions(time_limit_s=limit_s, relative_gap=ANSWER_GAP, clock=plan.clock)
        found = solve_by("auto", problem, limits)
    except InfeasibleError:
        return None
    return replace(solution, workload=costs.workload, sizes=sizes, assignment=found)


def _more_devices(plan: _Plan) -> Iterator[MoreDevices]:
    """Yield what one more of each kind of device brings; nothing where a plan is better without."""
    used, number = len(plan.solution.devices), plan.solution.workload.global_batch
    most = number if plan.costs.job is None else plan.costs.job.prompts
    known = {number, min(most, round(number * (used + 1) / used))}
    for kind in kinds_of_devices(plan.costs.cluster)[:MOST_KINDS]:
        if plan.time_left.is_over:
            return
        found = _with_one_more(plan, kind, known)
        own = choice(plan.costs, plan.solution, plan.predicted_s)
        # A slow device more can cost more than it brings, and then is left out.
        best = min(own, found, key=plan.cost_s)
        yield MoreDevices(kind.accelerator.name, kind.node, 1, best)


def _with_one_more(plan: _Plan, kind: Device, known: set[int]) -> PlanChoice:
    options = replace(plan.answer_options(), keep_all_devices=True, tensor_parallel=1)
    cluster = grown(plan.costs.cluster, kind, 1)
    devices = (*plan.solution.devices, cluster.devices[-1])
    cluster = replace(cluster, devices=devices)
    costs = replace(plan.costs, cluster=cluster, options=options)
    found = plan_solver(costs, plan.clock, known)(costs.theta, quick=True)
    return choice(costs, found, forecast_solution(costs, found, RANKING_PASSES).seconds)


def _in_groups(plan: _Plan) -> PlanChoice | None:
    """A plan with groups of devices that is better by more than the gap, where none were tried."""
    costs, options = plan.costs, replace(plan.answer_options(), tensor_parallel=AUTO)
    costs = replace(costs, options=options)
    is_asked = plan.costs.options.tensor_parallel == 1 and options.method not in BASELINE_METHODS
    if not is_asked or plan.time_left.is_over or len(groupings(costs)) == 1:
        return None
    solve = plan_solver(costs, plan.clock, {plan.solution.workload.global_batch})
    try:
        found = solve(costs.theta, quick=True)
    except InfeasibleError:
        return None
    own = choice(plan.costs, plan.solution, plan.predicted_s)
    other = choice(costs, found, forecast_solution(costs, found, RANKING_PASSES).seconds)
    return other if plan.cost_s(other) < (1 - ANSWER_GAP) * plan.cost_s(own) else None


def _beaten_by(plan: _Plan) -> PlanChoice | None:
    costs, batch = plan.costs, plan.costs.workload.global_batch
    own = choice(costs, plan.solution, plan.predicted_s)
    options = costs.options
    fixed = options.prefill_micro_batch or options.decode_micro_batch
    if own.sensitivity <= 0 or fixed or options.method in BASELINE_METHODS:
        return None
    for share in SMALLER_BATCHES:
        number = round(share * batch)
        if number < 1 or plan.time_left.is_over:
            return None
        fewer = replace(
            costs,
            workload=replace(costs.workload, global_batch=number),
            theta=costs.theta * number / batch,
            options=plan.answer_options(),
        )
        found = search(fewer, plan.clock)
        other = choice(fewer, found, forecast_solution(fewer, found).seconds)
        if other.beats(own):
            return other
    return None

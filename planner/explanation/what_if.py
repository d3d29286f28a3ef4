"""Plans under changed conditions, on the same devices in order: more memory, faster links, other
theta.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.explanation.planned_assignment import PlannedAssignment
from planner.optimiser.assignment import SolveOptions, evaluate
from planner.optimiser.relaxation import lower_bound
from planner.optimiser.solve import solve_by
from planner.search.fitting import SizedProblem, fitting_sizes
from planner.workload import MicroBatches
from quant.common.errors import InfeasibleError
from quant.common.units import GIB

# The default method is exact on the paper's clusters in well under a second a problem.
METHOD = "auto"
SHORTEST_SOLVE_S = 0.1
OTHER_THETA_S = 1.0  # LLM-PQ's usual theta, where the plan has none

Kind = Literal["same", "memory", "links", "theta"]


@dataclass(frozen=True)
class WhatIfOptions:
    """`extra_bytes` more on each stage, links `link_factor` times as fast, theta times each factor
    (for theta 0: `OTHER_THETA_S`). `budget_s` wall seconds for all, `solve_s` for one problem.
    """

    extra_bytes: int = GIB
    link_factor: float = 2.0
    theta_factors: tuple[float, ...] = (2.0, 0.5, 0.0, 0.1, 10.0, 100.0, 1000.0)
    budget_s: float = 60.0
    solve_s: float = 10.0
    clock: Callable[[], float] = field(default=time.perf_counter, compare=False)


@dataclass(frozen=True)
class Question:
    kind: Kind
    amount: float
    stage: int | None = None


@dataclass(frozen=True)
class WhatIfAnswer:
    """The best plan found under a change, against the present plan without it. Latency and
    sensitivity are the objective's, `predicted_s` simulated; quality is in seconds at the new
    `theta`. `proven`: solved to the gap.
    """

    question: Question
    theta: float
    sizes: MicroBatches
    latency_s: float
    predicted_s: float
    sensitivity: float
    latency_change_s: float
    quality_change_s: float
    layers_with_other_bits: int
    layers_moved: int
    proven: bool
    layers_with_experts_elsewhere: int = 0

    @property
    def objective_change_s(self) -> float:
        return self.latency_change_s + self.quality_change_s


@dataclass(frozen=True)
class Answers:
    given: tuple[WhatIfAnswer, ...]
    left_out: tuple[Question, ...]

    def of(self, *kinds: Kind) -> tuple[WhatIfAnswer, ...]:
        return tuple(answer for answer in self.given if answer.question.kind in kinds)


def ask(planned: PlannedAssignment, options: WhatIfOptions) -> Answers:
    deadline = options.clock() + options.budget_s
    answers, left_out = [], []
    for question in _questions(planned, options):
        if options.clock() >= deadline:
            left_out.append(question)
        else:
            answers.append(_answer(planned, question, options, deadline))
    return Answers(tuple(answers), tuple(left_out))


def _questions(planned: PlannedAssignment, options: WhatIfOptions) -> Iterator[Question]:
    """Yield all questions; the default method first, theta only where quality can vary."""
    if planned.costs.options.method != METHOD:
        yield Question("same", 1.0)
    for stage in range(planned.problem.stages):
        yield Question("memory", float(options.extra_bytes), stage)
    if planned.problem.stages > 1:
        yield Question("links", options.link_factor)
    present = planned.costs.theta
    for factor in options.theta_factors if planned.problem.sensitivity.any() else ():
        theta = factor * (present or OTHER_THETA_S)
        if theta != present:
            yield Question("theta", theta)


def _answer(
    planned: PlannedAssignment, question: Question, options: WhatIfOptions, deadline: float
) -> WhatIfAnswer:
    costs, devices = _changed(planned, question)
    problem = costs.grouped_problem(devices, planned.sizes)
    present = replace(planned, costs=costs, devices=devices, problem=problem)
    found, proven = _search(present, options, deadline)
    before, after = present.times, found.times
    units = range(len(found.bitwidth))
    now, then = ([each.chosen(own) for own in each.bitwidth] for each in (found, planned))
    return WhatIfAnswer(
        question=question,
        theta=costs.theta,
        sizes=found.sizes,
        latency_s=after.latency_s,
        predicted_s=found.forecast().seconds,
        sensitivity=after.quality,
        latency_change_s=after.latency_s - planned.times.latency_s,
        quality_change_s=problem.theta * (after.quality - before.quality),
        layers_with_other_bits=planned.layers_of(
            unit for unit in units if now[unit].bits != then[unit].bits
        ),
        layers_moved=planned.layers_of(
            unit for unit in units if found.stage_of(unit) != present.stage_of(unit)
        ),
        proven=proven,
        layers_with_experts_elsewhere=planned.layers_of(
            unit for unit in units if now[unit].on_host != then[unit].on_host
        ),
    )


def _changed(
    planned: PlannedAssignment, question: Question
) -> tuple[CostModel, tuple[Device, ...]]:
    costs, devices, amount = planned.costs, planned.devices, question.amount
    changed = {device: device for device in devices}
    cluster = costs.cluster
    if question.kind == "theta":
        return replace(costs, theta=amount, usable_bits=None), devices
    if question.kind == "memory" and question.stage is not None:
        device = devices[question.stage]
        changed[device] = replace(device, memory_bytes=device.memory_bytes + round(amount))
    elif question.kind == "links":
        cluster = replace(
            cluster,
            internode_bytes_per_s=cluster.internode_bytes_per_s * amount,
            measured_links=tuple(link.faster(amount) for link in cluster.measured_links),
        )
        changed = {device: device.with_faster_links(amount) for device in devices}
    used = tuple(changed[device] for device in devices)
    own = {name for device in devices for name in device.member_names}
    others = (device for device in cluster.devices if device.name not in own)
    return replace(costs, cluster=replace(cluster, devices=(*used, *others))), used


def _search(
    present: PlannedAssignment, options: WhatIfOptions, deadline: float
) -> tuple[PlannedAssignment, bool]:
    """Search all micro-batch sizes for a better plan; say whether all were solved."""
    best, proven, costs = present, True, present.costs
    devices = present.devices
    sized = [SizedProblem.of(costs, devices, each) for each in fitting_sizes(costs, devices)]
    problems = [(lower_bound(each.problem), each.sizes, each.problem) for each in sized]
    for bound, sizes, problem in sorted(problems, key=lambda entry: entry[0]):
        target = evaluate(best.problem, best.first_layer, best.bitwidth)
        if bound >= target * (1 - costs.options.relative_gap):
            break
        left_s = min(options.solve_s, max(deadline - options.clock(), SHORTEST_SOLVE_S))
        try:
            limits = SolveOptions(costs.options.solver, left_s, costs.options.relative_gap, target)
            found = solve_by(METHOD, problem, limits)
        except InfeasibleError:
            continue
        proven = proven and found.status in ("optimal", "cutoff")
        if math.isfinite(found.objective) and found.objective < target:
            best = replace(
                best,
                problem=problem,
                sizes=sizes,
                first_layer=found.first_layer,
                bitwidth=found.bitwidth,
            )
    return best, proven

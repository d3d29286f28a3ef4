"""The Pareto front of cluster, model and workload: latency against quality, also as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from planner.cluster.spec import ClusterSpec
from planner.model.finding import ModelShape
from planner.options import AUTO, PlanOptions
from planner.search.remedies import PlanningRequest, naming_remedies
from planner.search.search import REMEDY_PLANNER, costs_of, with_fitting_cache
from planner.search.tradeoffs.bounded import theta_solver
from planner.search.tradeoffs.pareto import front
from planner.workload import Job, Workload


@dataclass(frozen=True, repr=False)
class FrontPoint:
    """One plan of the front, of a batch or a whole job; plan with its `theta` to get it again.

    `objective_latency_s` is the closed form that was optimised, `latency_s` the simulation's,
    `bits` the mean bitwidth of a layer.
    """

    theta: float
    latency_s: float
    objective_latency_s: float
    tokens_per_s: float
    in_flight: int
    omega: float
    bits: float

    def __repr__(self) -> str:
        return (
            f"FrontPoint(theta={self.theta:.4g}: {self.latency_s:.4g} s, {self.tokens_per_s:.4g} "
            f"tokens/s, omega {self.omega:.4g}, {self.bits:.3g} bits a layer)"
        )


def trace_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload | Job,
    options: PlanOptions,
    most_points: int = 12,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[FrontPoint, ...]:
    """Points from the fastest plan to the one of the best quality; errors as `find_plan`."""
    request = PlanningRequest.of(cluster, shape, workload, options)
    with naming_remedies(request, REMEDY_PLANNER):
        return _trace(request, most_points, clock)


def _trace(
    request: PlanningRequest, most_points: int, clock: Callable[[], float]
) -> tuple[FrontPoint, ...]:
    options = request.options
    if options.kv_bits == AUTO:
        return with_fitting_cache(
            options, lambda chosen: _trace(replace(request, options=chosen), most_points, clock)
        )
    costs, _ = costs_of(request)
    points = []
    for point in front(theta_solver(costs, clock), most_points):
        choices = point.plan.assignment.bitwidth
        points.append(
            FrontPoint(
                theta=point.theta,
                latency_s=point.predicted_s,
                objective_latency_s=point.latency_s,
                tokens_per_s=costs.generated_tokens / point.predicted_s,
                in_flight=point.plan.workload.global_batch,
                omega=point.omega,
                bits=sum(costs.options.bits[choice] for choice in choices) / len(choices),
            )
        )
    return tuple(points)


def front_json(points: Sequence[FrontPoint]) -> str:
    """The points as a JSON list."""
    return json.dumps([asdict(point) for point in points], indent=1) + "\n"

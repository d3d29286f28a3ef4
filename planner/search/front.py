"""The Pareto front of cluster, model and workload: latency against quality, JSON and picture."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from planner.cluster.spec import ClusterSpec
from planner.model.finding import ModelShape
from planner.options import AUTO, PlanOptions
from planner.search.pareto import front
from planner.search.remedies import PlanningRequest, naming_remedies
from planner.search.search import REMEDY_PLANNER, planning_costs, theta_solver, with_fitting_cache
from planner.workload import Workload
from quant.common.errors import SpecError

WIDTH, HEIGHT, MARGIN = 640, 400, 60


@dataclass(frozen=True)
class FrontPoint:
    """One plan of the front; plan with its `theta` to get it again.

    `objective_latency_s` is the closed form that was optimised, `latency_s` the simulation's,
    `bits` the mean bitwidth of a layer.
    """

    theta: float
    latency_s: float
    objective_latency_s: float
    tokens_per_s: float
    omega: float
    bits: float


def trace_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload,
    options: PlanOptions,
    most_points: int = 12,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[FrontPoint, ...]:
    """Points from the fastest plan to the one of the best quality; errors as `find_plan`."""
    request = PlanningRequest(cluster, shape, workload, options)
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
    costs, _ = planning_costs(request.cluster, request.shape, request.workload, options)
    tokens = request.workload.global_batch * request.workload.new_tokens
    points = []
    for point in front(theta_solver(costs, clock), most_points):
        choices = point.plan.assignment.bitwidth
        points.append(
            FrontPoint(
                theta=point.theta,
                latency_s=point.predicted_s,
                objective_latency_s=point.latency_s,
                tokens_per_s=tokens / point.predicted_s,
                omega=point.omega,
                bits=sum(costs.options.bits[choice] for choice in choices) / len(choices),
            )
        )
    return tuple(points)


def front_json(points: Sequence[FrontPoint]) -> str:
    """The points as a JSON list."""
    return json.dumps([asdict(point) for point in points], indent=1) + "\n"


def front_svg(points: Sequence[FrontPoint]) -> str:
    """Latency (down is faster) against summed sensitivity (left is better) as a picture."""
    most_s = max(point.latency_s for point in points) * 1.05
    most_omega = max(point.omega for point in points) * 1.05 or 1.0
    inner_width, inner_height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = [
        (
            MARGIN + point.omega / most_omega * inner_width,
            HEIGHT - MARGIN - point.latency_s / most_s * inner_height,
        )
        for point in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>theta {point.theta:.4g}: '
        f"{point.latency_s:.4g} s, sensitivity {point.omega:.4g}, {point.bits:.1f} bits a layer"
        "</title></circle>"
        for (x, y), point in zip(places, points, strict=True)
    )
    bottom = HEIGHT - MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Pareto front: latency against summed sensitivity" fill="currentColor" '
        'font-family="sans-serif" font-size="13">'
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" '
        'stroke="currentColor"/>'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/>{dots}'
        f'<text x="{MARGIN}" y="{MARGIN - 12}">seconds a batch (axis to {most_s:.3g})</text>'
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 24}" text-anchor="end">summed sensitivity '
        f"(axis to {most_omega:.3g})</text></svg>"
    )


def write_front(path: str | Path, points: Sequence[FrontPoint]) -> None:
    """Write the picture (`.svg`) or the figures (`.json`); SpecError for any other ending."""
    target = Path(path)
    writers = {".svg": front_svg, ".json": front_json}
    if target.suffix not in writers:
        raise SpecError(f"{target}: the front is written as .svg or .json")
    try:
        target.write_text(writers[target.suffix](points), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write {target}: {error.strerror}") from error

"""What plans under a bound on latency have by groups of devices, and at each quality.

    python -m benchmarks.reproduction.latency_bounds chosen_degrees [--cases 0 1]
    python -m benchmarks.reproduction.latency_bounds chosen_qualities [--bounds 2.5 4 8 15]

Searches go by the seconds of this process, so that what else the machine does changes no plan.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lab import header, show, table_row
from benchmarks.reproduction.latency_bounds.models import TASKS
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.schedules import BoundRequest
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec, StagePlan

SPECS = Path(__file__).parents[3] / "cluster_specs"

DEGREE_CASES = (
    ("paper_03", "opt-30b", "S", 20.0),
    ("paper_05", "opt-30b", "S", 12.0),
    ("paper_06", "opt-30b", "S", 12.0),
    ("paper_07", "opt-30b", "S", 12.0),
    ("paper_07", "opt-66b", "S", 12.0),
    ("paper_08", "opt-66b", "S", 12.0),
    ("paper_09", "opt-30b", "S", 12.0),
    ("paper_10", "opt-30b", "S", 6.0),
    ("paper_11", "opt-66b", "S", 6.0),
    ("mixed_24", "opt-66b", "S", 20.0),
)
"""Clusters with equal devices on a node, each with a model, a task and a bound in seconds."""

QUALITY_CASE = "single_a100", "opt-13b", "T"
BOUNDS_S = 2.5, 4.0, 8.0, 15.0


def degrees_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    every = range(len(DEGREE_CASES))
    parser.add_argument("--cases", nargs="+", type=int, choices=every, default=list(every))


def run_degrees(options: argparse.Namespace) -> None:
    """Print the table."""
    show(_degrees(options.cases))


def qualities_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--bounds", nargs="+", type=float, default=BOUNDS_S)


def run_qualities(options: argparse.Namespace) -> None:
    """Print the table."""
    show(_qualities(options.bounds))


def _degrees(cases: Sequence[int]) -> Iterator[str]:
    own = "requests/s | bits | search, s"
    yield header(f"cluster | model | bound, s | {own} | in groups, {own} | stages")
    for number in cases:
        cluster, model, task, bound_s = DEGREE_CASES[number]
        cells: list[str] = []
        for degree in (1, "auto"):
            began = time.process_time()
            plan = _planned(cluster, model, task, bound_s, tensor_parallel=degree)
            assert plan.latency is not None
            seconds = f"{time.process_time() - began:.1f}"
            cells += [f"{plan.latency.requests_per_s:.2f}", _bits(plan), seconds]
            stages = ", ".join(stage.label.partition("/")[2] for stage in _stages(plan))
        yield table_row([cluster, model, f"{bound_s:g}", *cells, stages])


def _qualities(bounds_s: Sequence[float]) -> Iterator[str]:
    yield header("bound, s | quality | tokens/s | bits a layer | sensitivity")
    for bound_s in bounds_s:
        beside = _planned(*QUALITY_CASE, bound_s).beside
        found = [(each.quality, each.plan) for each in beside.qualities]
        full = beside.full_precision
        for name, each in [*found, *([("16 bit", full)] if full else [])]:
            cells = name, f"{each.tokens_per_s:,.0f}", f"{each.mean_bits:.3g}"
            yield table_row([f"{bound_s:g}", *cells, f"{each.sensitivity:.3g}"])


def _planned(cluster: str, model: str, task: str, bound_s: float, **given: object) -> PlanSpec:
    spec = ClusterSpec.from_yaml(SPECS / f"{cluster}.yaml")
    options = PlanOptions.of({"max_request_latency_s": bound_s, **given})
    request = BoundRequest(TASKS[task].lengths, bound_s)
    return find_bounded_plan(spec, model_shape(model), model, request, options, time.process_time)


def _stages(plan: PlanSpec) -> Iterator[StagePlan]:
    if plan.prefill_plan is not None:
        yield from plan.prefill_plan.stages
    yield from plan.stages


def _bits(plan: PlanSpec) -> str:
    counts = Counter(bits for stage in _stages(plan) for bits in stage.bitwidths)
    return " ".join(f"{bits}x{counts[bits]}" for bits in sorted(counts))

"""The plans of LLM-PQ's clusters with and without tensor-parallel groups.

Each is a plan as users get it with `--global_bz 32 --theta` of table 9: both places of the head,
fewer devices, and baselines. Seconds are CPU seconds of one process. The gap is proven over all
groupings, orders, micro-batches and bits that were searched.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import processor_name
from benchmarks.planner import CLUSTERS, PAPER, WORKLOAD, update_page
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import AUTO, PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.search import find_plan


@dataclass(frozen=True)
class Grouped:
    """The plans of one cluster, without groups and with them, and CPU seconds of finding them."""

    cluster: int
    model: str
    single: PlanSpec
    grouped: PlanSpec
    single_s: float
    grouped_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this part is told."""
    parser.add_argument("--clusters", type=int, nargs="+", default=list(PAPER), choices=PAPER)
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Plan and print."""
    lines = list(table([grouped(each) for each in options.clusters]))
    print("\n".join(lines))
    if options.update is not None:
        update_page(options.update, "groupings", lines)


def grouped(number: int) -> Grouped:
    """Plan for one cluster both ways."""
    single, single_s = _timed(number, 1)
    plan, grouped_s = _timed(number, AUTO)
    return Grouped(number, PAPER[number][0], single, plan, single_s, grouped_s)


def _timed(number: int, degree: int | str) -> tuple[PlanSpec, float]:
    name, theta = PAPER[number]
    cluster = ClusterSpec.from_yaml(CLUSTERS / f"paper_{number:02}.yaml")
    options = PlanOptions(theta=theta, tensor_parallel=degree)
    began_s = time.process_time()
    plan = find_plan(cluster, model_shape(name), name, WORKLOAD, options)
    return plan, time.process_time() - began_s


def table(rows: list[Grouped]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| cluster | model | single: CPU s | objective (s) | groups: CPU s | objective (s) "
        "| candidates | gap | stages |"
    )
    yield "|---" * 9 + "|"
    for row in rows:
        single, solver = row.single.solver, row.grouped.solver
        yield (
            f"| {row.cluster} | {row.model} | {row.single_s:.1f} | {single.objective:.1f} "
            f"| {row.grouped_s:.1f} | {solver.objective:.1f} | {solver.candidates} "
            f"| {solver.gap:.0e} | {_stages(row.grouped)} |"
        )
    yield ""
    yield (
        f"All clusters: {sum(row.single_s for row in rows):.1f} CPU seconds without groups, "
        f"{sum(row.grouped_s for row in rows):.1f} with them; {processor_name()}."
    )


def _stages(plan: PlanSpec) -> str:
    """The stages of a plan by kind, groups with their degree."""
    kinds = Counter((stage.accelerator, stage.degree) for stage in plan.stages)
    return ", ".join(
        f"{count} {name}" + (f" x {degree}" if degree > 1 else "")
        for (name, degree), count in kinds.items()
    )

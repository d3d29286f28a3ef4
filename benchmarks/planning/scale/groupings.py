"""The plans of LLM-PQ's clusters with and without tensor-parallel groups.

Each is a plan as users get it with `--global_bz 32 --theta` of table 9: both places of the head,
fewer devices, and baselines. Seconds are CPU seconds of one process. The gap is proven over all
groupings, orders, micro-batches and bits that were searched. With `--mixed` every way of planning
for 24 GPUs of four types on eight nodes (`cluster_specs/mixed_24.yaml`).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab import header, processor_name, show
from benchmarks.planning.planner import CLUSTERS, PAPER, WORKLOAD
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import make_up_text
from planner.fleet.planning import FleetRequest, find_fleet
from planner.model.finding import model_shape
from planner.options import AUTO, PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Job, Workload

MIXED, MIXED_MODELS, JOB_PROMPTS = "mixed_24.yaml", ("opt-30b", "opt-66b"), 5000


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
    parser.add_argument("--mixed", action="store_true", help="24 GPUs of four types instead")
    parser.add_argument("--update", type=Path, help="page whose table is replaced")


def run(options: argparse.Namespace) -> None:
    """Plan and print."""
    if options.mixed:
        show(mixed_table(mixed_plans()), options.update, "mixed_24")
    else:
        found = [grouped(each) for each in options.clusters]
        show(table(found), options.update, "groupings")


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
    plan = find_plan(cluster, model_shape(name), name, WORKLOAD, options).plan
    return plan, time.process_time() - began_s


def table(rows: list[Grouped]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield header(
        "cluster | model | single: CPU s | objective (s) | groups: CPU s | "
        "objective (s) | candidates | gap | stages"
    )
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


@dataclass(frozen=True)
class Way:
    """A way of planning for the cluster of 24 GPUs: the options of `llmpq plan`, and what it gave
    for a model.
    """

    options: str
    model: str
    cpu_s: float
    gap: float
    tokens_per_s: float
    pipelines: Sequence[PlanSpec]


def mixed_plans() -> Iterator[Way]:
    """Plan for 24 GPUs in every way, with all else as users get it."""
    job = Job.of(JOB_PROMPTS, WORKLOAD.prompt_length, WORKLOAD.new_tokens)
    batch_text = f"--global_bz {WORKLOAD.global_batch} --theta 1"
    job_text = f"--prompts {JOB_PROMPTS}"
    for model in MIXED_MODELS:
        for degree in (1, AUTO):
            groups = f" --tensor_parallel {degree}" if degree == AUTO else ""
            batch = PlanOptions(theta=1.0, tensor_parallel=degree)
            yield _one_pipeline(model, WORKLOAD, batch, batch_text + groups)
            whole = replace(batch, theta=None)
            yield _one_pipeline(model, job, whole, job_text + groups)
            yield _replicas(model, job, whole, f"{job_text} --replicas auto{groups}")


def _one_pipeline(model: str, work: Workload | Job, options: PlanOptions, text: str) -> Way:
    cluster, shape = ClusterSpec.from_yaml(CLUSTERS / MIXED), model_shape(model)
    began_s = time.process_time()
    plan = find_plan(cluster, shape, model, work, options, time.process_time).plan
    cpu_s, rate = time.process_time() - began_s, plan.predicted.tokens_per_s
    return Way(text, model, cpu_s, plan.solver.gap, rate, (plan,))


def _replicas(model: str, job: Job, options: PlanOptions, text: str) -> Way:
    cluster, shape = ClusterSpec.from_yaml(CLUSTERS / MIXED), model_shape(model)
    began_s = time.process_time()
    fleet = find_fleet(FleetRequest(cluster, shape, model, job, options), time.process_time)
    cpu_s = time.process_time() - began_s
    return Way(text, model, cpu_s, fleet.record.gap, fleet.tokens_per_s, fleet.replicas)


def mixed_table(ways: Iterable[Way]) -> Iterator[str]:
    """Yield the lines of the table of 24 GPUs."""
    yield header("model | options | CPU s | gap | tokens/s | pipelines")
    for way in ways:
        make_ups = Counter(make_up_text(plan) for plan in way.pipelines)
        pipelines = ", ".join(f"{count} of {text}" for text, count in make_ups.items())
        yield (
            f"| {way.model} | `{way.options}` | {way.cpu_s:.1f} | {way.gap:.1%} "
            f"| {way.tokens_per_s:,.0f} | {pipelines} |"
        )
    yield f"\n{processor_name()}."


def _stages(plan: PlanSpec) -> str:
    """The stages of a plan by kind, groups with their degree."""
    kinds = Counter((stage.accelerator, stage.degree) for stage in plan.stages)
    return ", ".join(
        f"{count} {name}" + (f" x {degree}" if degree > 1 else "")
        for (name, degree), count in kinds.items()
    )

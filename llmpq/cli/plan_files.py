"""The files that planning writes, and what it says of them: the plan, its page, its pictures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, console, tell_written
from llmpq.cli.options.plan import PLANNING
from llmpq.cli.options.prompting import prompting_words
from llmpq.cli.progress import TaskProgress
from llmpq.cluster import Cluster
from llmpq.fleet import Fleet
from llmpq.model_check import checked_shape
from llmpq.plan import Plan
from llmpq.profile.tables import loading_note
from llmpq.report import refusal_of, write_front, write_latency_front, write_refusal
from llmpq.report.latency import lengths, what_is_bounded
from llmpq.tables import plan_table
from llmpq.workload.input_job import InputJob
from llmpq.workload.request_lengths import Requests, bound_request
from planner.latency_bound.bounded_plan import bounded_options
from planner.latency_bound.front import KindFronts
from planner.latency_bound.request import job_of
from planner.options import PlanOptions
from planner.search.find import FrontPoint
from planner.search.request import PlanningRequest
from planner.workload import Job, Workload
from quant.checkpoint.model_reference import is_local_model, local_path
from quant.common.errors import InfeasibleError, SpecError

PROMPTS, RESULTS = "prompts.jsonl", "results.jsonl"  # names for files that the user did not name


def searching(given: Mapping[str, Any], what: str) -> TaskProgress:
    """Show how long plans have been searched; of a front, nobody knows how many it will have."""
    limit_s = given.get("search_time_limit", PlanOptions.search_time_limit)
    return TaskProgress(f"searching {what}", limit_s=limit_s if what == "a plan" else None)


def show_stages(options: argparse.Namespace, plan: Plan) -> None:
    """Print the stages of a plan, what it predicts, and how long loading takes, where measured."""
    console().print(plan_table(plan.spec, plan.limits))
    note = loading_note(plan.spec, options.profiles) if "profiles" in options else None
    if note is not None:
        console().print(note, highlight=False)


def write_files(
    options: argparse.Namespace,
    plan: Plan,
    points: Sequence[FrontPoint] | KindFronts,
    command: Sequence[str],
) -> None:
    """Write what was asked for of a plan, and say what to do with it."""
    if "output" in options:
        plan.save(options.output)
        tell_written(options.output, f"run it: {_run_command(options, plan)}", options.json)
    if "report" in options:
        plan.report(options.report, points, command)
        tell_written(options.report, "open it in a browser", options.json)
    if "trace" in options:
        plan.trace(options.trace)
        where = "a browser" if Path(options.trace).suffix == ".svg" else "https://ui.perfetto.dev"
        tell_written(options.trace, f"open it in {where}", options.json)


def write_fleet_file(options: argparse.Namespace, fleet: Fleet) -> None:
    """Write the fleet where a file for it was named, and say how to run it."""
    if "output" in options:
        fleet.save(options.output)
        first = Plan(fleet.spec.replicas[0])
        tell_written(options.output, f"run it: {_run_command(options, first)}", options.json)


def write_front_file(
    options: argparse.Namespace, points: Sequence[FrontPoint], is_job: bool
) -> None:
    """Write the front where a file for it was named."""
    if not options.pareto:
        return
    write_front(options.pareto, points, "job" if is_job else "batch")
    look = "open it in a browser; " if Path(options.pareto).suffix == ".svg" else ""
    tell_written(options.pareto, f"{look}--theta X plans the one you like", options.json)


def write_latency_front_file(options: argparse.Namespace, fronts: KindFronts) -> None:
    """Write throughput over bounds on latency where a file for it was named."""
    if not options.pareto:
        return
    write_latency_front(options.pareto, fronts)
    look = "open it in a browser; " if Path(options.pareto).suffix == ".svg" else ""
    tell_written(
        options.pareto, f"{look}--max_request_latency_s X plans the one you like", options.json
    )


def _run_command(options: argparse.Namespace, plan: Plan) -> str:
    """The command that runs the plan that was written, with the files that were given."""
    inputs = options.input if "input" in options else [PROMPTS]
    words = ["llmpq", "run", "--plan", options.output, "--input", *inputs]
    source = local_path(plan.model.source, "give a folder", SpecError)
    is_hub_id = source is None and plan.model.source.count("/") == 1
    if not is_hub_id and (source is None or not is_local_model(source)):
        words += ["--model", "FOLDER"]
    words += prompting_words(options)
    return command_line(*words, "--output", RESULTS)


@dataclass(frozen=True)
class PageOfRefusal:
    """A context that writes the report also where nothing fits, before the error goes on."""

    options: argparse.Namespace
    cluster: Cluster
    model: str
    workload: Workload | Job | InputJob | Requests
    command: Sequence[str]

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write the page of an `InfeasibleError`, where a report was asked for."""
        if isinstance(error, InfeasibleError) and "report" in self.options:
            request, what = self._request()
            write_refusal(self.options.report, refusal_of(request, error, self.command, what))
            tell_written(self.options.report, "it says what would help", stderr=True)

    def _request(self) -> tuple[PlanningRequest, str | None]:
        """What was to be planned, and in words what was asked, where the request does not say."""
        names = [name for name in PLANNING if name in self.options]
        chosen = PlanOptions.of({name: getattr(self.options, name) for name in names})
        workload, cluster = self.workload, self.cluster.spec
        what = None
        if isinstance(workload, Requests):
            bound = bound_request(workload, chosen)
            what = f"{what_is_bounded(bound)}; {lengths(bound)}"
            chosen = bounded_options(chosen)
            ordinary: Workload | Job = job_of(bound)
        else:
            ordinary = workload.ordinary if isinstance(workload, InputJob) else workload
        request = PlanningRequest.of(cluster, checked_shape(self.model), ordinary, chosen)
        return request, what

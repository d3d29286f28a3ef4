"""A call of `llmpq plan`, the files that it writes and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, console, tell_written
from llmpq.cli.plan_options import PlanCommand
from llmpq.cli.terminal import TaskProgress
from llmpq.cluster import Cluster
from llmpq.fleet import Fleet
from llmpq.model_check import checked_shape
from llmpq.plan import Plan
from llmpq.profile.tables import loading_note
from llmpq.report.latency import lengths, what_is_bounded
from llmpq.report.page import refusal_of, write_refusal
from llmpq.report.plan_tables import plan_table
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload.input_job import InputJob
from llmpq.workload.request_lengths import Requests, bound_request
from planner.latency_bound.bounded_plan import bounded_options
from planner.latency_bound.front import KindFronts
from planner.latency_bound.schedules import job_of
from planner.options import PlanOptions
from planner.search.find import FrontPoint
from planner.search.request import PlanningRequest
from planner.workload import Job, Workload
from quant.checkpoint.model_reference import is_local_model, local_path
from quant.common.errors import InfeasibleError, SpecError

PROMPTS, RESULTS = "prompts.jsonl", "results.jsonl"  # names for files that the user did not name


@dataclass(frozen=True)
class PlanCall:
    """What `llmpq plan` was asked for by `words`, and the options of planning that were given."""

    options: PlanCommand
    planning: Mapping[str, Any]
    words: Sequence[str]
    model: str
    cluster: Cluster

    @contextmanager
    def searching(
        self, what: str, workload: Workload | Job | InputJob | Requests
    ) -> Iterator[None]:
        """Show how long plans have been searched; of a front, nobody knows how many it will have.
        Where nothing fits, the report that was asked for is written before the error goes on.
        """
        limit_s = self.planning.get("search_time_limit", PlanOptions.search_time_limit)
        with tokenizer_checked(self.model, self.options.prompting):
            try:
                limited = limit_s if what == "a plan" else None
                with TaskProgress(f"searching {what}", limit_s=limited):
                    yield
            except InfeasibleError as error:
                self._write_refusal(workload, error)
                raise

    def _write_refusal(
        self, workload: Workload | Job | InputJob | Requests, error: InfeasibleError
    ) -> None:
        if self.options.report is not None:
            request, asked = self._request(workload)
            write_refusal(self.options.report, refusal_of(request, error, self.words, asked))
            tell_written(self.options.report, "it says what would help", stderr=True)

    def _request(
        self, workload: Workload | Job | InputJob | Requests
    ) -> tuple[PlanningRequest, str | None]:
        """What was to be planned, and in words what was asked, where the request does not say."""
        chosen, what = PlanOptions.of(self.planning), None
        if isinstance(workload, Requests):
            bound = bound_request(workload, chosen)
            what = f"{what_is_bounded(bound)}; {lengths(bound)}"
            chosen = bounded_options(chosen)
            ordinary: Workload | Job = job_of(bound)
        else:
            ordinary = workload.ordinary if isinstance(workload, InputJob) else workload
        shape = checked_shape(self.model)
        return PlanningRequest.of(self.cluster.spec, shape, ordinary, chosen), what


def show_stages(call: PlanCall, plan: Plan) -> None:
    """Print the stages of a plan, what it predicts, and how long loading takes, where measured."""
    console().print(plan_table(plan.spec, plan.limits))
    profiles = call.planning.get("profiles")
    note = None if profiles is None else loading_note(plan.spec, profiles)
    if note is not None:
        console().print(note, highlight=False)


def write_files(call: PlanCall, plan: Plan, points: Sequence[FrontPoint] | KindFronts) -> None:
    """Write what was asked for of a plan, and say what to do with it."""
    options = call.options
    if options.output is not None:
        plan.save(options.output)
        tell_written(options.output, f"run it: {_run_command(options, plan)}", options.json)
    if options.report is not None:
        plan.report(options.report, points, call.words)
        tell_written(options.report, "open it in a browser", options.json)
    if options.trace is not None:
        plan.trace(options.trace)
        where = "a browser" if Path(options.trace).suffix == ".svg" else "https://ui.perfetto.dev"
        tell_written(options.trace, f"open it in {where}", options.json)


def write_fleet_file(call: PlanCall, fleet: Fleet) -> None:
    """Write the fleet where a file for it was named, and say how to run it."""
    options = call.options
    if options.output is not None:
        fleet.save(options.output)
        first = Plan(fleet.spec.replicas[0])
        tell_written(options.output, f"run it: {_run_command(options, first)}", options.json)


def write_front_file(options: PlanCommand, write: Callable[[str], None], chosen_by: str) -> None:
    """Have the front written where a file for it was named; the option `chosen_by` plans a point
    of it.
    """
    if options.pareto:
        write(options.pareto)
        look = "open it in a browser; " if Path(options.pareto).suffix == ".svg" else ""
        tell_written(options.pareto, f"{look}--{chosen_by} X plans the one you like", options.json)


def _run_command(options: PlanCommand, plan: Plan) -> str:
    """The command that runs the plan that was written, with the files that were given."""
    words = ["llmpq", "run", "--plan", options.output or "", "--input"]
    words += options.input or [PROMPTS]
    source = local_path(plan.model.source, "give a folder", SpecError)
    is_hub_id = source is None and plan.model.source.count("/") == 1
    if not is_hub_id and (source is None or not is_local_model(source)):
        words += ["--model", "FOLDER"]
    for name, value in options.given_prompting.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return command_line(*words, "--output", RESULTS)

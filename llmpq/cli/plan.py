"""`llmpq plan`: plan a model on a cluster, under the options of LLM-PQ section 5."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command, tell_notes, tell_written
from llmpq.cli.parser import made, taken
from llmpq.cli.plan_input import asked_cluster, asked_model, asked_requests, asked_workload
from llmpq.cli.plan_options import PROG, PlanCommand, plan_parser
from llmpq.cli.terminal import TaskProgress
from llmpq.cluster import Cluster
from llmpq.model_check import checked_shape, left_out_note, stored_note
from llmpq.plan import Plan
from llmpq.profile.tables import loading_note
from llmpq.report.bound_charts import write_latency_front
from llmpq.report.latency import lengths, what_is_bounded
from llmpq.report.page import write_refusal
from llmpq.report.plan_charts import write_front
from llmpq.report.plan_tables import (
    comparison_table,
    fleet_table,
    front_table,
    latency_front_table,
    plan_table,
)
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload.input_job import InputBatch, InputJob
from llmpq.workload.long_rows import naming
from llmpq.workload.request_lengths import Requests, bound_request
from planner.latency_bound.bounded_plan import KindFronts, bounded_options
from planner.latency_bound.schedules import job_of
from planner.options import PlanOptions
from planner.planning_rules import BOUNDS
from planner.scheduling import STATIC
from planner.search.find import FrontPoint, front_json
from planner.search.request import PlanningRequest
from planner.workload import Job, Workload
from quant.checkpoint.model_reference import is_local_model, local_path
from quant.common.errors import InfeasibleError, InputError, SpecError
from quant.common.files import names_a_file

_FRONT_HAS_ALL = ("theta", "quality", *BOUNDS)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    given = plan_parser(prog).parse(arguments)
    words = ["llmpq", "plan", *(sys.argv[1:] if arguments is None else arguments)]
    options, planning = made(PlanCommand, given), taken(PlanOptions, given)
    return run_command(prog, lambda: _plan(options, planning, words))


def _plan(options: PlanCommand, planning: dict[str, Any], words: Sequence[str]) -> int:
    _check_targets(options)
    _ = options.prompting  # read and checked
    model = asked_model(options)
    shape = checked_shape(model)  # before devices are looked for and prompts are tokenized
    tell_notes(filter(None, [left_out_note(model), stored_note(shape)]))
    cluster = asked_cluster(options)
    if options.write_cluster is not None:
        _write_cluster(options, options.write_cluster, model, cluster)
    if options.shaq_efficient:
        planning.setdefault("method", "transfer")
    call = PlanCall(options, planning, words, model, cluster)
    if "max_request_latency_s" in planning:
        return _plan_bounded(call)
    with TaskProgress("measuring the prompts"):
        found = asked_workload(options, model)
    if isinstance(found, InputBatch):
        return _plan_workload(call, found.workload, found.longest)
    return _plan_workload(call, found, None)


def _plan_workload(call: PlanCall, workload: Workload | Job | InputJob, longest: str | None) -> int:
    """Plan one pipeline or several, or trace the front; print and write what was asked for."""
    options, is_job = call.options, not isinstance(workload, Workload)
    if options.replicas is not None:
        with call.searching("pipelines", workload), naming(longest):
            fleet = call.cluster.fleet(call.model, workload, options.replicas, **call.planning)
        _show(options, fleet.spec.to_json, lambda: fleet_table(fleet.spec))
        if options.output is not None:
            fleet.save(options.output)
            first = Plan(fleet.spec.replicas[0])
            tell_written(options.output, f"run it: {_run_command(options, first)}", options.json)
        return EXIT_DONE
    points: Sequence[FrontPoint] = ()
    if options.pareto is not None:
        free = {name: each for name, each in call.planning.items() if name not in _FRONT_HAS_ALL}
        with call.searching("the front", workload):
            points = call.cluster.pareto(call.model, workload, **free)
        look = "job" if is_job else "batch"
        _write_front_file(options, lambda path: write_front(path, points, look), "theta")
        if options.report is None:
            _show(options, lambda: front_json(points), lambda: front_table(points, is_job))
            return EXIT_DONE
    front = {"policy": STATIC} if points else {}  # the plan is one of the front's
    with call.searching("a plan", workload), naming(longest):
        plan = call.cluster.plan(call.model, workload, **(front | dict(call.planning)))
    tables = [comparison_table(plan.spec)] if options.compare else []
    if points:
        tables.append(front_table(points, is_job, plan.spec))
    return _finish(call, plan, points, tables)


def _plan_bounded(call: PlanCall) -> int:
    """Plan under a bound on the latency of requests, or trace throughput over such bounds."""
    options = call.options
    with TaskProgress("measuring the prompts"):
        requests = asked_requests(options, call.model)
    fronts: KindFronts | None = None
    if options.pareto is not None:
        with call.searching("the front", requests):
            fronts = found = call.cluster.latency_front(call.model, requests, **call.planning)
        _write_front_file(
            options, lambda path: write_latency_front(path, found), "max_request_latency_s"
        )
        if options.report is None:
            _show(options, found.to_json, lambda: latency_front_table(found))
            return EXIT_DONE
    with call.searching("a plan", requests):
        plan = call.cluster.plan(call.model, requests, **call.planning)
    if fronts is None:
        return _finish(call, plan, (), [])
    return _finish(call, plan, fronts, [latency_front_table(fronts)])


def _show(
    options: PlanCommand, text: Callable[[], str], table: Callable[[], RenderableType]
) -> None:
    if options.json:
        sys.stdout.write(text())
    else:
        console().print(table())


def _check_targets(options: PlanCommand) -> None:
    """Raise `InputError` for a file that cannot be written, before a plan, which takes long."""
    targets = (options.output, options.report, options.trace, options.pareto, options.write_cluster)
    for target in targets:
        if target and not names_a_file(Path(target)):
            raise InputError(f"cannot write {target!r:.200}: name a file in a folder that exists")


def _write_cluster(options: PlanCommand, path: str, model: str, cluster: Cluster) -> None:
    target = Path(path)
    try:
        target.write_text(cluster.to_yaml())
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    again = command_line("llmpq", "plan", "--model", model, "--cluster", target)
    tell_written(target, f"correct it where it is wrong, then {again}", options.json)


Planned = Workload | Job | InputJob | Requests

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
    def searching(self, what: str, workload: Planned) -> Iterator[None]:
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
                report = self.options.report
                if report is not None:
                    request, asked = self._request(workload)
                    write_refusal(report, request, error, self.words, asked)
                    tell_written(report, "it says what would help", stderr=True)
                raise

    def _request(self, workload: Planned) -> tuple[PlanningRequest, str | None]:
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


def _finish(
    call: PlanCall,
    plan: Plan,
    points: Sequence[FrontPoint] | KindFronts,
    tables: Sequence[RenderableType],
) -> int:
    """Print the plan and `tables`, write what was asked for and say what to do with it."""
    options = call.options
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        console().print(plan_table(plan.spec, plan.limits))
        profiles = call.planning.get("profiles")
        note = None if profiles is None else loading_note(plan.spec, profiles)
        if note is not None:
            console().print(note, highlight=False)
        for table in tables:
            console().print(table)
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
    return EXIT_DONE


def _write_front_file(options: PlanCommand, write: Callable[[str], None], chosen_by: str) -> None:
    """Write the front where a file for it was named; option `chosen_by` plans a point of it."""
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


if __name__ == "__main__":
    raise SystemExit(main())

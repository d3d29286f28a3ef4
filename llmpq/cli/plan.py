"""`llmpq plan`: plan a model on a cluster, under the options of LLM-PQ section 5."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command, tell_written
from llmpq.cli.parser import made, taken
from llmpq.cli.plan_files import (
    PlanCall,
    show_stages,
    write_files,
    write_fleet_file,
    write_front_file,
)
from llmpq.cli.plan_input import asked_cluster, asked_model, asked_requests, asked_workload
from llmpq.cli.plan_options import PROG, PlanCommand, plan_parser
from llmpq.cli.terminal import TaskProgress
from llmpq.cluster import Cluster
from llmpq.model_check import checked_shape
from llmpq.report.bound_charts import write_latency_front
from llmpq.report.plan_charts import write_front
from llmpq.report.plan_tables import comparison_table, fleet_table, front_table, latency_front_table
from llmpq.workload.input_job import InputBatch, InputJob
from llmpq.workload.long_rows import naming
from planner.latency_bound.front import KindFronts
from planner.options import PlanOptions
from planner.planning_rules import BOUNDS
from planner.search.find import FrontPoint, front_json
from planner.workload import Job, Workload
from quant.common.errors import InputError
from quant.common.files import names_a_file

_FRONT_HAS_ALL = ("theta", "quality", *BOUNDS)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    given = plan_parser(prog).parse(arguments)
    words = ["llmpq", "plan", *(sys.argv[1:] if arguments is None else arguments)]
    options, planning = made(PlanCommand, given), taken(PlanOptions, given)
    return run_command(prog, lambda: _plan(options, planning, words))


def _plan(options: PlanCommand, planning: dict[str, Any], words: Sequence[str]) -> int:
    _check_targets(options)
    _ = options.prompting  # read and checked
    model = asked_model(options)
    checked_shape(model)  # before devices are looked for and prompts are tokenized
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
        write_fleet_file(call, fleet)
        return EXIT_DONE
    points: Sequence[FrontPoint] = ()
    if options.pareto is not None:
        free = {name: each for name, each in call.planning.items() if name not in _FRONT_HAS_ALL}
        with call.searching("the front", workload):
            points = call.cluster.pareto(call.model, workload, **free)
        look = "job" if is_job else "batch"
        write_front_file(options, lambda path: write_front(path, points, look), "theta")
        if options.report is None:
            _show(options, lambda: front_json(points), lambda: front_table(points, is_job))
            return EXIT_DONE
    with call.searching("a plan", workload), naming(longest):
        plan = call.cluster.plan(call.model, workload, **call.planning)
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        show_stages(call, plan)
        if options.compare:
            console().print(comparison_table(plan.spec))
        if points:
            console().print(front_table(points, is_job, plan.spec))
    write_files(call, plan, points)
    return EXIT_DONE


def _plan_bounded(call: PlanCall) -> int:
    """Plan under a bound on the latency of requests, or trace throughput over such bounds; print
    and write what was asked for.
    """
    options = call.options
    with TaskProgress("measuring the prompts"):
        requests = asked_requests(options, call.model)
    fronts: KindFronts | None = None
    if options.pareto is not None:
        with call.searching("the front", requests):
            fronts = found = call.cluster.latency_front(call.model, requests, **call.planning)
        write_front_file(
            options, lambda path: write_latency_front(path, found), "max_request_latency_s"
        )
        if options.report is None:
            _show(options, found.to_json, lambda: latency_front_table(found))
            return EXIT_DONE
    with call.searching("a plan", requests):
        plan = call.cluster.plan(call.model, requests, **call.planning)
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        show_stages(call, plan)
        if fronts is not None:
            console().print(latency_front_table(fronts))
    write_files(call, plan, () if fronts is None else fronts)
    return EXIT_DONE


def _show(
    options: PlanCommand, text: Callable[[], str], table: Callable[[], RenderableType]
) -> None:
    """Print what was found as JSON or as a table."""
    if options.json:
        sys.stdout.write(text())
    else:
        console().print(table())


def _check_targets(options: PlanCommand) -> None:
    """Raise `InputError` for a file that could not be written: before the plan, which takes long,
    and not after it.
    """
    for target in (
        options.output,
        options.report,
        options.trace,
        options.pareto,
        options.write_cluster,
    ):
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


if __name__ == "__main__":
    raise SystemExit(main())

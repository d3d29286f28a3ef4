"""`llmpq plan`: plan a model on a cluster, under the options of LLM-PQ section 5."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.bounded import plan_bounded
from llmpq.cli.common import (
    EXIT_DONE,
    command_line,
    console,
    print_notes,
    run_command,
    tell_written,
)
from llmpq.cli.options.plan import PLANNING, PROG, plan_parser
from llmpq.cli.options.prompting import asked_prompting, given_prompting
from llmpq.cli.plan_files import (
    PageOfRefusal,
    searching,
    show_stages,
    write_files,
    write_fleet_file,
    write_front_file,
)
from llmpq.cli.progress import TaskProgress
from llmpq.cluster import Cluster
from llmpq.fleet import Fleet
from llmpq.model_check import checked_shape
from llmpq.plan import Plan
from llmpq.tables import comparison_table, fleet_table, front_table
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload.batch import InputBatch, batch_of_input
from llmpq.workload.defaults import DEFAULT_WORKLOAD, SEPARATE
from llmpq.workload.input_job import InputJob, job_of_input, job_of_prompts
from llmpq.workload.long_rows import LongRowRule
from llmpq.workload.named_rows import naming
from planner.cluster.spec import ClusterSpec
from planner.planning_rules import BOUNDS
from planner.search.find import FrontPoint, front_json
from planner.workload import Job, Workload
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file

_TARGETS = ("output", "report", "trace", "pareto", "write_cluster")
"""Options that name a file to write."""

_FRONT_HAS_ALL = ("theta", "quality", *BOUNDS)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = plan_parser(prog).parse(arguments)
    words = ["llmpq", "plan", *(sys.argv[1:] if arguments is None else arguments)]
    return run_command(prog, lambda: _plan(options, words))


def _plan(options: argparse.Namespace, command: Sequence[str]) -> int:
    _check_targets(options)
    prompting = asked_prompting(options)
    model = _model(options)
    checked_shape(model)  # before devices are looked for and prompts are tokenized
    cluster = _cluster(options)
    if "write_cluster" in options:
        _write_cluster(options, model, cluster)
    given = {name: getattr(options, name) for name in PLANNING if name in options}
    if options.shaq_efficient:
        given.setdefault("method", "transfer")
    if "max_request_latency_s" in options:
        return plan_bounded(options, cluster, model, given, command)
    with TaskProgress("measuring the prompts"):
        found = _workload(options, model)
    workload = found.workload if isinstance(found, InputBatch) else found
    longest = found.longest if isinstance(found, InputBatch) else None
    is_job = not isinstance(workload, Workload)
    page = PageOfRefusal(options, cluster, model, workload, command)
    if "replicas" in options:
        with (
            tokenizer_checked(model, prompting),
            page,
            searching(given, "pipelines"),
            naming(longest),
        ):
            fleet = cluster.fleet(model, workload, options.replicas, **given)
        return _show_fleet(options, fleet)
    points: Sequence[FrontPoint] = ()
    if "pareto" in options:
        free = {name: value for name, value in given.items() if name not in _FRONT_HAS_ALL}
        with tokenizer_checked(model, prompting), page, searching(given, "the front"):
            points = cluster.pareto(model, workload, **free)
        write_front_file(options, points, is_job)
        if "report" not in options:
            return _show_front(options, points, is_job)
    with tokenizer_checked(model, prompting), page, searching(given, "a plan"), naming(longest):
        plan = cluster.plan(model, workload, **given)
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        _show_plan(options, plan)
        if points:
            console().print(front_table(points, is_job, plan.spec))
    write_files(options, plan, points, command)
    return EXIT_DONE


def _check_targets(options: argparse.Namespace) -> None:
    """Raise `InputError` for a file that could not be written: before the plan, which takes long,
    and not after it.
    """
    for name in _TARGETS:
        target = getattr(options, name, None)
        if target and not names_a_file(Path(target)):
            raise InputError(f"cannot write {target!r:.200}: name a file in a folder that exists")


def _write_cluster(options: argparse.Namespace, model: str, cluster: Cluster) -> None:
    target = Path(options.write_cluster)
    try:
        target.write_text(cluster.to_yaml())
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    again = command_line("llmpq", "plan", "--model", model, "--cluster", target)
    tell_written(target, f"correct it where it is wrong, then {again}", options.json)


def _show_plan(options: argparse.Namespace, plan: Plan) -> None:
    show_stages(options, plan)
    if options.compare:
        console().print(comparison_table(plan.spec))


def _show_fleet(options: argparse.Namespace, fleet: Fleet) -> int:
    """Print the pipelines that share the prompts, and write their file."""
    if options.json:
        sys.stdout.write(fleet.spec.to_json())
    else:
        console().print(fleet_table(fleet.spec))
    write_fleet_file(options, fleet)
    return EXIT_DONE


def _show_front(options: argparse.Namespace, points: Sequence[FrontPoint], is_job: bool) -> int:
    """Print the front, of plans for a whole job or for one batch, as a table or as JSON."""
    if options.json:
        sys.stdout.write(front_json(points))
    else:
        console().print(front_table(points, is_job))
    return EXIT_DONE


def _model(options: argparse.Namespace) -> str:
    if ("model" in options) == ("model_name" in options):
        raise SpecError("name the model once: --model, or --model_name with --model_size")
    if "model" in options:
        return str(options.model)
    size = f"-{options.model_size}" if "model_size" in options else ""
    return f"{options.model_name}{size}"


def _cluster(options: argparse.Namespace) -> Cluster:
    by_counts = "device_names" in options or "device_numbers" in options
    if "cluster" in options:
        if by_counts:
            raise SpecError(
                "describe the cluster once: --cluster, or --device_names and --device_numbers"
            )
        return Cluster(print_notes(ClusterSpec.from_yaml(options.cluster)))
    if not by_counts:
        from llmpq.detect import detect_cluster

        return Cluster(print_notes(detect_cluster(getattr(options, "address", None))))
    if not ("device_names" in options and "device_numbers" in options):
        raise SpecError("--device_names and --device_numbers go together, one number for each name")
    return Cluster(
        print_notes(ClusterSpec.from_counts(options.device_names, options.device_numbers))
    )


def _workload(options: argparse.Namespace, model: str) -> Workload | Job | InputJob | InputBatch:
    """One batch, as in the paper, where --global_bz or nothing is given; else a job."""
    given = {name: getattr(options, name) for name in DEFAULT_WORKLOAD if name in options}
    if "prompts" in options:
        lengths = getattr(options, "lengths", None)
        return job_of_prompts(
            options.prompts, given.get("prompt_length"), given.get("new_tokens"), lengths
        )
    if "input" not in options:
        return Workload(**{**DEFAULT_WORKLOAD, **given})
    rule = LongRowRule(
        getattr(options, "long_rows", SEPARATE), getattr(options, "percentile", None)
    )
    found: InputJob | InputBatch
    if "global_batch" in options:
        found = batch_of_input(
            options.input, model, given, rule.percentile, asked_prompting(options)
        )
    else:
        tokens = given.get("new_tokens"), given.get("prompt_length")
        lengths = getattr(options, "lengths", None)
        how = given_prompting(options)
        found = job_of_input(options.input, model, *tokens, rule, lengths, **how)
    for note in found.notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())

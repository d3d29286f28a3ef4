"""`llmpq plan`: plan a model on a cluster, under the options of LLM-PQ section 5."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.common import EXIT_DONE, console, print_notes, run_command
from llmpq.cli.options.algo import PLANNING, PROG, algo_parser
from llmpq.cli.progress import TaskProgress
from llmpq.cluster import Cluster
from llmpq.model_check import checked_shape
from llmpq.profile.tables import loading_note
from llmpq.report import write_front
from llmpq.tables import comparison_table, front_table, plan_table
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload.batch import workload_of_prompts
from llmpq.workload.defaults import DEFAULT_WORKLOAD, SEPARATE
from llmpq.workload.input_job import InputJob, job_of_input, job_of_prompts
from planner.cluster.spec import ClusterSpec
from planner.options import BOUNDS, PlanOptions
from planner.search.tradeoffs.front import FrontPoint, front_json
from planner.workload import Job, Workload
from quant.common.errors import InputError, SpecError

_FRONT_HAS_ALL = ("theta", "quality", *BOUNDS)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = algo_parser(prog).parse(arguments)
    return run_command(prog, lambda: _plan(options))


def _plan(options: argparse.Namespace) -> int:
    model = _model(options)
    checked_shape(model)  # before devices are looked for and prompts are tokenized
    cluster = _cluster(options)
    if "write_cluster" in options:
        _write(Path(options.write_cluster), cluster.to_yaml())
    given = {name: getattr(options, name) for name in PLANNING if name in options}
    workload = _workload(options, model)
    if options.shaq_efficient:
        given.setdefault("method", "transfer")
    points: Sequence[FrontPoint] = ()
    if "pareto" in options:
        free = {name: value for name, value in given.items() if name not in _FRONT_HAS_ALL}
        with tokenizer_checked(model), _searching(given, "the front"):
            points = cluster.pareto(model, workload, **free)
        if options.pareto:
            write_front(options.pareto, points)
        if "report" not in options:
            return _show_front(options, points, not isinstance(workload, Workload))
    with tokenizer_checked(model), _searching(given, "a plan"):
        plan = cluster.plan(model, workload, **given)
    if "output" in options:
        plan.save(options.output)
    if "report" in options:
        plan.report(options.report, points)
    if "trace" in options:
        plan.trace(options.trace)
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        console().print(plan_table(plan.spec, plan.limits))
        note = loading_note(plan.spec, options.profiles) if "profiles" in options else None
        if note is not None:
            console().print(note, highlight=False)
        if options.compare:
            console().print(comparison_table(plan.spec))
    return EXIT_DONE


def _searching(given: Mapping[str, Any], what: str) -> TaskProgress:
    """Show how long plans have been searched; of a front, nobody knows how many it will have."""
    limit_s = given.get("search_time_limit", PlanOptions.search_time_limit)
    return TaskProgress(f"searching {what}", limit_s=limit_s if what == "a plan" else None)


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


def _workload(options: argparse.Namespace, model: str) -> Workload | Job | InputJob:
    """One batch, as in the paper, where --global_bz or nothing is given; else a job."""
    given = {name: getattr(options, name) for name in DEFAULT_WORKLOAD if name in options}
    if "prompts" in options:
        lengths = getattr(options, "lengths", None)
        return job_of_prompts(
            options.prompts, given.get("prompt_length"), given.get("new_tokens"), lengths
        )
    if "input" not in options:
        return Workload(**{**DEFAULT_WORKLOAD, **given})
    if "global_batch" in options:
        return workload_of_prompts(options.input, model, given)
    job = job_of_input(
        options.input,
        model,
        given.get("new_tokens"),
        given.get("prompt_length"),
        getattr(options, "long_rows", SEPARATE),
        getattr(options, "lengths", None),
    )
    for note in job.notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    return job


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(main())

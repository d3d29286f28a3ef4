"""`llmpq-dist`: run a plan over files of prompts on Ray; the same command goes on after a stop."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from llmpq.cli.common import (
    EXIT_DONE,
    EXIT_ERROR_ROWS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    command_line,
    console,
    run_command,
    tell_written,
)
from llmpq.cli.options.dist import (
    DIST_RULES,
    dist_parser,
    output_options,
    run_options,
)
from llmpq.cli.submit import known_job, split_options, submit
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import Job, JobOptions, Tally, finished_tally
from llmpq.jobs.output.output import Output, open_output
from llmpq.jobs.signals import stop_signals
from llmpq.plan import Plan
from llmpq.quality.job_prompts import prompts_of_input
from llmpq.quality.on_the_fly import with_calibrated
from llmpq.remote.ray_jobs import keep_folder_to_driver
from llmpq.run.checkpoint import job_identity
from llmpq.run.monitoring.progress import RunProgress
from llmpq.run.options import RunOptions
from llmpq.run.run import Run
from llmpq.run.summary import RunSize
from llmpq.tables import plan_table, summary_table
from planner.cluster.spec import ClusterSpec
from planner.plan.run_trace import check_trace_path
from quant.common.errors import HeadLostError, InputError, PlanMismatchError, StageLostError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    keep_folder_to_driver(os.environ)
    arguments = sys.argv[1:] if arguments is None else arguments
    where, command = split_options(arguments)
    if where.follow or where.stop:
        return run_command("llmpq-dist", lambda: known_job(where))
    options = dist_parser(__doc__).parse(arguments, DIST_RULES)
    if where.address is not None:
        return run_command("llmpq-dist", lambda: submit(where, command, _check(options)[0].spec))
    return run_command("llmpq-dist", lambda: _run(options))


def _check(options: argparse.Namespace) -> tuple[Plan, RunOptions]:
    """Return the plan and the options of the run; raises for options that could not be used on any
    machine.
    """
    chosen = run_options(options)
    output_options(options)
    plan = Plan.load(options.strat_file_name)
    chosen.scheduling(plan.spec)  # refuses what the plan's policy does not have
    if "cluster" in options:
        _check_cluster(plan, options.cluster)
    return plan, chosen


def _run(options: argparse.Namespace) -> int:
    plan, chosen = _check(options)
    _ = chosen.cache  # refuses the home folder of nobody before the output is touched
    source = JobInput.find(options.input)
    inputs = (*source.files, Path(options.strat_file_name))
    if chosen.trace_path is not None:
        check_trace_path(chosen.trace_path, (*inputs, Path(options.output)))
    output = open_output(options.output, output_options(options), inputs)
    with stop_signals() as seen:
        try:
            with output:
                return _run_job(options, plan, chosen, source, output, seen)
        except KeyboardInterrupt:
            console(stderr=True).print(
                f"llmpq-dist: interrupted; what was finished is kept{output.resume_hint()}",
                soft_wrap=True,
            )
            return EXIT_TERMINATED if signal.SIGTERM in seen else EXIT_INTERRUPTED
        except (StageLostError, HeadLostError) as error:
            _say(_failed(str(error), output))
            return EXIT_FAILED


def _failed(why: str, output: Output) -> str:
    return f"llmpq-dist: failed: {why}; {output.committed_message()}"


def _end_at_once(output: Output, why: str) -> None:
    """Commit what is finished and end the process although a call to Ray does not return."""
    with suppress(InputError):
        output.commit()
    _say(_failed(why, output))
    os._exit(EXIT_FAILED)


def _run_job(
    options: argparse.Namespace,
    plan: Plan,
    chosen: RunOptions,
    source: JobInput,
    output: Output,
    seen: Sequence[int],
) -> int:
    """Do what is left of a job and return the exit code; torch and Ray are loaded only if something
    is left.
    """
    job_options = JobOptions(options.retry_errors, options.on_error == "fail", options.extend)
    plan_file = str(options.strat_file_name)
    chosen = with_calibrated(
        plan.spec, chosen, lambda folder: prompts_of_input(options.input, folder)
    )
    identity = job_identity(plan.spec, chosen, plan_file)
    tally = finished_tally(source, output, identity, job_options)
    if tally is not None:
        _show_plan(options, plan)
        return _end_done(tally)
    job = Job(source, output, identity, job_options)
    _show_plan(options, plan)
    if job.tally.left:
        run = Run(plan.spec, chosen, plan_file, job=Path(options.output).stem)
        run.give_up = partial(_end_at_once, output)
        code = _generate(run, job, job_options.stop_at_error, seen)
        if code != EXIT_FAILED:
            _tell_files(options, chosen)
        return code
    code = _end_done(job.tally)
    job.finish()
    return code


def _tell_files(options: argparse.Namespace, chosen: RunOptions) -> None:
    """Say what a run has written, and where to look at it."""
    shown = command_line("llmpq", "jobs", "show", options.output)
    tell_written(options.output, f"its figures: {shown}", stderr=True)
    if chosen.trace_path is not None:
        tell_written(chosen.trace_path, "open it in https://ui.perfetto.dev", stderr=True)


def _show_plan(options: argparse.Namespace, plan: Plan) -> None:
    if options.show_plan:
        console(stderr=True).print(plan_table(plan.spec))


def _end_done(tally: Tally) -> int:
    """Say that nothing is left to do, and return the exit code."""
    _say(f"all {tally.rows} rows are done")
    if tally.resumed_errors:
        _say(f"{tally.resumed_errors} rows have errors; --retry-errors runs them again")
    return EXIT_ERROR_ROWS if tally.resumed_errors else EXIT_DONE


def _generate(run: Run, job: Job, fail: bool, seen: Sequence[int]) -> int:
    """Generate what is left of `job`, and return the exit code."""
    tally = job.tally
    for note in (run.sampling.note, run.sampling.limit_note):
        if note:
            _say(note)
    if tally.resumed:
        _say(f"{tally.resumed} of {tally.rows} rows are done, {tally.left} are left")
    progress = RunProgress(console(stderr=True), tally.left, plan=run.plan)
    _write_all(run, job, progress, fail, seen)
    first = run.rows.first_error
    if fail and first is not None:
        _say(f"stopped at row {first.custom_id!r:.80}: {first.error}")
        return EXIT_FAILED
    job.finish()
    if run.summary is not None:
        console(stderr=True).print(summary_table(run.summary.plan or run.plan, run.summary))
    errors = run.rows.errors + tally.resumed_errors
    if first is not None:
        _say(f"{errors} rows have errors, the first {first.custom_id!r:.80}: {first.error}")
    elif errors:
        _say(f"{errors} rows have errors; --retry-errors runs them again")
    return EXIT_ERROR_ROWS if errors else EXIT_DONE


def _say(line: str) -> None:
    console(stderr=True).print(line, soft_wrap=True)


def _check_cluster(plan: Plan, path: str) -> None:
    if ClusterSpec.from_yaml(path).fingerprint() != plan.spec.cluster_fingerprint:
        raise PlanMismatchError(
            f"the plan is for cluster {plan.spec.cluster!r}, which differs from {path}; "
            "plan again with llmpq-algo --cluster"
        )


def _write_all(run: Run, job: Job, progress: RunProgress, fail: bool, seen: Sequence[int]) -> None:
    run.on_state.append(progress.show)
    run.on_plan.append(progress.change_plan)
    run.on_event.append(lambda event: progress.note(event.text))
    tally = job.tally
    size = RunSize(tally.left, tally.max_tokens, tally.resumed)
    with progress, closing(run.results(job.todo(), size)) as results:
        for result in results:
            if fail and result.error is not None:
                return
            job.write(result)
            progress.count(result)
            if seen:
                raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())

"""`llmpq run`: run a plan over files of prompts on Ray; the same command goes on after a stop."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from llmpq.cli.common import (
    EXIT_DONE,
    EXIT_ERROR_ROWS,
    EXIT_FAILED,
    command_line,
    console,
    details,
    run_command,
    say,
    tell_written,
)
from llmpq.cli.parser import made
from llmpq.cli.run_options import RUN, RunCommand, output_options, run_options, run_parser
from llmpq.cli.submit import known_job, split_options, submit
from llmpq.cli.terminal import TaskProgress
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import (
    STOPS_OF_JOBS,
    JobOptions,
    OpenJob,
    Output,
    check_ids,
    finished_tally,
    open_output,
    stop_code,
    stop_signals,
)
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.row_database import Tally
from llmpq.jobs.same_rows import WORTH_SAYING
from llmpq.plan import Fleet, Plan, load_plan
from llmpq.quality.calibration import prompts_of_input, with_calibrated
from llmpq.remote.ray_jobs import keep_folder_to_driver
from llmpq.report.formatting import plural
from llmpq.report.plan_tables import plan_table
from llmpq.run.checkpoint import check_fleet, job_identity
from llmpq.run.display import RunProgress, about, summary_table
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions
from llmpq.run.recorder import RunRecorder, SessionOf, recorded
from llmpq.run.run import Run
from llmpq.run.summary import forecast_s
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import plans_of, shown_plan
from planner.plan.simulate import check_trace_path
from planner.plan.spec import undivided
from quant.common.errors import HeadLostError, InputError, PlanMismatchError, StageLostError
from quant.common.url_files import AnyFile
from quant.scheme import GPTQ


def main(arguments: Sequence[str] | None = None, prog: str = RUN) -> int:
    keep_folder_to_driver(os.environ)
    arguments = sys.argv[1:] if arguments is None else arguments
    where, command = split_options(arguments, prog)
    if where.follow_job or where.stop_job:
        return run_command(prog, lambda: known_job(where, prog))
    given = run_parser(prog).parse(arguments)
    options = replace(
        made(RunCommand, given),
        prog=prog,
        command=shlex.join([*prog.split(), *arguments]),
        names_format="output_format" in given,
    )
    if where.submit is not None:
        return run_command(
            prog, lambda: submit(where, command, shown_plan(_check(options, given)[0].spec), prog)
        )
    return run_command(prog, lambda: _run(options, given))


def _check(options: RunCommand, given: argparse.Namespace) -> tuple[Plan | Fleet, RunOptions]:
    """The plan or fleet, and the run's options; raises for those that no machine could use."""
    chosen = run_options(given)
    output_options(given)
    plan = load_plan(options.plan)
    check_fleet(plan.spec, chosen, options.plan)
    for each in plans_of(plan.spec):
        chosen.scheduling(each)  # refuses what the plan's policy does not have
    if options.cluster is not None:
        check_cluster(plan, options.cluster)
    return plan, chosen


def _run(options: RunCommand, given: argparse.Namespace) -> int:
    plan, chosen = _check(options, given)
    _ = chosen.cache  # refuses the home folder of nobody before the output is touched
    source = JobInput.find(options.input)
    inputs: tuple[AnyFile, ...] = (*source.files, Path(options.plan))
    if chosen.trace_path is not None:
        local = (path for path in (*inputs, Path(options.output)) if isinstance(path, Path))
        check_trace_path(chosen.trace_path, tuple(local))
    written = output_options(given)
    if written.output_format is None and source.begins_with_batch_line():
        written = replace(written, default_format="openai")
    output = open_output(options.output, written, inputs)
    with stop_signals(STOPS_OF_JOBS) as seen:
        try:
            with output:
                return _run_job(options, plan, chosen, source, output, seen)
        except KeyboardInterrupt:
            kept = f"what was finished is kept{output.resume_hint()}"
            say(f"{options.prog}: interrupted; {kept}")
            return stop_code(seen)
        except (StageLostError, HeadLostError) as error:
            say(f"{_failed(options.prog, str(error), output)}{details(error)}")
            return EXIT_FAILED


def _failed(prog: str, why: str, output: Output) -> str:
    return f"{prog}: failed: {why}; {output.committed_message()}"


def _end_at_once(prog: str, output: Output, why: str) -> None:
    """Commit what is finished and end the process although a call to Ray does not return."""
    with suppress(InputError):
        output.commit()
    say(_failed(prog, why, output))
    os._exit(EXIT_FAILED)


def _run_job(
    options: RunCommand,
    plan: Plan | Fleet,
    chosen: RunOptions,
    source: JobInput,
    output: Output,
    seen: Sequence[int],
) -> int:
    """Do what is left of a job, for which alone torch and Ray are loaded; returns the exit code."""
    job_options = JobOptions(
        options.retry_errors, options.on_error == "fail", options.extend, options.dedupe
    )
    plan_file = options.plan
    first = plans_of(plan.spec)[0]
    if isinstance(plan, Fleet):  # a pipeline that still loads at the end must start no other Ray
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if first.rounding == GPTQ:
        check_ids(source)  # before the minutes that calibrating may take
    with TaskProgress("calibrating for the plan") as progress:
        chosen = with_calibrated(
            first,
            chosen,
            lambda folder: prompts_of_input(options.input, folder, chosen.prompting),
            progress.report,
        )
    identity = job_identity(plan.spec, chosen, plan_file)
    tally = finished_tally(source, output, identity, job_options)
    if tally is not None:
        _show_plan(options, plan)
        return _end_done(tally)
    with TaskProgress("reading the rows"):
        job = OpenJob(source, output, identity, job_options)
    _show_plan(options, plan)
    if job.tally.left:
        if job.same_share >= WORTH_SAYING and not options.dedupe:
            say(
                f"{job.same_share:.0%} of the rows are the same as others: --dedupe would compute "
                "these once and write each"
            )
        if output.output_format == "openai" and not options.names_format:
            say("results are lines of OpenAI's batches, as the input's; else --output_format rows")
        job_name = Path(options.output).stem
        run = Run(RunResources(plan.spec, chosen, plan_file, job_name, at_once=True))
        run.give_up = partial(_end_at_once, options.prog, output)
        session = _session_of(output, job.tally, options)
        with recorded(run, session) as recorder:
            code = _generate(run, job, job_options.stop_at_error, seen, recorder)
        if code != EXIT_FAILED:
            _tell_files(options, chosen)
        return code
    code = _end_done(job.tally)
    job.finish()
    return code


def _tell_files(options: RunCommand, chosen: RunOptions) -> None:
    shown = command_line("llmpq", "jobs", "show", options.output)
    tell_written(options.output, f"its figures: {shown}", stderr=True)
    if chosen.trace_path is not None and chosen.trace_path.exists():  # no row ran otherwise
        tell_written(chosen.trace_path, "open it in https://ui.perfetto.dev", stderr=True)


def _show_plan(options: RunCommand, plan: Plan | Fleet) -> None:
    if options.show_plan:
        console(stderr=True).print(plan_table(shown_plan(plan.spec)))


def _end_done(tally: Tally) -> int:
    say(f"all {tally.rows} rows are done")
    if tally.resumed_errors:
        say(f"{tally.resumed_errors} rows have errors; --retry_errors runs them again")
    return EXIT_ERROR_ROWS if tally.resumed_errors else EXIT_DONE


def _session_of(output: Output, tally: Tally, options: RunCommand) -> SessionOf | None:
    """The session that the journal is told of; None where nothing is kept."""
    if not isinstance(output, JobOutput):
        return None
    job = (output.journal, options.command, options.plan, tally)
    return SessionOf(*job, output.options.overwrite, output.newest_shard)


def _generate(
    run: Run, job: OpenJob, fail: bool, seen: Sequence[int], recorder: RunRecorder
) -> int:
    """Generate what is left of `job`, and return the exit code."""
    tally = job.tally
    for note in run.notes:
        say(note)
    if tally.resumed:
        say(f"{tally.resumed} of {tally.rows} rows are done, {tally.left} are left")
    planned = forecast_s(run.plan, tally.left, tally.max_tokens)
    if planned is not None:
        prompts = plural(tally.left, "prompt takes", "prompts take")
        say(f"{prompts} {about(planned)} by the plan, beside loading")
    progress = RunProgress(console(stderr=True), tally.left, plan=undivided(run.plan))
    _write_all(run, job, progress, fail, seen, recorder)
    first = run.rows.first_error
    if fail and first is not None:
        recorder.end("stopped", f"at row {first.custom_id!r:.80}: {first.error}", run)
        say(f"stopped at row {first.custom_id!r:.80}: {first.error}")
        return EXIT_FAILED
    with TaskProgress("joining the output"):
        job.finish()
    if run.summary is not None:
        console(stderr=True).print(
            summary_table(run.summary.plan or undivided(run.plan), run.summary)
        )
    errors = job.errors
    failed = plural(errors, "row has errors", "rows have errors")
    if first is not None:
        say(f"{failed}, the first {first.custom_id!r:.80}: {first.error}")
    elif errors:
        say(f"{failed}; --retry_errors runs them again")
    return EXIT_ERROR_ROWS if errors else EXIT_DONE


def check_cluster(plan: Plan | Fleet, path: str) -> None:
    cluster = ClusterSpec.from_yaml(path)
    if isinstance(plan, Plan):
        fits = cluster.has_fingerprint(plan.spec.cluster_fingerprint)
    else:  # whose plans are each for a part of it
        kinds = {device.name: device.accelerator.name for device in cluster.devices}
        fits = all(
            kinds.get(name) == stage.accelerator
            for stage in shown_plan(plan.spec).stages
            for name in stage.device_names
        )
    if not fits:
        raise PlanMismatchError(
            f"the plan is for cluster {plan.spec.cluster!r}, which differs from {path}; "
            "plan again with llmpq plan --cluster"
        )


def _write_all(
    run: Run,
    job: OpenJob,
    progress: RunProgress,
    fail: bool,
    seen: Sequence[int],
    recorder: RunRecorder,
) -> None:
    run.on_state.append(progress.show)
    run.on_loading.append(progress.show_loading)
    run.on_plan.append(progress.change_plan)
    run.on_event.append(lambda event: progress.note(event.text))
    with progress, closing(run.results(job.todo(), job.tally)) as results:
        for result in chain(results, job.copies()):
            if fail and result.error is not None:
                return
            job.write(result)
            progress.count(result)
            recorder.count(result)
            if seen:
                raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())

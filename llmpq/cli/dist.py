"""`llmpq-dist`: run a plan over files of prompts on Ray; run again, it goes on."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from actors.messages import TRANSPORTS, Sampling
from actors.recovery import Recovery
from llmpq.cli.common import (
    EXIT_DONE,
    EXIT_ERROR_ROWS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Parser,
    console,
    run_command,
)
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import Job, JobOptions, Tally, finished_tally
from llmpq.jobs.output import SHARD_ROWS, SHARD_S, OutputOptions
from llmpq.jobs.signals import stop_signals
from llmpq.jobs.sinks import Output, open_output
from llmpq.plan import Plan
from llmpq.progress import RunProgress
from llmpq.ray_jobs import keep_folder_to_driver
from llmpq.rows import merge_sampling
from llmpq.run import Run, RunOptions, RunSize, job_identity
from llmpq.sampling_defaults import GENERATION_CONFIGS
from llmpq.submit import known_job, split_options, submit, submit_parser
from llmpq.tables import plan_table, summary_table
from planner.cluster import ClusterSpec
from planner.option_rules import Rule
from planner.run_trace import check_trace_path
from quant.cache.settings import cache_settings
from quant.errors import HeadLostError, InputError, PlanMismatchError, SpecError, StageLostError

_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))
_RULES = (
    Rule(
        ("retry_errors",),
        "--overwrite runs every row again; give one of them",
        beside="overwrite",
    ),
    Rule(
        ("cache_dir", "cache_limit_gib"),
        "nothing is kept then; give one of them",
        beside="no_cache",
    ),
    Rule(
        ("address",),
        "the job joins the cluster that it runs on; leave it out",
        beside="submit",
        honoured=("auto",),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    keep_folder_to_driver(os.environ)
    arguments = sys.argv[1:] if arguments is None else arguments
    where, command = split_options(arguments)
    if where.follow or where.stop:
        return run_command("llmpq-dist", lambda: known_job(where))
    options = _parser().parse(arguments, _RULES)
    if where.address is not None:
        return run_command("llmpq-dist", lambda: submit(where, command, _check(options).data))
    return run_command("llmpq-dist", lambda: _run(options))


def _check(options: argparse.Namespace) -> Plan:
    """The plan; raises for options that could not be used wherever they were run."""
    _sampling(options)
    _output_options(options)
    plan = Plan.load(options.strat_file_name)
    if "cluster" in options:
        _check_cluster(plan, options.cluster)
    return plan


def _run(options: argparse.Namespace) -> int:
    plan = _check(options)
    source = JobInput.find(options.input)
    inputs = (*source.files, Path(options.strat_file_name))
    run_options = _run_options(options)
    if run_options.trace is not None:
        check_trace_path(run_options.trace, (*inputs, Path(options.output)))
    output = open_output(options.output, _output_options(options), inputs)
    with stop_signals() as seen:
        try:
            with output:
                return _do(options, plan, run_options, source, output, seen)
        except KeyboardInterrupt:
            console(stderr=True).print(
                f"llmpq-dist: interrupted; what was finished is kept{output.kept()}",
                soft_wrap=True,
            )
            return EXIT_TERMINATED if signal.SIGTERM in seen else EXIT_INTERRUPTED
        except (StageLostError, HeadLostError) as error:
            _say(_failed(str(error), output))
            return EXIT_FAILED


def _failed(why: str, output: Output) -> str:
    return f"llmpq-dist: failed: {why}; {output.told()}"


def _end_at_once(output: Output, why: str) -> None:
    """Leave although a call to Ray does not come back."""
    with suppress(InputError):
        output.commit()
    _say(_failed(why, output))
    os._exit(EXIT_FAILED)


def _run_options(options: argparse.Namespace) -> RunOptions:
    return RunOptions(
        model=getattr(options, "model", None),
        sampling=_sampling(options),
        generation_config=options.generation_config,
        address=getattr(options, "address", None),
        cache=cache_settings(
            getattr(options, "cache_dir", None),
            getattr(options, "cache_limit_gib", None),
            options.no_cache,
        ),
        transport=options.transport,
        trace=Path(options.trace) if "trace" in options else None,
        job=Path(options.output).stem,
        recovery=Recovery(
            retries=options.retries,
            hang_s=options.hang_s,
            replace_s=options.replace_s,
            on_device_loss=options.on_device_loss,
        ),
        plan_source=str(options.strat_file_name),
    )


def _do(
    options: argparse.Namespace,
    plan: Plan,
    run_options: RunOptions,
    source: JobInput,
    output: Output,
    seen: Sequence[int],
) -> int:
    """Do what is left of a job; the exit code. Torch and Ray are loaded where that is something."""
    job_options = JobOptions(options.retry_errors, options.on_error == "fail")
    identity = job_identity(plan.data, run_options)
    tally = finished_tally(source, output, identity, job_options)
    if tally is not None:
        _show_plan(options, plan)
        return _end_done(tally)
    job = Job(source, output, identity, job_options)
    _show_plan(options, plan)
    if job.tally.left:
        run = Run(plan.data, run_options)
        run.give_up = partial(_end_at_once, output)
        return _run_job(run, job, job_options.stop_at_error, seen)
    code = _end_done(job.tally)
    job.finish()
    return code


def _show_plan(options: argparse.Namespace, plan: Plan) -> None:
    if options.show_plan:
        console(stderr=True).print(plan_table(plan.data))


def _end_done(tally: Tally) -> int:
    """Say that nothing is left to do; the exit code."""
    _say(f"all {tally.rows} rows are done")
    if tally.resumed_errors:
        _say(f"{tally.resumed_errors} rows have errors; --retry-errors runs them again")
    return EXIT_ERROR_ROWS if tally.resumed_errors else EXIT_DONE


def _run_job(run: Run, job: Job, fail: bool, seen: Sequence[int]) -> int:
    """Generate what is left of `job`; the exit code."""
    tally = job.tally
    if run.sampling.note:
        _say(run.sampling.note)
    if tally.resumed:
        _say(f"{tally.resumed} of {tally.rows} rows are done, {tally.left} are left")
    progress = RunProgress(console(stderr=True), tally.left, plan=run.plan)
    _write_all(run, job, progress, fail, seen)
    if fail and run.first_error is not None:
        _say(f"stopped at row {run.first_error.custom_id!r}: {run.first_error.error}")
        return EXIT_FAILED
    job.finish()
    if run.summary is not None:
        console(stderr=True).print(summary_table(run.plan, run.summary))
    errors = run.errors + tally.resumed_errors
    if run.first_error is not None:
        first = run.first_error
        _say(f"{errors} rows have errors, the first {first.custom_id!r}: {first.error}")
    elif errors:
        _say(f"{errors} rows have errors; --retry-errors runs them again")
    return EXIT_ERROR_ROWS if errors else EXIT_DONE


def _say(line: str) -> None:
    console(stderr=True).print(line, soft_wrap=True)


def _output_options(options: argparse.Namespace) -> OutputOptions:
    rows, seconds = options.shard_rows, options.shard_seconds
    if rows < 1 or not 0 < seconds < float("inf"):
        raise SpecError(
            f"--shard-rows is {rows}, --shard-seconds {seconds:g}; give 1 or more rows and more "
            "than 0 seconds"
        )
    return OutputOptions(options.overwrite, options.resume, rows, seconds)


def _check_cluster(plan: Plan, path: str) -> None:
    if ClusterSpec.from_yaml(path).fingerprint() != plan.data.cluster_fingerprint:
        raise PlanMismatchError(
            f"the plan is for cluster {plan.data.cluster!r}, which differs from {path}; "
            "plan again with llmpq-algo --cluster"
        )


def _write_all(run: Run, job: Job, progress: RunProgress, fail: bool, seen: Sequence[int]) -> None:
    run.show.append(progress.show)
    run.follow.append(progress.follow)
    run.tell.append(lambda event: progress.note(event.text))
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


def _sampling(options: argparse.Namespace) -> Mapping[str, Any]:
    """The fields that are given; raises `SpecError` for values out of range."""
    given = {name: getattr(options, name) for name in _SAMPLING if name in options}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    merge_sampling(Sampling(), given)
    return given


def _bias(pairs: Sequence[str]) -> Mapping[str, float]:
    """Bias by token id, of words such as `50256=-100`."""
    bias = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[token] = float(value)
        except ValueError:
            raise SpecError(
                f"--logit_bias has {pair!r:.80}; give ID=BIAS, such as 50256=-100"
            ) from None
    return bias


def _parser() -> Parser:
    parser = Parser(prog="llmpq-dist", description=__doc__, parents=[submit_parser()])
    add = parser.option
    add("--strat_file_name", "--plan", required=True, metavar="FILE", help="plan of llmpq-algo")
    add(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="prompts: JSONL or Parquet files, folders, globs",
    )
    add("--output", required=True, help="results: .jsonl, .parquet or a folder/")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on; there must be something to")
    how.add_argument("--overwrite", action="store_true", help="start anew, replace the output")
    parser.add_argument(
        "--retry-errors", "--retry_errors", action="store_true", help="run error rows again"
    )
    parser.add_argument(
        "--on-error",
        "--on_error",
        choices=("continue", "fail"),
        default="continue",
        help="what the first row that fails does to the others",
    )
    add("--shard_rows", type=int, default=SHARD_ROWS, help="results are kept in so many at once")
    add("--shard_seconds", type=float, default=SHARD_S, help="and at the latest after so long")
    add("--model", help="folder or hub id of the weights, where not the plan's own")
    add("--cluster", help="cluster YAML that the plan must have been made for")
    add("--address", help="Ray cluster to join, auto for the one on this machine (a local one)")
    add("--cache_dir", metavar="DIR", help="packed layers for the next start (the user's cache)")
    add("--cache_limit_gib", type=float, help="of that folder (100, at most half the free space)")
    parser.add_argument(
        "--no-cache", "--no_cache", action="store_true", help="quantize anew, keep nothing"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="between stages: gloo, Ray's objects, or gloo where it connects (auto)",
    )
    _add_recovery(parser)
    add("--trace", metavar="FILE", help="write every micro-batch's times for Perfetto, as JSON")
    parser.add_argument(
        "--show-plan", "--show_plan", action="store_true", help="print the plan first"
    )
    _add_sampling(parser)
    return parser


def _add_sampling(parser: Parser) -> None:
    add = parser.option
    add(
        "--generation_config",
        choices=GENERATION_CONFIGS,
        default="model",
        help="sampling that is not set: of the model's generation_config.json, or none (greedy)",
    )
    add("--temperature", type=float, help="0 is greedy (0)")
    add("--top_k", type=int, help="keep the most probable tokens, 0 is off (0)")
    add("--top_p", type=float, help="keep the tokens that make up this probability (1)")
    add("--min_p", type=float, help="keep tokens with this share of the most probable's (0)")
    add("--repetition_penalty", type=float, help="of tokens of prompt and answer, 1 is off (1)")
    add("--presence_penalty", type=float, help="of tokens in the answer, -2 to 2 (0)")
    add("--frequency_penalty", type=float, help="for each time in the answer, -2 to 2 (0)")
    add("--logit_bias", nargs="+", metavar="ID=BIAS", help="added to logits, -100 to 100")
    add("--seed", type=int, help="of the random draws (0)")
    add("--max_new_tokens", type=int, help="at most the plan's (the plan's)")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end a generation")
    add("--ignore_eos", action="store_const", const=True, help="generate on after end of sequence")


def _add_recovery(parser: Parser) -> None:
    default = Recovery()
    parser.add_argument(
        "--on-device-loss",
        "--on_device_loss",
        choices=("replan", "wait", "fail"),
        default=default.on_device_loss,
        help="when a device is gone: plan for what is left, wait for it, or end",
    )
    add = parser.option
    add("--retries", type=int, default=default.retries, help="faults of a row until it is suspect")
    add("--hang_s", type=float, default=default.hang_s, help="without progress, then a restart")
    add("--replace_s", type=float, default=default.replace_s, help="a lost device is waited for")


if __name__ == "__main__":
    raise SystemExit(main())

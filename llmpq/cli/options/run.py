"""The options of `llmpq run`: those of its own, and those of every run under their names."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from llmpq.cli.options.prompting import add_prompting
from llmpq.cli.options.stages import add_cache, add_computing
from llmpq.cli.parser import OptionGroup, Parser
from llmpq.jobs.shard_writer import SHARD_ROWS, SHARD_S, OutputOptions
from llmpq.jobs.store import OUTPUT_FORMS
from llmpq.rows.sampling import GENERATION_CONFIGS
from llmpq.run.options import CACHE_RULE, PREDICTOR_RULE, REPLANS, SAMPLING_OPTIONS, RunOptions
from planner.option_rules import Rule
from planner.scheduling import CPU_PREFILL_CHUNK_TOKENS, POLICY_NAMES, PREFILL_CHUNK_TOKENS
from quant.common.errors import SpecError

_RUN_OPTIONS = (*(field.name for field in dataclasses.fields(RunOptions)), *SAMPLING_OPTIONS)
RUN_RULES = (
    Rule(
        ("retry_errors",), "--overwrite runs every row again; give one of them", beside="overwrite"
    ),
    Rule(
        ("extend",),
        "--overwrite keeps nothing that could be extended; give one of them",
        beside="overwrite",
    ),
    Rule(
        ("address",),
        "the job joins the cluster that it runs on; leave it out",
        beside="submit",
        honoured=("auto",),
    ),
    CACHE_RULE,
    PREDICTOR_RULE,
)


SUBMIT_RULES = (
    Rule(
        ("no_wait", "follow_job", "stop_job"),
        "it is only for jobs of a Ray cluster; give the cluster's address",
        without=("submit",),
    ),
    Rule(
        ("follow_job",),
        "only one job is followed or stopped at a time; give one of them",
        beside="stop_job",
    ),
    *(
        Rule(
            ("no_wait",), "no job is started that could be waited for; leave it out", beside=beside
        )
        for beside in ("follow_job", "stop_job")
    ),
)

PROG = "llmpq-dist"

_DESCRIPTION = """
Generate for every row of the input on the stages of a plan. After any stop the same command goes
on: what is done is skipped, and every id comes out once.
"""
_EXAMPLES = (
    "%(prog)s --plan plan.json --input prompts.jsonl --output results.jsonl",
    "%(prog)s --plan plan.json --input 'day-*.jsonl.zst' --output answers/ \\\n"
    "      --temperature 0.7 --max_new_tokens 200 --address auto",
    "%(prog)s --submit http://HEAD:8265 --plan plan.json --input prompts.jsonl \\\n"
    "      --output /shared/results.jsonl",
)


def run_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, RUN_RULES)
    _add_files(parser.group("plan and files"))
    _add_progress(parser.group("what is done already"))
    _add_sampling(parser.group("sampling", "for rows that do not say"))
    add_prompting(parser.group("prompts", "for rows that do not say"))
    _add_stages(parser.group("cluster and weights"))
    _add_submitting(parser.group("as a job of a Ray cluster"))
    _add_watching(parser.group("watching the run"))
    _add_schedule(parser.group("schedule"))
    _add_recovery(parser.group("recovery"))
    return parser


def _add_files(group: OptionGroup) -> None:
    add = group.option
    add(
        "--plan",
        "--strat_file_name",
        dest="strat_file_name",
        required=True,
        metavar="FILE",
        help="plan of llmpq plan, or fleet of llmpq plan --replicas",
    )
    add(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="prompts: JSON or CSV (also .gz, .zst) or Parquet files, folders, globs",
    )
    add(
        "--output",
        required=True,
        metavar="PATH",
        help="results: .jsonl, .csv (also .gz, .zst), .parquet or a folder/",
    )
    add("--show_plan", action="store_true", help="print the plan first")


def _add_progress(group: OptionGroup) -> None:
    """Add what is done about earlier runs, about errors, and when results are committed."""
    add = group.option
    how = group.one_of()
    how.option(
        "--resume", action="store_true", help="go on; refused where there is nothing to go on with"
    )
    how.option("--overwrite", action="store_true", help="start anew, replace the output")
    add("--extend", action="store_true", help="also take rows that the job did not have")
    add("--retry_errors", action="store_true", help="run error rows again")
    add(
        "--on_error",
        choices=("continue", "fail"),
        default="continue",
        help="whether the other rows run on after one has failed",
    )
    add(
        "--output_format",
        choices=OUTPUT_FORMS,
        help="lines of results: rows, or answers of OpenAI's batches (default: openai where the "
        "first row is a Batch line and the output no table)",
    )
    add(
        "--shard_rows",
        type=int,
        metavar="COUNT",
        default=SHARD_ROWS,
        help="results that are committed together",
    )
    add(
        "--shard_seconds",
        type=float,
        metavar="SECONDS",
        default=SHARD_S,
        help="time after which results are committed at the latest",
    )


def _add_stages(group: OptionGroup) -> None:
    add = group.option
    add(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to join, auto for the one on this machine (default: a local one)",
    )
    add(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id of the weights (default: the plan's own)",
    )
    add("--cluster", metavar="FILE", help="cluster YAML that the plan must have been made for")
    add(
        "--importance",
        metavar="FILE",
        help="file of llmpq indicator that weights are rounded by (default: the plan's)",
    )
    add_cache(group)
    add_computing(group)


def _add_watching(group: OptionGroup) -> None:
    default, add = RunOptions(), group.option
    add("--trace", metavar="FILE", help="write every micro-batch's times for Perfetto, as JSON")
    add(
        "--drift",
        type=float,
        metavar="SHARE",
        default=default.drift,
        help="by which tokens/s and lengths may differ from the plan before the run says so",
    )
    add(
        "--replan",
        choices=REPLANS,
        help="when they differ by more: plan again and switch if that saves time, or only say so "
        "(default: never, but another schedule is looked for where the plan has one)",
    )


def _add_schedule(group: OptionGroup) -> None:
    add = group.option
    add(
        "--policy",
        choices=POLICY_NAMES,
        help="scheduling: in the plan's micro-batches (static), at every iteration anew first "
        "come, first served (orca) or by expected lengths (s3), or by the plan's schedule for a "
        "bound on latency (exegpt) (default: the plan's)",
    )
    add(
        "--predictor",
        metavar="FOLDER",
        help="what s3 expects of lengths: a folder of llmpq lengths, longest, or trace:FILE with "
        "predictions by custom_id (default: longest)",
    )
    add(
        "--save_predictor",
        metavar="FOLDER",
        help="write what the predictor has learnt from this job (default: nothing)",
    )
    add(
        "--max_batch_size",
        type=int,
        metavar="COUNT",
        help="most requests in a micro-batch of orca or s3 (default: the plan's, or its decode "
        "micro-batch)",
    )
    add(
        "--prefill_chunk_tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of a prompt that a micro-batch of orca or s3 takes at most, 0 is all "
        f"(default: the plan's, or {PREFILL_CHUNK_TOKENS}, on CPUs {CPU_PREFILL_CHUNK_TOKENS})",
    )


def _add_sampling(group: OptionGroup) -> None:
    add = group.option
    add(
        "--generation_config",
        choices=GENERATION_CONFIGS,
        default="model",
        help="where unset options come from: the model's generation_config.json, or none: greedy",
    )
    add(
        "--max_new_tokens",
        type=int,
        metavar="TOKENS",
        help="to generate, at most the plan's (default: the plan's)",
    )
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    add("--top_k", type=int, metavar="K", help="keep the K most probable, 0 is off (default: 0)")
    add(
        "--top_p",
        type=float,
        metavar="P",
        help="keep the tokens that make up this probability (default: 1)",
    )
    add(
        "--min_p",
        type=float,
        metavar="P",
        help="keep tokens with this share of the most probable's (default: 0)",
    )
    add(
        "--repetition_penalty",
        type=float,
        metavar="X",
        help="penalty on tokens of prompt and answer, 1 is off (default: 1)",
    )
    add(
        "--presence_penalty",
        type=float,
        metavar="X",
        help="penalty on tokens that are in the answer, -2 to 2 (default: 0)",
    )
    add(
        "--frequency_penalty",
        type=float,
        metavar="X",
        help="penalty on each use of a token in the answer, -2 to 2 (default: 0)",
    )
    add(
        "--logit_bias",
        nargs="+",
        metavar="ID=BIAS",
        help="added to the logits of token ID, -100 to 100",
    )
    add("--seed", type=int, metavar="SEED", help="of the random draws (default: 0)")
    _add_ends(group)


def _add_ends(group: OptionGroup) -> None:
    add = group.option
    add("--stop", nargs="+", metavar="TEXT", help="strings that end a generation")
    add("--stop_token_ids", nargs="+", type=int, metavar="ID", help="tokens that end it")
    add(
        "--min_tokens",
        type=int,
        metavar="TOKENS",
        help="to generate before anything ends it (default: 0)",
    )
    add(
        "--ignore_eos",
        action="store_const",
        const=True,
        help="do not stop at the end-of-sequence token",
    )


def _add_recovery(group: OptionGroup) -> None:
    default, add = RunOptions(), group.option
    add(
        "--on_device_loss",
        choices=("replan", "wait", "fail"),
        default=default.on_device_loss,
        help="when a device is gone: plan for what is left, wait for it, or end",
    )
    add(
        "--retries",
        type=int,
        metavar="COUNT",
        default=default.retries,
        help="faults that make a row a suspect",
    )
    add(
        "--hang_s",
        type=float,
        metavar="SECONDS",
        default=default.hang_s,
        help="without progress before a stage is started again",
    )
    add(
        "--replace_s",
        type=float,
        metavar="SECONDS",
        default=default.replace_s,
        help="to wait for a lost device",
    )
    add(
        "--row_s",
        type=float,
        metavar="SECONDS",
        default=default.row_s,
        help="that chat template and tokenizer may take for one row",
    )


def submit_parser(prog: str) -> Parser:
    """The parser of these options alone, which leaves the others to `llmpq run`."""
    parser = Parser(prog, rules=SUBMIT_RULES, add_help=False)
    _add_submitting(parser.group("as a job of a Ray cluster"))
    return parser


def _add_submitting(group: OptionGroup) -> None:
    """Add the options that say where to run."""
    add = group.option
    add(
        "--submit",
        metavar="URL",
        help="run as a job of this cluster: http://HEAD:8265; --address is not needed",
    )
    add("--no_wait", action="store_true", help="print the job's id and do not wait for its end")
    add("--follow_job", metavar="ID", help="show a job's log")
    add("--stop_job", metavar="ID", help="stop a job after it has committed what is finished")


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the options of the run; raises `SpecError` for values out of range."""
    given = {name: getattr(options, name) for name in _RUN_OPTIONS if name in options}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return RunOptions.of(given)


def output_options(options: argparse.Namespace) -> OutputOptions:
    """Return how results are written; raises `SpecError` for impossible sizes of shards."""
    rows, seconds = options.shard_rows, options.shard_seconds
    if rows < 1 or seconds <= 0:
        raise SpecError(
            f"--shard_rows is {rows}, --shard_seconds {seconds:g}; give 1 or more rows and more "
            "than 0 seconds"
        )
    given = options.output_format if "output_format" in options else None
    return OutputOptions(options.overwrite, options.resume, rows, seconds, given)


def _bias(pairs: Sequence[str]) -> Mapping[str, float]:
    """Read the bias by token id from words such as `50256=-100`."""
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

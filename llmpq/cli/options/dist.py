"""The options of `llmpq-dist`: those of its own, and those of every run under their names."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from actors.messages import TRANSPORTS
from llmpq.cli.common import Parser
from llmpq.cli.submit import submit_parser
from llmpq.jobs.output.options import SHARD_ROWS, SHARD_S, OutputOptions
from llmpq.rows.sampling_defaults import GENERATION_CONFIGS
from llmpq.run.options import CACHE_RULE, PREDICTOR_RULE, REPLANS, SAMPLING_OPTIONS, RunOptions
from planner.option_rules import Rule
from planner.scheduling import CPU_PREFILL_CHUNK_TOKENS, POLICY_NAMES, PREFILL_CHUNK_TOKENS
from quant.common.errors import SpecError

_RUN_OPTIONS = (*(field.name for field in dataclasses.fields(RunOptions)), *SAMPLING_OPTIONS)
DIST_RULES = (
    Rule(
        ("retry_errors",),
        "--overwrite runs every row again; give one of them",
        beside="overwrite",
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


def dist_parser(description: str | None) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog="llmpq-dist", description=description, parents=[submit_parser()])
    add = parser.option
    add("--strat_file_name", "--plan", required=True, metavar="FILE", help="plan of llmpq-algo")
    _add_files(parser)
    _add_stages(parser)
    _add_recovery(parser)
    _add_drift(parser)
    add("--trace", metavar="FILE", help="write every micro-batch's times for Perfetto, as JSON")
    parser.add_argument(
        "--show-plan", "--show_plan", action="store_true", help="print the plan first"
    )
    _add_sampling(parser)
    return parser


def _add_files(parser: Parser) -> None:
    add = parser.option
    add(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="prompts: JSONL or CSV (also .gz, .zst) or Parquet files, folders, globs",
    )
    add(
        "--output",
        required=True,
        help="results: .jsonl, .csv (also .gz, .zst), .parquet or a folder/",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume", action="store_true", help="go on; refused where there is nothing to go on with"
    )
    how.add_argument("--overwrite", action="store_true", help="start anew, replace the output")
    parser.add_argument(
        "--extend", action="store_true", help="also take rows that the job did not have"
    )
    parser.add_argument(
        "--retry-errors", "--retry_errors", action="store_true", help="run error rows again"
    )
    parser.add_argument(
        "--on-error",
        "--on_error",
        choices=("continue", "fail"),
        default="continue",
        help="whether the other rows run on after one has failed",
    )
    add("--shard_rows", type=int, default=SHARD_ROWS, help="results that are committed together")
    add(
        "--shard_seconds",
        type=float,
        default=SHARD_S,
        help="seconds after which results are committed at the latest",
    )


def _add_stages(parser: Parser) -> None:
    add = parser.option
    add("--model", help="folder, GGUF file or hub id of the weights (the plan's own)")
    add("--cluster", help="cluster YAML that the plan must have been made for")
    add("--address", help="Ray cluster to join, auto for the one on this machine (a local one)")
    add(
        "--cache_dir",
        metavar="DIR",
        help="folder of packed layers for the next start (the user's cache)",
    )
    add(
        "--cache_limit_gib",
        type=float,
        help="most GiB in that folder (100, at most half the free space)",
    )
    parser.add_argument(
        "--no-cache", "--no_cache", action="store_true", help="quantize anew, keep nothing"
    )
    add(
        "--importance",
        metavar="FILE",
        help="file of llmpq-indicator that weights are rounded by (the plan's)",
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="links between stages: gloo, Ray's objects, or gloo where it connects (auto)",
    )
    add(
        "--policy",
        choices=POLICY_NAMES,
        help="scheduling: the plan's micro-batches, first come, first served at every iteration, "
        "or by expected lengths (the plan's)",
    )
    add(
        "--predictor",
        metavar="FOLDER",
        help="what s3 expects of lengths: a folder of llmpq-lengths, longest, or trace:FILE with "
        "predictions by custom_id (longest)",
    )
    add(
        "--save_predictor",
        metavar="FOLDER",
        help="write what the predictor has learnt from this job (nothing)",
    )
    add(
        "--max_batch_size",
        type=int,
        help="most requests in a micro-batch of orca or s3 (the plan's, or its decode micro-batch)",
    )
    add(
        "--prefill_chunk_tokens",
        type=int,
        help="tokens of a prompt that a micro-batch of orca or s3 takes at most, 0 is all (the "
        f"plan's, or {PREFILL_CHUNK_TOKENS}, on CPUs {CPU_PREFILL_CHUNK_TOKENS})",
    )


def _add_sampling(parser: Parser) -> None:
    add = parser.option
    add(
        "--generation_config",
        choices=GENERATION_CONFIGS,
        default="model",
        help="where unset sampling options come from: generation_config.json, or none (greedy)",
    )
    add("--temperature", type=float, help="0 is greedy (0)")
    add("--top_k", type=int, help="keep the most probable tokens, 0 is off (0)")
    add("--top_p", type=float, help="keep the tokens that make up this probability (1)")
    add("--min_p", type=float, help="keep tokens with this share of the most probable's (0)")
    add(
        "--repetition_penalty",
        type=float,
        help="penalty on tokens of prompt and answer, 1 is off (1)",
    )
    add(
        "--presence_penalty",
        type=float,
        help="penalty on tokens that are in the answer, -2 to 2 (0)",
    )
    add(
        "--frequency_penalty",
        type=float,
        help="penalty on each use of a token in the answer, -2 to 2 (0)",
    )
    add(
        "--logit_bias",
        nargs="+",
        metavar="ID=BIAS",
        help="added to the logits of token ID, -100 to 100",
    )
    add("--seed", type=int, help="seed of the random draws (0)")
    add("--max_new_tokens", type=int, help="tokens to generate, at most the plan's (the plan's)")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end a generation")
    add(
        "--ignore_eos",
        action="store_const",
        const=True,
        help="do not stop at the end-of-sequence token",
    )


def _add_recovery(parser: Parser) -> None:
    default = RunOptions()
    parser.add_argument(
        "--on-device-loss",
        "--on_device_loss",
        choices=("replan", "wait", "fail"),
        default=default.on_device_loss,
        help="when a device is gone: plan for what is left, wait for it, or end",
    )
    add = parser.option
    add("--retries", type=int, default=default.retries, help="faults that make a row a suspect")
    add(
        "--hang_s",
        type=float,
        default=default.hang_s,
        help="seconds without progress before a restart",
    )
    add(
        "--replace_s",
        type=float,
        default=default.replace_s,
        help="seconds to wait for a lost device",
    )
    add(
        "--row_s",
        type=float,
        default=default.row_s,
        help="seconds that chat template and tokenizer may take for one row",
    )


def _add_drift(parser: Parser) -> None:
    default = RunOptions()
    parser.option(
        "--drift",
        type=float,
        default=default.drift,
        help="share by which tokens/s and lengths may differ from the plan before the run says so",
    )
    parser.add_argument(
        "--replan",
        choices=REPLANS,
        default=default.replan,
        help="when they differ by more: plan again and switch if that saves time, or only say so",
    )


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the options of the run; raises `SpecError` for values out of range."""
    given = {name: getattr(options, name) for name in _RUN_OPTIONS if name in options}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return RunOptions.of(given)


def output_options(options: argparse.Namespace) -> OutputOptions:
    """Return how results are written; raises `SpecError` for impossible sizes of shards."""
    rows, seconds = options.shard_rows, options.shard_seconds
    if rows < 1 or not 0 < seconds < float("inf"):
        raise SpecError(
            f"--shard-rows is {rows}, --shard-seconds {seconds:g}; give 1 or more rows and more "
            "than 0 seconds"
        )
    return OutputOptions(options.overwrite, options.resume, rows, seconds)


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

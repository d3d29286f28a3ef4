"""The options of `llmpq run` and `llmpq serve`, beside those of every run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.sampling_options import Sampling
from llmpq.cli.parser import Parser, made, taken
from llmpq.jobs.result_lines import OutputOptions
from llmpq.run.options import CACHE_RULE, FORM_RULE, PREDICTOR_RULE, RunOptions
from llmpq.serve.options import BatchOptions, ServeOptions
from llmpq.tokenizing.prompting import PROMPTING_OPTIONS
from planner.option_rules import REQUIRED, Rule, flag, option
from planner.scheduling import KV_TOKEN_POLICIES, PolicyName
from quant.common.errors import SpecError

RUN, SERVE = "llmpq-dist", "llmpq-serve"

NO_BATCHES = "none"
"""Value of `--batch_dir` for a server without files and batches."""

_RUN_DESCRIPTION = """
Generate for every row of the input on the stages of a plan. After any stop the same command goes
on: what is done is skipped, and every id comes out once.
"""
_RUN_EXAMPLES = (
    "%(prog)s --plan plan.json --input prompts.jsonl --output results.jsonl",
    "%(prog)s --plan plan.json --input 'day-*.jsonl.zst' --output answers/ \\\n"
    "      --temperature 0.7 --max_new_tokens 200 --address auto",
    "%(prog)s --submit http://HEAD:8265 --plan plan.json --input prompts.jsonl \\\n"
    "      --output /shared/results.jsonl",
)


_PROMPTING = " ".join(PROMPTING_OPTIONS)
_STAGES = "cache_dir cache_limit_gib no_cache deterministic no_cuda_graphs transport"
_SUBMITTING = {"as a job of a Ray cluster": "submit no_wait follow_job stop_job"}
_RUN_GROUPS = {
    "plan and files": "plan input output show_plan",
    "what is done already": "resume|overwrite extend retry_errors dedupe on_error output_format "
    "shard_rows shard_s",
    "sampling: for rows that do not say": "generation_config max_new_tokens temperature top_k "
    "top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed stop "
    "stop_token_ids min_tokens ignore_eos json_schema structured_outputs",
    "prompts: for rows that do not say": _PROMPTING,
    "cluster and weights": f"address model adapter adapters cluster importance {_STAGES}",
    **_SUBMITTING,
    "watching the run": "trace trace_to drift replan",
    "schedule": "policy predictor save_predictor max_batch_size prefill_chunk_tokens "
    "no_shared_heads",
    "recovery": "on_device_loss retries hang_s replace_s row_s",
}
_PATHS = "plan input output model adapter cluster importance chat_template json_schema trace "
_PATHS += "cache_dir address"

_RUN_RULES = (
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
    FORM_RULE,
)


_SUBMIT_RULES = (
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

_SERVE_DESCRIPTION = (
    "Answer OpenAI's HTTP requests from the stages of a plan: pip install 'llmpq[serve]'."
)
_SERVE_EXAMPLES = (
    "%(prog)s --plan plan.json",
    "%(prog)s --plan plan.json --host 0.0.0.0 --api_key_file key.txt \\\n"
    "      --replicas auto --address auto",
)
_SERVE_GROUPS = {
    "plan and clients": "plan host port api_key_file served_model_name",
    "load": "replicas queue_limit drain_s",
    "watching the server": "trace_to",
    "prompts and answers: of requests that do not say": f"{_PROMPTING} json_schema",
    "files and batches": "batch_dir file_limit_mib batch_dir_limit_gib",
    "cluster and weights": f"address model adapter adapters importance {_STAGES}",
    "schedule": "policy predictor save_predictor max_batch_size prefill_chunk_tokens "
    "no_shared_heads",
}


@dataclass(frozen=True)
class StoredPlan:
    plan: str = option(
        "FILE",
        "plan of llmpq plan, or fleet of llmpq plan --replicas",
        REQUIRED,
        names=("--plan", "--strat_file_name"),
    )


@dataclass(frozen=True)
class SubmitOptions:
    """Where to run: as a job of the cluster at `submit` (None: here), or what to do with a job."""

    submit: str | None = option(
        "URL", "run as a job of this cluster: http://HEAD:8265; --address is not needed"
    )
    no_wait: bool = flag("print the job's id and do not wait for its end")
    follow_job: str | None = option("ID", "show a job's log")
    stop_job: str | None = option("ID", "stop a job after it has committed what is finished")


@dataclass(frozen=True)
class RunCommand(StoredPlan):
    """What a run reads and writes; `command` is that which was given, under the name `prog`."""

    input: list[str] = option(
        "PATH",
        "prompts: JSON or CSV (also .gz, .zst) or Parquet files, folders, globs, URLs",
        REQUIRED,
        more={"action": "extend"},
    )
    output: str = option(
        "PATH",
        "results: .jsonl, .csv (also .gz, .zst), .parquet or a folder/, also by URL",
        REQUIRED,
    )
    show_plan: bool = flag("print the plan first")
    extend: bool = flag("also take rows that the job did not have")
    retry_errors: bool = flag("run error rows again")
    dedupe: bool = flag("compute greedy rows that are the same once, and write each")
    on_error: str = option(
        ("continue", "fail"), "whether the other rows run on after one has failed", "continue"
    )
    cluster: str | None = option("FILE", "cluster YAML that the plan must have been made for")
    prog: str = RUN
    command: str = ""
    names_format: bool = False


@dataclass(frozen=True)
class ServeCommand(StoredPlan):
    """What is served, to whom and from how many copies, by a command of the name `prog`."""

    api_key_file: str | None = option(
        "FILE",
        "file with the key that clients must send (default: LLMPQ_API_KEY of the environment)",
    )
    served_model_name: list[str] | None = option(
        "NAME", "names by which clients call the model (default: the plan's)"
    )
    replicas: str = option(
        "N",
        "copies of the plan to serve from, auto for as many as have free devices; a fleet has its "
        "own",
        "1",
    )
    batch_dir: str | None = option(
        "DIR", "folder of /v1/files and /v1/batches, none to serve without (default: PLAN.batches)"
    )
    policy: PolicyName | None = option(
        sorted(KV_TOKEN_POLICIES),
        "first come, first served, by expected lengths, or by the plan's schedule for a bound on "
        "latency (default: the plan's, or orca)",
    )
    prog: str = SERVE


def run_parser(prog: str | None = RUN) -> Parser:
    parser = Parser(prog, _RUN_DESCRIPTION, _RUN_EXAMPLES, _RUN_RULES)
    parser.declare(_RUN_GROUPS, RunCommand, OutputOptions, SubmitOptions, RunOptions, Sampling)
    return parser


def submit_parser(prog: str) -> Parser:
    """The parser of the options that say where to run, which leaves the others to `llmpq run`."""
    parser = Parser(prog, rules=_SUBMIT_RULES, add_help=False)
    parser.declare(_SUBMITTING, SubmitOptions)
    return parser


def path_parser(prog: str) -> Parser:
    """The parser of options with paths, of here or of the cluster, and of its address."""
    parser = Parser(prog, add_help=False)
    parser.declare({"paths": _PATHS}, RunCommand, RunOptions)
    return parser


def serve_parser(prog: str | None = SERVE) -> Parser:
    parser = Parser(prog, _SERVE_DESCRIPTION, _SERVE_EXAMPLES, (CACHE_RULE, PREDICTOR_RULE))
    parser.declare(_SERVE_GROUPS, ServeCommand, ServeOptions, BatchOptions, RunOptions)
    return parser


def run_options(options: argparse.Namespace) -> RunOptions:
    given = taken(RunOptions, options) | taken(Sampling, options)
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return RunOptions.of(given)


def output_options(options: argparse.Namespace) -> OutputOptions:
    """How results are written; raises `SpecError` for impossible sizes of shards."""
    written = made(OutputOptions, options)
    rows, seconds = written.shard_rows, written.shard_s
    if rows < 1 or (seconds is not None and seconds <= 0):
        raise SpecError(
            f"--shard_rows is {rows}, --shard_seconds {seconds:g}; give 1 or more rows and more "
            "than 0 seconds"
        )
    return written


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

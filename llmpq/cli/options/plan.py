"""The options of `llmpq plan`."""

from __future__ import annotations

import dataclasses

from llmpq.cli.options.plan_rules import PLAN_COMMAND_RULES
from llmpq.cli.options.prompting import add_prompting
from llmpq.cli.parser import OptionGroup, Parser, number_or_inf
from llmpq.workload.defaults import DEFAULT_WORKLOAD, LONG_ROWS, SEPARATE
from planner.optimiser.names import BATCH_OBJECTIVES, METHOD_NAMES, SOLVER_NAMES
from planner.options import (
    AUTO,
    HEADS,
    JOB_GAP,
    KV_CHOICES,
    PROFILE_USES,
    QUALITIES,
    QUANTILE,
    SCHEDULES,
    PlanOptions,
)
from planner.scheduling import POLICY_NAMES, PREFILL_CHUNK_TOKENS
from quant.scheme import BITWIDTHS, DTYPE_BYTES, PLAN_ROUNDINGS

PLANNING = tuple(field.name for field in dataclasses.fields(PlanOptions))

PROG = "llmpq-algo"

_DESCRIPTION = """
Decide how many prompts are in flight, the bits and the device of every layer, the order of the
devices, and the micro-batch sizes. Needs no GPU and no weights.
"""
_EXAMPLES = (
    "%(prog)s --model opt-30b --cluster cluster.yaml --prompts 3000 -o plan.json",
    "%(prog)s --model /models/opt-30b --cluster cluster.yaml \\\n"
    "      --input prompts.jsonl --report plan.html -o plan.json",
    "%(prog)s --model opt-30b --device_names T4 V100-32GB --device_numbers 3 1 \\\n"
    "      --global_bz 32 --s 512 --n 100",
    "%(prog)s --model opt-13b --cluster cluster.yaml --lengths lengths.csv \\\n"
    "      --max_request_latency_s 20 --quantile 0.99 -o plan.json",
)


def plan_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, PLAN_COMMAND_RULES)
    parser.usage = "%(prog)s --model MODEL [--cluster FILE] [--input PATH ...] [-o FILE] [options]"
    _add_model(parser.group("what to plan"))
    prompts = parser.group("prompts")
    _add_workload(prompts)
    add_prompting(prompts)
    _add_cluster(parser.group("cluster"))
    _add_goals(parser.group("speed against quality"))
    _add_bound(parser.group("latency of each request"))
    _add_output(parser.group("output"))
    _add_bits(parser.group("bits and types"))
    _add_times(parser.group("measured times"))
    _add_schedule(parser.group("schedule"))
    _add_search(parser.group("search"))
    return parser


def _add_model(group: OptionGroup) -> None:
    add = group.option
    add(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file, config.json, built-in name (opt-30b) or hub id",
    )
    add("--model_name", metavar="NAME", help="family, as in the paper: opt, bloom")
    add("--model_size", metavar="SIZE", help="size, as in the paper: 30b")


def _add_workload(group: OptionGroup) -> None:
    default, add = DEFAULT_WORKLOAD, group.option
    add(
        "--input",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="plan the job of these prompts: JSON or CSV (also .gz, .zst) or Parquet files, "
        "folders, globs; with --global_bz they only give lengths",
    )
    add("--prompts", type=int, metavar="COUNT", help="plan a job of so many prompts of --s tokens")
    batch, tokens = default["global_batch"], default["prompt_length"]
    add(
        "--s",
        "--prompt_length",
        dest="prompt_length",
        type=int,
        metavar="TOKENS",
        help=f"tokens of every prompt (default: {tokens}, or those of --input)",
    )
    add(
        "--n",
        "--new_tokens",
        dest="new_tokens",
        type=int,
        metavar="TOKENS",
        help="tokens to generate; of --input for rows without max_new_tokens "
        f"(default: {default['new_tokens']})",
    )
    add(
        "--global_bz",
        "--global_batch",
        dest="global_batch",
        type=int,
        metavar="COUNT",
        help=f"plan one batch of so many prompts, as in the paper (default: {batch})",
    )
    add(
        "--in_flight",
        type=_auto_or_number,
        metavar="COUNT",
        help="prompts of a job that are in flight at once: auto, or a number (default: auto)",
    )
    add(
        "--lengths",
        metavar="FILE",
        help="measured lengths: CSV prompt_tokens,output_tokens, or the output of llmpq run, also "
        "of a job that is not done (this with --input)",
    )
    _add_long_rows(group)


def _add_long_rows(group: OptionGroup) -> None:
    add = group.option
    add(
        "--long_rows",
        choices=LONG_ROWS,
        help="rows that are much longer than the others get a plan of their own, are an error, or "
        f"are left out of the plan (default: {SEPARATE})",
    )
    add(
        "--percentile",
        type=float,
        metavar="PERCENT",
        help="plan for so many per cent of the rows by their tokens, such as 99; longer ones are "
        "handled as --long_rows says, and with --global_bz left out",
    )


def _add_cluster(group: OptionGroup) -> None:
    add = group.option
    add(
        "--cluster",
        metavar="FILE",
        help="cluster YAML; without one the GPUs of this machine or of Ray are used",
    )
    add("--device_names", nargs="+", metavar="NAME", help="device types: T4 V100")
    add("--device_numbers", nargs="+", type=int, metavar="COUNT", help="how many of each: 3 1")
    add("--address", metavar="ADDRESS", help="Ray cluster to detect devices on")
    add("--write_cluster", metavar="FILE", help="write the cluster that was used, as YAML")
    add(
        "--memory_margin",
        type=float,
        metavar="SHARE",
        help="share of each GPU's memory that is left free "
        f"(default: {PlanOptions().memory_margin:g})",
    )
    add(
        "--tensor_parallel",
        type=_auto_or_number,
        metavar="DEGREE",
        help="devices of a node that share every layer of a stage: 1, 2, 4, 8, or auto, which "
        "chooses for each stage (default: 1)",
    )
    add(
        "--replicas",
        type=_auto_or_number,
        metavar="COUNT",
        help="divide the cluster into so many pipelines that share the prompts, or auto, which "
        "finds how many and what of (default: one pipeline)",
    )
    add(
        "--keep_all_devices",
        action="store_const",
        const=True,
        help="do not try to leave out devices that do not help",
    )


def _add_goals(group: OptionGroup) -> None:
    add = group.option
    add(
        "--quality",
        choices=QUALITIES,
        help="high: the least loss of quality at nine tenths of the speed; balanced; fast: the "
        "most tokens per second (default: balanced)",
    )
    add(
        "--theta",
        type=float,
        metavar="SECONDS",
        help="what a unit of sensitivity is worth, in place of --quality",
    )
    add(
        "--max_omega",
        type=float,
        metavar="SUM",
        help="largest allowed sum of sensitivities; theta is found",
    )
    add(
        "--max_ppl_delta",
        type=float,
        metavar="X",
        help="largest allowed increase of perplexity over 16 bit, by the points that llmpq "
        "indicator --perplexity put into the omega file; theta is found",
    )
    add(
        "--max_latency_s",
        type=float,
        metavar="SECONDS",
        help="largest allowed predicted seconds of the whole batch or job, not of a request; theta "
        "is found",
    )


def _add_bound(group: OptionGroup) -> None:
    add, tokens = group.option, ("MEAN", "STD", "MAX")
    add(
        "--max_request_latency_s",
        type=number_or_inf,
        metavar="SECONDS",
        help="largest allowed seconds from when the prefill of a request begins to its last token "
        "(inf: any); the schedule of the most requests per second is found, for lengths of "
        "--lengths, --input, --prompts, or the two below",
    )
    add(
        "--quantile",
        type=float,
        metavar="SHARE",
        help=f"share of the requests that keep the bound (default: {QUANTILE:g})",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="rra: all stages prefill and decode in turns; waa-c, waa-m: some stages prefill and "
        "others decode, divided by computing or by memory (default: auto, the best of them)",
    )
    add(
        "--prompt_lengths",
        type=float,
        nargs=3,
        metavar=tokens,
        help="tokens of prompts: a normal distribution, cut to 1 to MAX",
    )
    add(
        "--output_lengths",
        type=float,
        nargs=3,
        metavar=tokens,
        help="the same of answers, in place of the limits of --input too",
    )


def _add_output(group: OptionGroup) -> None:
    add = group.option
    add("-o", "--output", dest="output", metavar="FILE", help="write the plan as JSON")
    add("--report", metavar="FILE", help="write the plan and its reasons as an HTML page")
    add(
        "--trace",
        metavar="FILE",
        help="the simulated batch, or the first fills of a job's slots: .svg is a Gantt picture, "
        "else JSON for Perfetto",
    )
    add(
        "--pareto",
        nargs="?",
        const="",
        metavar="FILE",
        help="show the front of latency against quality, or with --max_request_latency_s requests "
        "per second over bounds (with --report in the page); FILE also takes it, as .svg or .json",
    )
    add("--compare", action="store_true", help="print the paper's baselines beside the plan")
    add("--json", action="store_true", help="print the plan as JSON")


def _add_bits(group: OptionGroup) -> None:
    add = group.option
    add(
        "--bits",
        nargs="+",
        type=int,
        choices=BITWIDTHS,
        help="bitwidths to choose from (default: all)",
    )
    add(
        "--kv_bits",
        type=_auto_or_number,
        choices=KV_CHOICES,
        help="bits of keys and values; auto: 16 if that fits, else 8 (default: 16)",
    )
    add("--dtype", choices=(AUTO, *DTYPE_BYTES), help="type to compute in (default: auto)")
    add(
        "--rounding",
        choices=PLAN_ROUNDINGS,
        help=f"how weights are rounded (default: {PLAN_ROUNDINGS[0]})",
    )
    add("--omega_file", metavar="FILE", help="JSON of sensitivities, made by llmpq indicator")
    add(
        "--importance",
        metavar="FILE",
        help="what weights are rounded by, made by llmpq indicator (default: that of "
        "--omega_file, else it is measured when the model is loaded)",
    )


def _add_times(group: OptionGroup) -> None:
    add = group.option
    add(
        "--profiles",
        metavar="FILE",
        help="CSV of measured layer times of llmpq profile, with measured links and loading "
        "beside it",
    )
    add(
        "--strict_profiles",
        action="store_const",
        const=True,
        help="refuse to plan where a layer's time does not come from the profiles",
    )
    add = group.one_of().option
    add(
        "--profile_use",
        choices=PROFILE_USES,
        help="fit the latency model on the profiles, or take their times as measured where the "
        "workload was measured (default: fit)",
    )
    for spelled, use in (("--fit", "fit"), ("--use_profiler_prediction", "measured")):
        what = f"--profile_use {use}, as in the paper"
        add(spelled, dest="profile_use", action="store_const", const=use, help=what)


def _add_schedule(group: OptionGroup) -> None:
    add = group.option
    add(
        "--policy",
        choices=POLICY_NAMES,
        help="scheduling to plan for: micro-batches of one phase (static), or at every iteration "
        "anew first come, first served (orca) or by predicted lengths (s3) (default: static); "
        "exegpt is that of --max_request_latency_s",
    )
    add(
        "--predictor",
        metavar="FOLDER",
        help="predictor of output lengths by which requests of s3 reserve memory: a folder of "
        "llmpq lengths train, oracle, or longest: all of what they may get (default: longest)",
    )
    add(
        "--max_batch_size",
        type=int,
        metavar="COUNT",
        help="most requests in a micro-batch of orca or s3 (default: best by simulation)",
    )
    add(
        "--prefill_chunk_tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of a prompt that a micro-batch of orca and s3 takes at most, 0 is all "
        f"(default: {PREFILL_CHUNK_TOKENS})",
    )
    add("--prefill_micro_batch", type=int, metavar="COUNT", help="fix the prefill micro-batch size")
    add("--decode_micro_batch", type=int, metavar="COUNT", help="fix the decode micro-batch size")


def _add_search(group: OptionGroup) -> None:
    """Add how plans are ranked and looked for."""
    default, add = PlanOptions(), group.option
    add(
        "--method",
        choices=METHOD_NAMES,
        help="how to solve; uniform and pipeedge are baselines of the paper (default: auto)",
    )
    add(
        "--shaq_efficient",
        action="store_true",
        help="bitwidth transfer (LLM-PQ Alg. 2): --method transfer, as in the paper",
    )
    add("--solver", choices=SOLVER_NAMES, help="of integer programmes (default: highs)")
    add(
        "--objective",
        choices=BATCH_OBJECTIVES,
        help="what ranks plans; paper is LLM-PQ's eq. 4 (default: pipeline)",
    )
    add("--group", type=int, metavar="LAYERS", help="decide so many layers together (default: 1)")
    add("--head", choices=HEADS, help="stage of the LM head (default: auto)")
    add("--all_orders", action="store_const", const=True, help="try every distinct device order")
    add(
        "--search_time_limit",
        type=float,
        metavar="SECONDS",
        help="for planning, after most of which the best plan so far is taken and its gap stated "
        f"(default: {default.search_time_limit:g})",
    )
    add(
        "--ilp_time_limit",
        type=float,
        metavar="SECONDS",
        help=f"for each integer programme (default: {default.ilp_time_limit:g})",
    )
    add(
        "--relative_gap",
        type=float,
        metavar="SHARE",
        help=f"accepted distance from the optimum (default: {default.relative_gap:g}; of a job at "
        f"least {JOB_GAP:g})",
    )


def _auto_or_number(text: str) -> int | str:
    """A number where `text` is one; `PlanOptions` checks the rest."""
    return int(text) if text.isdigit() else text

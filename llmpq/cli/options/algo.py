"""The options of `llmpq-algo`, and the rules about those that change nothing beside others."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from llmpq.cli.common import Parser
from llmpq.workload.batch import DEFAULT_WORKLOAD
from llmpq.workload.input_job import LONG_ROWS, SEPARATE
from planner.option_rules import Rule
from planner.options import FRONT_RULES, PLAN_RULES, PROFILE_USES, QUALITIES, PlanOptions
from planner.scheduling import POLICY_NAMES, PREFILL_CHUNK_TOKENS
from planner.search.job.in_flight import JOB_GAP
from quant.scheme import BITWIDTHS, PLAN_ROUNDINGS

PLANNING = tuple(field.name for field in dataclasses.fields(PlanOptions))

_WORKLOAD_RULES = (
    Rule(("prompts",), "--input has the prompts; give one of them", beside="input"),
    *(
        Rule(
            (name,),
            f"--global_bz plans one batch as in the paper{why}; give one of them",
            beside="global_batch",
        )
        for name, why in (
            ("prompts", ", whatever comes after it"),
            ("in_flight", " with all its prompts in flight"),
            ("lengths", " of the longest prompt and output"),
            ("predictor", " of the longest prompt and output"),
            ("long_rows", " of the longest prompt and output"),
        )
    ),
    Rule(
        ("in_flight", "lengths", "predictor"),
        "it is about a job of many prompts; give --input FILE or --prompts COUNT",
        without=("input", "prompts"),
    ),
    Rule(
        ("prompt_length",),
        "the file has prompt lengths; give one of them",
        beside="lengths",
        without=("input",),
    ),
    Rule(("long_rows",), "only a file has long rows; give --input FILE", without=("input",)),
)
"""Options of what is planned for that others make useless."""

ALGO_RULES = (
    Rule(("model_size",), "give the size of the family of --model-name", without=("model_name",)),
    Rule(
        ("method",),
        "--shaq-efficient is --method transfer; give one of them",
        beside="shaq_efficient",
        honoured=("transfer",),
    ),
    *(
        Rule(("address",), f"--{name} says which devices there are; give one of them", beside=name)
        for name in ("cluster", "device_names")
    ),
    Rule(
        ("output", "trace", "compare"),
        "the front by itself makes no plan; add --report FILE, or leave it out",
        beside="pareto",
        without=("report",),
    ),
    Rule(("compare",), "the plan's JSON holds the baselines; leave it out", beside="json"),
    *_WORKLOAD_RULES,
    *FRONT_RULES,
    *PLAN_RULES,
)


def algo_parser(description: str | None) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog="llmpq-algo", description=description)
    add = parser.option
    add("--model", help="folder, GGUF file, config.json, built-in name (opt-30b) or hub id")
    add("--model-name", help="family, as in the paper: opt, bloom")
    add("--model_size", help="size, as in the paper: 30b")
    add("--cluster", help="cluster YAML; without one the GPUs of this machine or of Ray are used")
    add("--device_names", nargs="+", metavar="NAME", help="device types: T4 V100")
    add("--device_numbers", nargs="+", type=int, metavar="COUNT", help="how many of each: 3 1")
    add("--address", help="Ray cluster to detect devices on")
    add("--write_cluster", metavar="FILE", help="write the cluster that was used, as YAML")
    _add_workload(add)
    _add_planning(add)
    _add_goals(add)
    _add_profile_use(parser)
    add("-o", "--output", dest="output", metavar="FILE", help="write the plan as JSON")
    parser.add_argument(
        "--shaq-efficient",
        "--shaq_efficient",
        action="store_true",
        help="bitwidth transfer (LLM-PQ Alg. 2) instead of the optimum",
    )
    add("--report", metavar="FILE", help="write the plan and its reasons as an HTML page")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--compare", action="store_true", help="print the paper's baselines beside the plan"
    )
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
        help="show the front of latency against quality (with --report in the page); FILE also "
        "takes it, as .svg or .json",
    )
    return parser


def _add_workload(add: Any) -> None:
    default = DEFAULT_WORKLOAD
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="plan the job of these prompts: JSONL or CSV (also .gz, .zst) or Parquet files, "
        "folders, globs; with --global_bz they only give lengths",
    )
    add("--prompts", type=int, metavar="COUNT", help="plan a job of so many prompts of --s tokens")
    add(
        "--in_flight",
        type=_auto_or_number,
        metavar="COUNT",
        help="prompts of a job that are in flight at once: auto, or a number (auto)",
    )
    add("--long_rows", choices=LONG_ROWS,
        help="rows that are much longer than the others get a plan of their own, or are an error "
        f"({SEPARATE})")  # fmt: skip
    add("--lengths", metavar="FILE",
        help="measured lengths: CSV prompt_tokens,output_tokens, or the output of llmpq-dist, also "
        "of a job that is not done")  # fmt: skip
    batch, tokens = default["global_batch"], default["prompt_length"]
    add("--global_bz", "--global_batch", dest="global_batch", type=int, metavar="COUNT",
        help=f"plan one batch of so many prompts, as in the paper ({batch})")  # fmt: skip
    add("--s", "--prompt_length", dest="prompt_length", type=int, metavar="TOKENS",
        help=f"tokens of every prompt ({tokens}, or those of --input)")  # fmt: skip
    add("--n", "--new_tokens", dest="new_tokens", type=int, metavar="TOKENS",
        help="tokens to generate; of --input for rows without max_new_tokens "
        f"({default['new_tokens']})")  # fmt: skip


def _add_profile_use(parser: Parser) -> None:
    """Add the three spellings, of which one can be given."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--profile-use", "--profile_use", choices=PROFILE_USES, default=argparse.SUPPRESS,
        help="fit the latency model on the profiles (fit), or take their times as measured where "
        "the workload was measured")  # fmt: skip
    add("--fit", dest="profile_use", action="store_const", const="fit",
        default=argparse.SUPPRESS, help="--profile-use fit")  # fmt: skip
    add("--use-profiler-prediction", "--use_profiler_prediction", dest="profile_use",
        action="store_const", const="measured", default=argparse.SUPPRESS,
        help="--profile-use measured")  # fmt: skip


def _auto_or_number(text: str) -> int | str:
    """A number where `text` is one; `PlanOptions` checks the rest."""
    return int(text) if text.isdigit() else text


def _add_planning(add: Any) -> None:
    default = PlanOptions()
    add(
        "--theta",
        type=float,
        help="seconds that a unit of sensitivity is worth, in place of --quality",
    )
    add(
        "--quality",
        choices=QUALITIES,
        help="high: the least loss of quality at nine tenths of the speed; balanced; fast: the "
        "most tokens per second (balanced)",
    )
    add("--bits", nargs="+", type=int, choices=BITWIDTHS, help="bitwidths to choose from (all)")
    add("--omega_file", metavar="FILE", help="JSON of sensitivities, made by llmpq-indicator")
    add("--importance", metavar="FILE",
        help="what weights are rounded by, made by llmpq-indicator (that of --omega_file; else "
        "measured when the model is loaded)")  # fmt: skip
    add("--dtype", help="auto, float32, bfloat16 or float16 (auto)")
    _add_search(add, default)
    add("--profiles", metavar="FILE",
        help="CSV of measured layer times, with measured links and loading beside it")  # fmt: skip
    add(
        "--rounding",
        help=f"how weights are rounded: {', '.join(PLAN_ROUNDINGS)} ({PLAN_ROUNDINGS[0]})",
    )
    add("--kv_bits", type=_auto_or_number, metavar="BITS",
        help="bits of keys and values: 16, 8, or auto: 16 if that fits, else 8 (16)")  # fmt: skip
    add(
        "--memory_margin",
        type=float,
        metavar="SHARE",
        help=f"share of each GPU's memory that is left free ({default.memory_margin:g})",
    )
    add(
        "--strict_profiles",
        action="store_const",
        const=True,
        help="refuse to plan where a layer's time does not come from the profiles",
    )


def _add_search(add: Any, default: PlanOptions) -> None:
    """Add how plans are ranked and looked for."""
    add("--group", type=int, help="decide this many layers together (1)")
    add("--objective", help="pipeline, or paper for LLM-PQ's eq. 4 (pipeline)")
    add("--method", help="how to solve, or uniform or pipeedge: baselines of the paper (auto)")
    add("--solver", help="highs, gurobi or cbc (highs)")
    add(
        "--ilp_time_limit",
        type=float,
        metavar="S",
        help=f"seconds per ILP ({default.ilp_time_limit:g})",
    )
    add(
        "--search_time_limit",
        type=float,
        metavar="S",
        help="seconds for the searches over device orders and micro-batch sizes, after which the "
        f"best plan so far is taken and its gap stated ({default.search_time_limit:g})",
    )
    add(
        "--relative_gap",
        type=float,
        help=f"accepted distance from the optimum ({default.relative_gap:g}; of a job at least "
        f"{JOB_GAP:g})",
    )
    add("--all_orders", action="store_const", const=True, help="try every distinct device order")
    add("--head", help="stage of the LM head: auto, first or last (auto)")
    add(
        "--keep_all_devices",
        action="store_const",
        const=True,
        help="do not try to leave out devices that do not help",
    )
    add("--policy", choices=POLICY_NAMES,
        help="scheduling to plan for: micro-batches of one phase, or at every iteration anew first "
        "come, first served (orca) or by predicted lengths (s3) (static)")  # fmt: skip
    add("--predictor", metavar="FOLDER",
        help="predictor of output lengths by which requests of s3 reserve memory: a folder of "
        "llmpq-lengths train, oracle, or longest: all of what they may get (longest)")  # fmt: skip
    add("--max_batch_size", type=int,
        help="most requests in a micro-batch of orca or s3 (best by simulation)")  # fmt: skip
    add("--prefill_chunk_tokens", type=int,
        help="tokens of a prompt that a micro-batch of orca and s3 takes at most, 0 is all "
        f"({PREFILL_CHUNK_TOKENS})")  # fmt: skip
    add("--prefill_micro_batch", type=int, help="fix the prefill micro-batch size")
    add("--decode_micro_batch", type=int, help="fix the decode micro-batch size")


def _add_goals(add: Any) -> None:
    add("--max_omega", type=float, help="largest allowed sum of sensitivities; theta is found")
    add(
        "--max_ppl_delta",
        type=float,
        metavar="X",
        help="largest allowed increase of perplexity over 16 bit, by the points that "
        "llmpq-indicator --perplexity put into the omega file; theta is found",
    )
    add(
        "--max_latency_s",
        type=float,
        help="largest allowed predicted seconds of the batch or the job; theta is found",
    )

"""`llmpq-algo`: plan a model on a cluster, under the options of LLM-PQ section 5."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.common import EXIT_DONE, Parser, console, print_notes, run_command
from llmpq.cluster import Cluster
from llmpq.model_check import checked_shape
from llmpq.profile.tables import loading_note
from llmpq.report import write_front
from llmpq.tables import comparison_table, front_table, plan_table
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload import DEFAULT_WORKLOAD, workload_of_prompts
from planner.cluster.spec import ClusterSpec
from planner.option_rules import Rule
from planner.options import BOUNDS, FRONT_RULES, PLAN_RULES, PROFILE_USES, PlanOptions
from planner.search.front import FrontPoint, front_json
from planner.workload import Workload
from quant.common.errors import InputError, SpecError
from quant.scheme import BITWIDTHS, ROUNDINGS

_PLANNING = tuple(field.name for field in dataclasses.fields(PlanOptions))
_RULES = (
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
    *FRONT_RULES,
    *PLAN_RULES,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse(arguments, _RULES)
    return run_command("llmpq-algo", lambda: _plan(options))


def _plan(options: argparse.Namespace) -> int:
    model = _model(options)
    checked_shape(model)  # before devices are looked for and prompts are tokenized
    cluster = _cluster(options)
    if "write_cluster" in options:
        _write(Path(options.write_cluster), cluster.to_yaml())
    given = {name: getattr(options, name) for name in _PLANNING if name in options}
    workload = _workload(options, model)
    if options.shaq_efficient:
        given.setdefault("method", "transfer")
    points: Sequence[FrontPoint] = ()
    if "pareto" in options:
        free = {name: value for name, value in given.items() if name not in ("theta", *BOUNDS)}
        with tokenizer_checked(model):
            points = cluster.pareto(model, workload, **free)
        if options.pareto:
            write_front(options.pareto, points)
        if "report" not in options:
            return _show_front(options, points)
    with tokenizer_checked(model):
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


def _show_front(options: argparse.Namespace, points: Sequence[FrontPoint]) -> int:
    """Print the front as a table or as JSON."""
    if options.json:
        sys.stdout.write(front_json(points))
    else:
        console().print(front_table(points))
    return EXIT_DONE


def _model(options: argparse.Namespace) -> str:
    if ("model" in options) == ("model_name" in options):
        raise SpecError("name the model once: --model, or --model-name with --model_size")
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


def _workload(options: argparse.Namespace, model: str) -> Workload:
    given = {
        name: getattr(options, name)
        for name in ("global_batch", "prompt_length", "new_tokens")
        if name in options
    }
    if "input" in options:
        return workload_of_prompts(Path(options.input), model, given)
    return Workload(**{**DEFAULT_WORKLOAD, **given})


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _parser() -> Parser:
    parser = Parser(prog="llmpq-algo", description=__doc__)
    add = parser.option
    add("--model", help="folder, config.json, built-in name (opt-30b) or hub id")
    add("--model-name", help="family, as in the paper: opt, bloom")
    add("--model_size", help="size, as in the paper: 30b")
    add("--cluster", help="cluster YAML; without one the GPUs of this machine or of Ray are used")
    add("--device_names", nargs="+", metavar="NAME", help="device types: T4 V100")
    add("--device_numbers", nargs="+", type=int, metavar="COUNT", help="how many of each: 3 1")
    add("--address", help="Ray cluster to detect devices on")
    add("--write_cluster", metavar="FILE", help="write the cluster that was used, as YAML")
    add("--input", help="prompts.jsonl to take the workload from")
    add("--global_bz", "--global_batch", dest="global_batch", type=int, metavar="COUNT",
        help="prompts in one batch (32)")  # fmt: skip
    add("--s", "--prompt_length", dest="prompt_length", type=int, metavar="TOKENS",
        help="prompt tokens (512)")  # fmt: skip
    add("--n", "--new_tokens", dest="new_tokens", type=int, metavar="TOKENS",
        help="tokens to generate (100)")  # fmt: skip
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
        help="the simulated batch: .svg is a Gantt picture, else JSON for Perfetto",
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


def _kv_bits(text: str) -> int | str:
    """A number where `text` is one; `PlanOptions` checks the rest."""
    return int(text) if text.isdigit() else text


def _add_planning(add: Any) -> None:
    default = PlanOptions()
    add(
        "--theta",
        type=float,
        help=f"seconds that a unit of sensitivity is worth ({default.theta:g})",
    )
    add("--bits", nargs="+", type=int, choices=BITWIDTHS, help="bitwidths to choose from (all)")
    add("--omega_file", metavar="FILE", help="JSON of sensitivities, made by llmpq-indicator")
    add("--group", type=int, help="decide this many layers together (1)")
    add("--dtype", help="auto, float32, bfloat16 or float16 (auto)")
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
        help="seconds for the search over device orders and micro-batch sizes, after which the "
        f"best plan so far is taken and its gap stated ({default.search_time_limit:g})",
    )
    add(
        "--relative_gap",
        type=float,
        help=f"accepted distance from the optimum ({default.relative_gap:g})",
    )
    add("--all_orders", action="store_const", const=True, help="try every distinct device order")
    add("--profiles", metavar="FILE",
        help="CSV of measured layer times, with measured links and loading beside it")  # fmt: skip
    add("--rounding", help=f"how weights are rounded: {', '.join(ROUNDINGS)} (nearest)")
    add("--kv_bits", type=_kv_bits, metavar="BITS",
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
    add("--head", help="stage of the LM head: auto, first or last (auto)")
    add(
        "--keep_all_devices",
        action="store_const",
        const=True,
        help="do not try to leave out devices that do not help",
    )
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
        help="largest allowed predicted seconds a batch; theta is found",
    )


if __name__ == "__main__":
    raise SystemExit(main())

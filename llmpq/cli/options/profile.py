"""The options of `llmpq profile`."""

from __future__ import annotations

from llmpq.cli.parser import OptionGroup, Parser
from planner.option_rules import Rule
from planner.options import AUTO
from planner.profiles.design import DesignSpace
from quant.scheme import BITWIDTHS, DTYPE_BYTES

_RULES = (
    Rule(("threads",), "the file says how many threads a CPU has; leave it out", beside="cluster"),
    Rule(
        ("threads",),
        "the cluster's devices are measured as they are; leave it out, or state threads in a "
        "--cluster file",
        beside="address",
    ),
)


PROG = "llmpq-profile"

_DESCRIPTION = """
Measure the times of a model's layers, of loading and of links, here or on a cluster, for llmpq plan
--profiles. The same command goes on with what is not measured yet.
"""
_EXAMPLES = (
    "%(prog)s --model /models/opt-30b -o times.csv",
    "%(prog)s --model opt-30b --cluster us.yaml --address auto -o times.csv",
)


def profile_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, _RULES)
    _add_subject(parser.group("model and devices"))
    _add_output(parser.group("output"))
    _add_points(parser.group("what is measured"))
    _add_effort(parser.group("effort"))
    return parser


def _add_subject(group: OptionGroup) -> None:
    add = group.option
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder, GGUF file, config.json, built-in name (opt-30b) or hub id",
    )
    add("--cluster", metavar="FILE", help="cluster YAML: one Ray task for each kind of device")
    add(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to measure on (default: this machine is measured)",
    )
    add(
        "--threads",
        type=int,
        metavar="COUNT",
        help="threads of a CPU (default: all that this process may use)",
    )


def _add_output(group: OptionGroup) -> None:
    group.option(
        "-o",
        "--output",
        dest="output",
        required=True,
        metavar="FILE",
        help="CSV of layer times to write, with one of loading and one of links beside it; what "
        "the files have already is not measured again",
    )


def _add_points(group: OptionGroup) -> None:
    add, space = group.option, DesignSpace()
    add("--bits", nargs="+", type=int, choices=BITWIDTHS, default=BITWIDTHS, help="bitwidths")
    add("--dtype", choices=(AUTO, *DTYPE_BYTES), default=AUTO, help="type to compute in")
    add(
        "--batch_sizes",
        nargs="+",
        type=int,
        metavar="COUNT",
        help=f"requests of a micro-batch (default: {' '.join(map(str, space.batch_sizes))})",
    )
    add(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help=f"longest prompt and context (default: {space.max_length})",
    )
    add(
        "--prefill_tokens",
        type=int,
        metavar="COUNT",
        help=f"most tokens of a prefill micro-batch (default: {space.prefill_tokens})",
    )
    add(
        "--decode_tokens",
        type=int,
        metavar="COUNT",
        help=f"most tokens a decode micro-batch attends to (default: {space.decode_tokens})",
    )
    add(
        "--layers_only",
        action="store_true",
        help="measure neither loading nor hops between stages, nor sums of groups",
    )


def _add_effort(group: OptionGroup) -> None:
    add = group.option
    add(
        "--points",
        type=int,
        metavar="COUNT",
        default=16,
        help="workloads for each bitwidth and phase",
    )
    add(
        "--rounds",
        type=int,
        metavar="COUNT",
        default=100,
        help="most passes of each workload; long ones, and those whose times agree, take fewer",
    )
    add("--budget_s", type=float, metavar="SECONDS", default=600.0, help="to spend on each device")
    add(
        "--seed",
        type=int,
        metavar="SEED",
        default=0,
        help="of the order, the weights and the inputs",
    )

"""The options of `llmpq eval`."""

from __future__ import annotations

from llmpq.cli.parser import OptionGroup, Parser
from llmpq.quality.options import AUTO, DEVICES, DTYPES, SEQUENCE_LENGTH
from planner.option_rules import Rule
from quant.scheme import ROUNDINGS

_RULES = (Rule(("rounding",), "a plan has its own rounding; leave it out", without=("bits",)),)


PROG = "llmpq-eval"

_DESCRIPTION = "Measure the perplexity of plans or bitwidths on a text, and their KL from 16 bit."
_EXAMPLES = (
    "%(prog)s --plan plan.json --text held_out.txt",
    "%(prog)s --model /models/opt-1.3b --bits 16 8 4 --text held_out.txt",
)


def evaluate_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, _RULES)
    parser.usage = "%(prog)s --plan FILE [FILE ...] --text FILE [FILE ...] [options]"
    _add_subjects(parser.group("what to evaluate"))
    _add_text(parser.group("text"))
    parser.group("output").option("--json", metavar="FILE", help="write the figures as JSON")
    _add_rounding(parser.group("rounding"))
    _add_computing(parser.group("computing"))
    return parser


def _add_subjects(group: OptionGroup) -> None:
    add = group.option
    add(
        "--plan",
        "--strat_file_name",
        dest="strat_file_name",
        nargs="+",
        default=[],
        metavar="FILE",
        help="plans of llmpq plan, all of one model",
    )
    add(
        "--bits",
        nargs="+",
        default=[],
        metavar="BITS",
        help="bitwidths, by this machine's kernels: 16 8 4, or one for each layer 3,4,4,8",
    )
    add(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id of the weights (default: the plan's own)",
    )


def _add_text(group: OptionGroup) -> None:
    add = group.option
    add(
        "--text",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="plain text, or .jsonl with prompt or text (a string or token ids); - for stdin",
    )
    add(
        "--sequence_length",
        type=int,
        metavar="TOKENS",
        help=f"length of a window (default: {SEQUENCE_LENGTH}, or all positions of a model with "
        "fewer)",
    )
    add(
        "--max_tokens",
        type=int,
        metavar="COUNT",
        help="most tokens of the text to use (default: all)",
    )


def _add_rounding(group: OptionGroup) -> None:
    add = group.option
    add(
        "--rounding",
        default=ROUNDINGS[0],
        choices=ROUNDINGS,
        help="how weights are rounded for --bits; a plan has its own",
    )
    add(
        "--importance",
        metavar="FILE",
        help="file of llmpq indicator that weights are rounded by (default: the plan's, else it "
        "is measured)",
    )
    add("--cache_dir", metavar="DIR", help="folder where stages keep what they measure")


def _add_computing(group: OptionGroup) -> None:
    add = group.option
    add("--device", choices=DEVICES, default=AUTO, help="where to compute")
    add("--dtype", choices=DTYPES, default=AUTO, help="type to compute in; auto: each stage's own")

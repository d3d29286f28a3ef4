"""The options of `llmpq indicator`."""

from __future__ import annotations

from llmpq.cli.options.calibration import CALIBRATION_RULES, add_calibration
from llmpq.cli.parser import OptionGroup, Parser
from llmpq.quality.options import (
    AUTO,
    DEVICES,
    DTYPES,
    ERROR,
    METHODS,
    SEQUENCE_LENGTH,
    IndicatorOptions,
)
from planner.option_rules import Rule
from quant.importance.header import SUFFIX
from quant.scheme import BITWIDTHS, ROUNDINGS
from quant.sensitivity.variance_form import ROUNDINGS as FORM_ROUNDINGS
from quant.sensitivity.variance_form import SCALES, SCHEMES

_RULES = (
    *CALIBRATION_RULES,
    Rule(
        ("scheme", "scales"),
        "it is an option of the variance indicator; leave it out, or use --method variance",
        beside="method",
        values=(ERROR, "hessian", "random"),
    ),
    Rule(
        ("rounding",),
        "it is an option of the methods variance and error; leave it out, or use one of them",
        beside="method",
        values=("hessian", "random"),
    ),
    Rule(
        ("calibration", "input", "importance", "sequences"),
        "it looks at no text; leave it out",
        beside="method",
        values=("random",),
    ),
    Rule(
        ("sequence_length", "device", "dtype"),
        "it computes nothing; leave it out, or give a --perplexity text",
        beside="method",
        values=("random",),
        without=("perplexity",),
    ),
    Rule(("max_tokens",), "it limits the held-out text; leave it out", without=("perplexity",)),
)


PROG = "llmpq-indicator"

_DESCRIPTION = """
Measure how much each layer of a model loses at each bitwidth (LLM-PQ section 4.2), for llmpq plan
--omega_file.
"""
_EXAMPLES = (
    "%(prog)s --model /models/opt-30b --calibration text.txt -o omega.json",
    "%(prog)s --model /models/opt-30b --input prompts.jsonl \\\n"
    "      --perplexity held_out.txt -o omega.json",
)


def indicator_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser, default = Parser(prog, _DESCRIPTION, _EXAMPLES, _RULES), IndicatorOptions()
    parser.usage = "%(prog)s --model MODEL --calibration FILE [FILE ...] -o FILE [options]"
    _add_texts(parser.group("model and texts"), default)
    _add_output(parser.group("output"))
    _add_method(parser.group("method"), default)
    _add_computing(parser.group("computing"))
    return parser


def _add_texts(group: OptionGroup, default: IndicatorOptions) -> None:
    add = group.option
    add(
        "--model", required=True, metavar="MODEL", help="folder, GGUF file or hub id of the weights"
    )
    add_calibration(group)
    add(
        "--perplexity",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="held-out text to measure perplexities on too, for llmpq plan --max_ppl_delta",
    )
    add(
        "--sequences",
        type=int,
        metavar="COUNT",
        default=default.sequences,
        help="sequences to calibrate on",
    )
    add(
        "--sequence_length",
        type=int,
        metavar="TOKENS",
        help=f"length of each (default: {SEQUENCE_LENGTH}, or the model's positions where these "
        "are fewer)",
    )
    add(
        "--max_tokens",
        type=int,
        metavar="COUNT",
        help="most tokens of the held-out text to use (default: all)",
    )


def _add_output(group: OptionGroup) -> None:
    add = group.option
    add("-o", "--output", dest="output", required=True, metavar="FILE", help="omega JSON to write")
    add(
        "--importance",
        metavar="FILE",
        help=f"where to write what weights are rounded by (default: OUTPUT's name with {SUFFIX})",
    )


def _add_method(group: OptionGroup, default: IndicatorOptions) -> None:
    add = group.option
    add(
        "--method",
        choices=METHODS,
        default=default.method,
        help="error: of the weights really stored, in nats; variance: LLM-PQ's Proposition 2; "
        "hessian, random: to compare with",
    )
    add("--bits", nargs="+", type=int, choices=BITWIDTHS, default=default.bits, help="bitwidths")
    add(
        "--rounding",
        choices=tuple(dict.fromkeys((*ROUNDINGS, *FORM_ROUNDINGS))),
        help=f"as in the plan for the method error (default: {default.rounding}), nearest or "
        f"stochastic of Theorem 1 for variance (default there: {default.form.rounding})",
    )
    add(
        "--scheme",
        choices=SCHEMES,
        default=default.form.scheme,
        help="how the scales S_W of variance are formed",
    )
    add(
        "--scales",
        choices=SCALES,
        default=default.form.scales,
        help="one S_W a tensor as in Proposition 2, or one for each group of the quantizer",
    )
    add(
        "--seed",
        type=int,
        metavar="SEED",
        default=default.seed,
        help="of the draw of sequences, and of the method random",
    )


def _add_computing(group: OptionGroup) -> None:
    add = group.option
    add("--device", choices=DEVICES, default=AUTO, help="where to compute")
    add("--dtype", choices=DTYPES, default=AUTO, help="type to compute in")

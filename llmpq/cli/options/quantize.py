"""The options of `llmpq quantize`."""

from __future__ import annotations

import argparse

from llmpq.cli.options.calibration import CALIBRATION_RULES, add_calibration
from llmpq.cli.parser import OptionGroup, Parser
from llmpq.quality.options import AUTO, DEVICES, DTYPES
from quant.gptq.format import DAMPING
from quant.scheme import BITWIDTHS

SEQUENCES = 128
SEQUENCE_LENGTH = 2048
"""Frantar et al. (section 4) calibrate on 128 sequences of 2,048 tokens."""


PROG = "llmpq-quantize"

_DESCRIPTION = "Make a checkpoint with the bits of a plan, calibrated with GPTQ."
_EXAMPLES = (
    "%(prog)s --plan plan.json --calibration text.txt -o /models/opt-30b-gptq",
    "%(prog)s --model opt-30b --bits 4 --calibration text.txt -o opt-30b-4bit",
)


def quantize_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, CALIBRATION_RULES)
    parser.usage = "%(prog)s --plan FILE --calibration FILE [FILE ...] -o FOLDER [options]"
    _add_bits(parser.group("model and bits"))
    _add_calibration(parser.group("calibration"))
    _add_output(parser.group("output"))
    _add_rounding(parser.group("rounding"))
    _add_computing(parser.group("computing"))
    return parser


def _add_bits(group: OptionGroup) -> None:
    add = group.option
    add(
        "--plan",
        "--strat_file_name",
        dest="strat_file_name",
        metavar="FILE",
        help="plan of llmpq plan, whose bits to use",
    )
    add(
        "--bits",
        nargs="+",
        type=int,
        choices=BITWIDTHS,
        help="without a plan: one number for all layers, or one for each",
    )
    add(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id of the weights (default: the plan's own)",
    )


def _add_calibration(group: OptionGroup) -> None:
    add = group.option
    add_calibration(group)
    add(
        "--sequences",
        type=int,
        metavar="COUNT",
        default=SEQUENCES,
        help="sequences of the text to calibrate on",
    )
    add(
        "--sequence_length",
        type=int,
        metavar="TOKENS",
        help=f"length of each (default: {SEQUENCE_LENGTH}, or the model's positions where these "
        "are fewer)",
    )
    add("--seed", type=int, metavar="SEED", default=0, help="of the choice of sequences")


def _add_output(group: OptionGroup) -> None:
    add = group.option
    add("-o", "--output", dest="output", required=True, metavar="FOLDER", help="folder to make")
    add("--overwrite", action="store_true", help="replace an existing output")


def _add_rounding(group: OptionGroup) -> None:
    add = group.option
    add(
        "--symmetric",
        action="store_true",
        help="put the zero point in the middle, as Marlin kernels require",
    )
    add(
        "--no_act_order",
        dest="act_order",
        action="store_false",
        default=argparse.SUPPRESS,
        help="round columns in their order instead of those with the largest inputs first",
    )
    add(
        "--damping",
        type=float,
        metavar="SHARE",
        default=DAMPING,
        help="of the mean diagonal of X^T X",
    )


def _add_computing(group: OptionGroup) -> None:
    add = group.option
    add("--device", choices=DEVICES, default=AUTO, help="where to compute")
    add(
        "--dtype",
        choices=DTYPES,
        default=AUTO,
        help="type to compute in; auto: float32, or on a GPU its 16-bit type",
    )

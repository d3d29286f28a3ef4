"""`llmpq quantize`: a checkpoint with the bits of a plan, calibrated with GPTQ."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, Parser, command_line, console, run_command
from llmpq.cli.parser import OptionGroup
from llmpq.cli.progress import TaskProgress
from llmpq.model_check import checked_shape
from llmpq.quality.job_prompts import calibration_documents
from llmpq.quality.options import AUTO, DEVICES, DTYPES, check_compute, check_draw, check_lengths
from llmpq.quality.text_windows import token_windows
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.tables import size_text
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import ModelShape, model_shape
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_folder import check_target
from quant.checkpoint.model_reference import resolve
from quant.common.errors import InputError, SpecError
from quant.gptq.options import DAMPING, GptqOptions
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


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = quantize_parser(prog).parse(arguments)
    return run_command(prog, lambda: _quantize(options))


def _quantize(options: argparse.Namespace) -> int:
    if not options.calibration and not options.input:
        raise InputError(
            "give a text to calibrate on: --calibration FILE (plain text, or .jsonl with prompt or "
            "text), of the kind that the model shall work on, or --input with the prompts of a job"
        )
    settings = GptqOptions(options.symmetric, getattr(options, "act_order", True), options.damping)
    length = getattr(options, "sequence_length", None)
    check_compute(options.device, options.dtype)
    check_lengths(length)
    check_draw(options.sequences, options.seed)
    folder, bitwidths = _model_and_bits(options)
    target = Path(options.output)
    check_target(folder, target, options.overwrite)
    documents = calibration_documents(options.calibration, options.input, folder)

    import torch  # slow to load: what is refused without it is refused by now

    from actors.stage.layer_stream import compute_on
    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.quantize import Quantization, quantize_checkpoint
    from llmpq.quality.sensitivity.indicator import Calibration
    from llmpq.quality.subjects import compute_dtype, device_of
    from quant.checkpoint.reader import Checkpoint

    Checkpoint(folder).check_files()
    if length is None:
        length = min(SEQUENCE_LENGTH, model_shape(str(folder)).max_positions)
    windows = token_windows(documents, load_tokenizer(folder), length)
    calibration = Calibration.sample(windows, options.sequences, options.seed)
    device = device_of(options.device)
    compute = compute_on(device, compute_dtype(options.dtype, device))
    began = time.perf_counter()
    with TaskProgress("calibrating") as progress:
        effort = Effort(model_shape(str(folder)), operations_per_s(compute))
        progress.say_expected(effort.gptq_s(calibration.token_ids.size, bitwidths))
        progress.report(0, len(bitwidths))
        token_ids = torch.from_numpy(calibration.token_ids)
        wanted = Quantization(bitwidths, token_ids, compute, settings)
        made = quantize_checkpoint(folder, target, wanted, options.overwrite, progress.report)
    seconds = time.perf_counter() - began
    tokens = calibration.token_ids.size
    again = command_line("llmpq", "plan", "--model", made.target)
    console().print(
        f"wrote {size_text(made.tensor_bytes)} to {made.target}: {len(bitwidths)} layers of "
        f"{sum(bitwidths) / len(bitwidths):.2f} bits on average, calibrated on {tokens} tokens in "
        f"{seconds:.0f} s; plan it: {again} --cluster cluster.yaml",
        highlight=False,
        soft_wrap=True,
    )
    return EXIT_DONE


def _model_and_bits(options: argparse.Namespace) -> tuple[Path, tuple[int, ...]]:
    """The model's folder and one bitwidth for each layer, from the plan or from `--bits`."""
    if ("strat_file_name" in options) == ("bits" in options):
        raise SpecError("say once which bits: --plan FILE, or --bits")
    model = getattr(options, "model", None)
    if "strat_file_name" in options:
        plan = PlanSpec.load(options.strat_file_name)
        folder = resolve(checkpoint_reference(plan, model))
        _refuse_quantized(shape_for_plan(plan, folder), folder)
        return folder, tuple(bits for stage in plan.stages for bits in stage.bitwidths)
    if model is None:
        raise SpecError("name the model: --model FOLDER")
    folder = resolve(model)
    shape = checked_shape(folder)
    _refuse_quantized(shape, folder)
    layers = shape.layers
    given = tuple(options.bits)
    if len(given) not in (1, layers):
        raise SpecError(
            f"{len(given)} bitwidths where the model has {layers} layers; give one number for all, "
            "or one for each layer"
        )
    return folder, given * layers if len(given) == 1 else given


def _refuse_quantized(shape: ModelShape, folder: Path) -> None:
    if shape.stored is not None:
        raise SpecError(f"{folder} is quantized already; give the original 16-bit checkpoint")


def quantize_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
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
        help="folder or hub id of the weights (default: the plan's own)",
    )


def _add_calibration(group: OptionGroup) -> None:
    add = group.option
    add(
        "--calibration",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="plain text, or .jsonl with prompt or text (a string or token ids); folders, globs; "
        "- for stdin",
    )
    add(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="prompts of the job, as for llmpq run: calibrated on as the model will see them",
    )
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


if __name__ == "__main__":
    raise SystemExit(main())

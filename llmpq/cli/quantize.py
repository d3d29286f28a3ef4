"""`llmpq-quantize`: a checkpoint with the bits of a plan, calibrated with GPTQ."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, Parser, console, run_command
from llmpq.cli.layer_progress import layer_progress
from llmpq.model_check import checked_shape
from llmpq.quality.job_prompts import calibration_documents
from llmpq.quality.options import AUTO, check_compute, check_draw, check_lengths
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

SEQUENCES = 128
SEQUENCE_LENGTH = 2048
"""Frantar et al. (section 4) calibrate on 128 sequences of 2,048 tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    return run_command("llmpq-quantize", lambda: _quantize(options))


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
    with layer_progress("layers") as report:
        token_ids = torch.from_numpy(calibration.token_ids)
        wanted = Quantization(bitwidths, token_ids, compute, settings)
        made = quantize_checkpoint(folder, target, wanted, options.overwrite, report)
    seconds = time.perf_counter() - began
    tokens = calibration.token_ids.size
    console().print(
        f"Wrote {size_text(made.tensor_bytes)} to {made.target}: {len(bitwidths)} layers of "
        f"{sum(bitwidths) / len(bitwidths):.2f} bits on average, calibrated on {tokens} tokens in "
        f"{seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return EXIT_DONE


def _model_and_bits(options: argparse.Namespace) -> tuple[Path, tuple[int, ...]]:
    """The model's folder and one bitwidth for each layer, from the plan or from `--bits`."""
    if ("strat_file_name" in options) == ("bits" in options):
        raise SpecError("say once which bits: --strat_file_name PLAN, or --bits")
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


def _parser() -> Parser:
    parser = Parser(prog="llmpq-quantize", description=__doc__)
    add = parser.option
    add("--strat_file_name", "--plan", metavar="FILE", help="plan of llmpq-algo, whose bits to use")
    add("--bits", nargs="+", type=int, choices=(3, 4, 8, 16), metavar="BITS",
        help="without a plan: 3, 4, 8 or 16 for all layers, or one for each")  # fmt: skip
    add("--model", help="folder or hub id of the weights (the plan's own)")
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
    add("-o", "--output", dest="output", required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    add(
        "--sequences",
        type=int,
        default=SEQUENCES,
        help="how many sequences of the text to calibrate on",
    )
    add(
        "--sequence_length",
        type=int,
        metavar="TOKENS",
        help=f"length of each ({SEQUENCE_LENGTH}, or the model's positions where these are fewer)",
    )
    add("--seed", type=int, default=0, help="seed of the choice of sequences")
    parser.add_argument(
        "--symmetric",
        action="store_true",
        help="put the zero point in the middle, as Marlin kernels require",
    )
    parser.add_argument(
        "--no-act-order",
        "--no_act_order",
        dest="act_order",
        action="store_false",
        default=argparse.SUPPRESS,
        help="round columns in their order instead of those with the largest inputs first",
    )
    add("--damping", type=float, default=DAMPING, help="share of the mean diagonal of X^T X")
    add("--device", default=AUTO, help="auto, cpu or cuda")
    add(
        "--dtype",
        default=AUTO,
        help="auto (float32, or on a GPU its 16-bit type), float32, bfloat16 or float16",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

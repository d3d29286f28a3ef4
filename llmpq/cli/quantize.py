"""`llmpq-quantize`: a checkpoint with the bits of a plan, calibrated with GPTQ."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, Parser, console, run_command
from llmpq.cli.progress import TaskProgress, finding
from llmpq.cli.verbose import add_verbose
from llmpq.quality.options import AUTO
from llmpq.quality.text_windows import read_documents
from llmpq.tables import size_text
from quant.common.errors import InputError, SpecError

SEQUENCES = 128
SEQUENCE_LENGTH = 2048
"""Frantar et al. (section 4) calibrate on 128 sequences of 2,048 tokens."""

DAMPING = 0.01
"""The share of Frantar et al., section 3.3. `quant.gptq.rounding.DAMPING` is equal, but needs
torch.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    return run_command("llmpq-quantize", lambda: _quantize(options))


def _quantize(options: argparse.Namespace) -> int:
    import torch

    from actors.stage.layer_stream import compute_on
    from llmpq.cli.effort import Effort, operations_per_s
    from llmpq.quality.quantize import Quantization, check_target, quantize_checkpoint
    from llmpq.quality.sensitivity.indicator import Calibration
    from llmpq.quality.subjects import compute_dtype, device_of
    from llmpq.quality.text_windows import token_windows
    from llmpq.tokenizing.requests import load_tokenizer
    from planner.model.finding import model_shape
    from quant.checkpoint.reader import Checkpoint
    from quant.gptq.rounding import GptqOptions

    if not options.calibration:
        raise InputError(
            "give a text to calibrate on: --calibration FILE (plain text, or .jsonl with prompt or "
            "text), of the kind that the model shall work on"
        )
    settings = GptqOptions(options.symmetric, getattr(options, "act_order", True), options.damping)
    folder, bitwidths = _model_and_bits(options)
    target = Path(options.output)
    check_target(folder, target, options.overwrite)
    Checkpoint(folder).check_files()
    length = getattr(options, "sequence_length", None)
    if length is None:
        length = min(SEQUENCE_LENGTH, model_shape(str(folder)).max_positions)
    windows = token_windows(read_documents(options.calibration), load_tokenizer(folder), length)
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
    from llmpq.model_check import checked_shape
    from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
    from planner.plan.spec import PlanSpec
    from quant.checkpoint.model_reference import resolve

    if ("strat_file_name" in options) == ("bits" in options):
        raise SpecError("say once which bits: --strat_file_name PLAN, or --bits")
    model = getattr(options, "model", None)
    if "strat_file_name" in options:
        plan = PlanSpec.load(options.strat_file_name)
        reference = checkpoint_reference(plan, model)
        with finding(reference):
            folder = resolve(reference)
        shape_for_plan(plan, folder)
        return folder, tuple(bits for stage in plan.stages for bits in stage.bitwidths)
    if model is None:
        raise SpecError("name the model: --model FOLDER")
    with finding(model):
        folder = resolve(model)
    layers = checked_shape(folder).layers
    given = tuple(options.bits)
    if len(given) not in (1, layers):
        raise SpecError(
            f"{len(given)} bitwidths where the model has {layers} layers; give one number for all, "
            "or one for each layer"
        )
    return folder, given * layers if len(given) == 1 else given


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
        help="plain text, or .jsonl with prompt or text (a string or token ids); - for stdin",
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
    add_verbose(parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

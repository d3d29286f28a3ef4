"""`llmpq quantize`: a checkpoint with the bits of a plan, calibrated with GPTQ."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, console, run_command
from llmpq.cli.options.quantize import PROG, SEQUENCE_LENGTH, quantize_parser
from llmpq.cli.progress import TaskProgress
from llmpq.quality.text_windows import read_documents
from llmpq.tables import size_text
from quant.common.errors import InputError, SpecError


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = quantize_parser(prog).parse(arguments)
    return run_command(prog, lambda: _quantize(options))


def _quantize(options: argparse.Namespace) -> int:
    import torch

    from actors.stage.layer_stream import compute_on
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
        raise SpecError("say once which bits: --plan FILE, or --bits")
    model = getattr(options, "model", None)
    if "strat_file_name" in options:
        plan = PlanSpec.load(options.strat_file_name)
        folder = resolve(checkpoint_reference(plan, model))
        shape_for_plan(plan, folder)
        return folder, tuple(bits for stage in plan.stages for bits in stage.bitwidths)
    if model is None:
        raise SpecError("name the model: --model FOLDER")
    folder = resolve(model)
    layers = checked_shape(folder).layers
    given = tuple(options.bits)
    if len(given) not in (1, layers):
        raise SpecError(
            f"{len(given)} bitwidths where the model has {layers} layers; give one number for all, "
            "or one for each layer"
        )
    return folder, given * layers if len(given) == 1 else given


if __name__ == "__main__":
    raise SystemExit(main())

"""`llmpq quantize` and `llmpq convert`: checkpoints made of others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command
from llmpq.cli.measure.weight_options import (
    CONVERT,
    QUANTIZE,
    SEQUENCE_LENGTH,
    ConvertCommand,
    QuantizeCommand,
    convert_parser,
    quantize_parser,
)
from llmpq.cli.parser import made
from llmpq.cli.terminal import TaskProgress, finding
from llmpq.model_check import checked_shape
from llmpq.quality.calibration import calibration_documents, drawn_windows
from llmpq.quality.options import check_compute, check_draw, check_lengths, checked_bitwidths
from llmpq.quality.text_windows import token_windows
from llmpq.report.formatting import plain, size
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec
from quant.checkpoint.adapter import Adapter
from quant.checkpoint.model_folder import check_target
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.written_methods import check_bits
from quant.common.errors import InputError, SpecError
from quant.scheme import GptqOptions


def quantize_main(arguments: Sequence[str] | None = None, prog: str = QUANTIZE) -> int:
    options = made(QuantizeCommand, quantize_parser(prog).parse(arguments))
    return run_command(prog, lambda: _quantize(options))


def _quantize(options: QuantizeCommand) -> int:
    if not options.calibration and not options.input:
        raise InputError(
            "give a text to calibrate on: --calibration FILE (plain text, or .jsonl with prompt or "
            "text), of the kind that the model shall work on, or --input with the prompts of a job"
        )
    prompting = options.prompting
    settings = GptqOptions(options.symmetric, not options.no_act_order, options.damping)
    length = options.sequence_length
    check_compute(options.device, options.dtype)
    check_lengths(length)
    check_draw(options.sequences, options.seed)
    folder, bitwidths, expert_bitwidths = _model_and_bits(options)
    check_bits(options.format, (*bitwidths, *expert_bitwidths))
    target = Path(options.output)
    check_target(folder, target, options.overwrite)
    documents = calibration_documents(options.calibration, options.input, folder, prompting)

    import torch  # slow to load: what is refused without it is refused by now

    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.quantize import LEAST_INPUTS, Quantization, quantize_checkpoint
    from llmpq.quality.subjects import compute_of
    from quant.checkpoint.reader import Checkpoint

    adapter = None if options.adapter is None else str(Adapter(options.adapter).folder)
    checkpoint = Checkpoint(folder, adapter)
    checkpoint.check_files()
    if length is None:
        length = min(SEQUENCE_LENGTH, model_shape(str(folder)).max_positions)
    windows = token_windows(documents, load_tokenizer(folder), length)
    sample = drawn_windows(windows, options.sequences, options.seed)
    compute = compute_of(options.device, options.dtype)
    began = time.perf_counter()
    with TaskProgress("calibrating") as progress:
        effort = Effort(model_shape(str(folder)), operations_per_s(compute))
        progress.say_expected(effort.gptq_s(sample.size, bitwidths))
        progress.report(0, len(bitwidths))
        wanted = Quantization(
            bitwidths,
            torch.from_numpy(sample),
            compute,
            settings,
            expert_bitwidths,
            options.format,
        )
        made = quantize_checkpoint(checkpoint, target, wanted, options.overwrite, progress.report)
    seconds = time.perf_counter() - began
    again = command_line("llmpq", "plan", "--model", target)
    console().print(
        f"wrote {plain(size(made.tensor_bytes))} to {target}: {len(bitwidths)} layers of "
        f"{sum(bitwidths) / len(bitwidths):.2f} bits on average, calibrated on "
        f"{sample.size} tokens in {seconds:.0f} s; plan it: {again} --cluster cluster.yaml",
        highlight=False,
        soft_wrap=True,
    )
    if made.seldom_asked:
        console().print(
            f"{made.seldom_asked} weights of experts were asked by fewer than {LEAST_INPUTS} "
            "tokens of the text and are fitted without it; calibrate on more",
            highlight=False,
            soft_wrap=True,
        )
    return EXIT_DONE


def _model_and_bits(options: QuantizeCommand) -> tuple[Path, tuple[int, ...], tuple[int, ...]]:
    """The model's folder and bitwidths of each layer and its experts, by the plan or `--bits`."""
    if (options.plan is None) == (options.bits is None):
        raise SpecError("say once which bits: --plan FILE, or --bits")
    model = options.model
    if options.plan is not None:
        plan = PlanSpec.load(options.plan)
        reference = checkpoint_reference(plan, model)
        with finding(reference):
            folder = resolve(reference)
        _refuse_quantized(shape_for_plan(plan, folder), folder)
        choices = [each for stage in plan.stages for each in stage.choices]
        expert_bits = tuple(each.expert_bits for each in choices)
        return folder, tuple(each.bits for each in choices), expert_bits
    if model is None:
        raise SpecError("name the model: --model FOLDER")
    with finding(model):
        folder = resolve(model)
    shape = checked_shape(folder)
    _refuse_quantized(shape, folder)
    given = tuple(checked_bitwidths(options.bits or (), shape.layers))
    given = given * shape.layers if len(given) == 1 else given
    return folder, given, given


def _refuse_quantized(shape: ModelShape, folder: Path) -> None:
    if shape.stored is not None:
        raise SpecError(f"{folder} is quantized already; give the original 16-bit checkpoint")


def convert_main(arguments: Sequence[str] | None = None, prog: str = CONVERT) -> int:
    options = made(ConvertCommand, convert_parser(prog).parse(arguments))
    return run_command(prog, lambda: _convert(options.source, options.target))


def _convert(source: Path, target: Path) -> int:
    from quant.checkpoint.convert import convert

    with TaskProgress("converting", "files") as progress:
        made = convert(source, target, progress.report)
    sentence = (
        f"wrote {made.tensors} tensors ({made.tensor_bytes / 2**30:.2f} GiB) in {made.shards} "
        f"safetensors {'file' if made.shards == 1 else 'files'} to {made.target}; plan it: "
        + command_line("llmpq", "plan", "--model", made.target)
        + " --cluster cluster.yaml"
    )
    console().print(sentence, markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE

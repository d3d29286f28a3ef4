"""`llmpq quantize`, `llmpq export` and `llmpq convert`: checkpoints made of others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command, say, tell_notes
from llmpq.cli.measure.weight_options import (
    CONVERT,
    EXPORT,
    QUANTIZE,
    SEQUENCE_LENGTH,
    ConvertCommand,
    ExportCommand,
    QuantizeCommand,
    convert_parser,
    export_parser,
    quantize_parser,
)
from llmpq.cli.parser import made
from llmpq.cli.terminal import TaskProgress, finding
from llmpq.model_check import checked_shape
from llmpq.quality.calibration import calibration_documents, drawn_windows
from llmpq.quality.options import check_compute, check_draw, check_lengths, checked_bitwidths
from llmpq.quality.text_windows import token_windows
from llmpq.quality.vllm import SCRIPT, VllmPlan
from llmpq.report.formatting import plain, size
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_config, model_shape
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec
from quant.checkpoint.adapter import Adapter
from quant.checkpoint.formats.writing import check_bits
from quant.checkpoint.gguf.folder import gguf_index
from quant.checkpoint.model_folder import check_target, write_files, writing
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.stored_methods import quantization_entries
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
    settings = GptqOptions(options.symmetric, not options.no_act_order, options.damping)
    _check_options(options)
    chosen = _chosen_bits(options)
    check_bits(options.format, (*chosen.bitwidths, *chosen.expert_bitwidths))
    written = _write(options, chosen, options.format, settings)
    again = command_line("llmpq", "plan", "--model", options.output)
    console().print(
        f"{written}; plan it: {again} --cluster cluster.yaml", highlight=False, soft_wrap=True
    )
    return EXIT_DONE


def _check_options(options: QuantizeCommand | ExportCommand) -> None:
    check_compute(options.device, options.dtype)
    check_lengths(options.sequence_length)
    check_draw(options.sequences, options.seed)


def _write(
    options: QuantizeCommand | ExportCommand,
    chosen: _Bits,
    method: str,
    settings: GptqOptions,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Quantize the model as `chosen`; returns a sentence about it."""
    folder, bitwidths, target = chosen.folder, chosen.bitwidths, Path(options.output)
    check_target(folder, target, options.overwrite)
    documents = calibration_documents(options.calibration, options.input, folder, options.prompting)

    import torch  # slow to load: what is refused without it is refused by now

    from actors.importance import random_token_ids
    from actors.stage.model_config import read_config
    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.quantize import LEAST_INPUTS, Quantization, quantize_checkpoint
    from llmpq.quality.subjects import compute_of
    from quant.checkpoint.reader import Checkpoint

    adapter = None if options.adapter is None else str(Adapter(options.adapter).folder)
    checkpoint = Checkpoint(folder, adapter)
    checkpoint.check_files()
    shape = model_shape(str(folder))
    length = options.sequence_length or min(SEQUENCE_LENGTH, shape.max_positions)
    if documents:
        windows = token_windows(documents, load_tokenizer(folder), length)
        sample = torch.from_numpy(drawn_windows(windows, options.sequences, options.seed))
    else:
        sample = random_token_ids(read_config(folder), options.sequences, length)
    compute = compute_of(options.device, options.dtype)
    began = time.perf_counter()
    with TaskProgress("calibrating") as progress:
        effort = Effort(shape, operations_per_s(compute))
        progress.say_expected(effort.gptq_s(sample.numel(), bitwidths))
        progress.report(0, len(bitwidths))
        wanted = Quantization(
            bitwidths, sample, compute, settings, chosen.expert_bitwidths, method, beside
        )
        made = quantize_checkpoint(checkpoint, target, wanted, options.overwrite, progress.report)
    seconds = time.perf_counter() - began
    if made.seldom_asked:
        say(
            f"{made.seldom_asked} weights of experts were asked by fewer than {LEAST_INPUTS} "
            "tokens of the text and are fitted without it; calibrate on more"
        )
    return (
        f"wrote {plain(size(made.tensor_bytes))} to {target}: {len(bitwidths)} layers of "
        f"{sum(bitwidths) / len(bitwidths):.2f} bits on average, calibrated on "
        f"{sample.numel()} {'tokens' if documents else 'random ids'} in {seconds:.0f} s"
    )


class _Bits(NamedTuple):
    """The model's folder, and the bits of each layer and of its experts."""

    folder: Path
    bitwidths: tuple[int, ...]
    expert_bitwidths: tuple[int, ...]


def _chosen_bits(options: QuantizeCommand) -> _Bits:
    if (options.plan is None) == (options.bits is None):
        raise SpecError("say once which bits: --plan FILE, or --bits")
    model = options.model
    if options.plan is not None:
        plan = PlanSpec.load(options.plan)
        folder, shape = _planned_model(plan, model)
        _refuse_quantized(shape, folder)
        return _planned_bits(plan, folder)
    if model is None:
        raise SpecError("name the model: --model FOLDER")
    with finding(model):
        folder = resolve(model)
    shape = checked_shape(folder)
    _refuse_quantized(shape, folder)
    given = tuple(checked_bitwidths(options.bits or (), shape.layers))
    given = given * shape.layers if len(given) == 1 else given
    return _Bits(folder, given, given)


def _planned_model(plan: PlanSpec, model: str | None) -> tuple[Path, ModelShape]:
    reference = checkpoint_reference(plan, model)
    with finding(reference):
        folder = resolve(reference)
    return folder, shape_for_plan(plan, folder)


def _planned_bits(plan: PlanSpec, folder: Path) -> _Bits:
    choices = [each for stage in plan.stages for each in stage.choices]
    experts = tuple(each.expert_bits for each in choices)
    return _Bits(folder, tuple(each.bits for each in choices), experts)


def _refuse_quantized(shape: ModelShape, folder: Path) -> None:
    if not shape.is_original:
        raise SpecError(f"{folder} is quantized already; give the original 16-bit checkpoint")


def export_main(arguments: Sequence[str] | None = None, prog: str = EXPORT) -> int:
    options = made(ExportCommand, export_parser(prog).parse(arguments))
    return run_command(prog, lambda: _export(options))


def _export(options: ExportCommand) -> int:
    """Write weights and script, or the script alone where the model's own weights serve."""
    plan = PlanSpec.load(options.plan)
    _check_options(options)
    folder, shape = _planned_model(plan, options.model)
    stored = quantization_entries(model_config(str(folder))) if shape.stored else None
    vllm = VllmPlan(plan, options.plan, stored)
    if vllm.method is None:
        sentence = _write_script(options, vllm, folder)
    else:
        chosen, settings = _planned_bits(plan, folder), GptqOptions(vllm.symmetric)
        sentence = _write(options, chosen, vllm.method, settings, {SCRIPT: vllm.script()})
    tell_notes(vllm.notes)
    path = Path(options.output) / SCRIPT
    start = f"start it: sh {path}"
    if vllm.nodes > 1:
        start = f"start it on each node: NODE_RANK=0 MASTER_ADDR=ADDRESS sh {path}"
    console().print(f"{sentence}; {start}", highlight=False, soft_wrap=True)
    return EXIT_DONE


def _write_script(options: ExportCommand, vllm: VllmPlan, folder: Path) -> str:
    target = Path(options.output)
    check_target(folder, target, options.overwrite)
    model = checkpoint_reference(vllm.plan, options.model)
    if options.adapter is not None:
        raise SpecError("no weights are written; leave --adapter out, and give it to vLLM")
    if gguf_index(folder) is not None:
        raise SpecError(
            f"{model} is a GGUF file, which vLLM does not read in the plan's 16 bits; plan with "
            "bits below, or convert it to a folder of safetensors"
        )
    with writing(target, options.overwrite) as made:
        write_files(made, {SCRIPT: vllm.script(model)})
    return f"wrote {target}, which serves the weights of {model} as they are"


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

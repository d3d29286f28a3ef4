"""`llmpq indicator` and `llmpq eval`: what bits cost, by layer and in perplexity."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from llmpq.cli.common import (
    EXIT_DONE,
    command_line,
    console,
    run_command,
    target_file,
    tell_written,
    write_json,
)
from llmpq.cli.measure.weight_options import (
    EVALUATE,
    INDICATOR,
    EvaluateCommand,
    IndicatorCommand,
    evaluate_parser,
    indicator_parser,
)
from llmpq.cli.parser import made, taken
from llmpq.cli.terminal import TaskProgress, finding
from llmpq.model_check import checked_adapter, checked_shape
from llmpq.quality.calibration import calibration_documents
from llmpq.quality.options import (
    ERROR,
    SEQUENCE_LENGTH,
    EvaluationOptions,
    IndicatorOptions,
    check_lengths,
    checked_bitwidths,
    refuse_stored,
)
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import read_documents
from llmpq.report.formatting import bit_runs, part_runs
from llmpq.report.layout import Fitting, new_table, stacked
from llmpq.run.checkpoint import (
    checked_fingerprint,
    checkpoint_reference,
    importance_file,
    shape_for_plan,
)
from planner.plan.spec import PlanSpec
from planner.profiles.perplexity_fit import fit_perplexity
from planner.profiles.sensitivity import FILE_ENTRY, OmegaContent, save_omega
from quant.checkpoint.adapter import Adapter
from quant.checkpoint.model_reference import resolve
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file
from quant.loading.cache_settings import cache_settings, default_folder
from quant.rounding.importance_header import SUFFIX
from quant.scheme import VarianceForm

if TYPE_CHECKING:
    from llmpq.quality.effort import Effort


def indicator_main(arguments: Sequence[str] | None = None, prog: str = INDICATOR) -> int:
    given = indicator_parser(prog).parse(arguments)
    return run_command(prog, lambda: _measure(made(IndicatorCommand, given), given))


def _measure(options: IndicatorCommand, given: argparse.Namespace) -> int:
    target = target_file(options.output)
    chosen, prompting = _indicator_options(options, given), options.prompting
    check_lengths(None, options.max_tokens)
    if chosen.needs_text and not options.calibration and not options.input:
        raise InputError(
            "give a text to calibrate on: --calibration FILE (plain text, or .jsonl with prompt or "
            "text), of the kind that the model shall work on, or --input with the prompts of a "
            "job; --method random needs none"
        )
    importance = _importance_file(options, target) if chosen.needs_text else None
    with finding(options.model):
        folder = resolve(options.model)
    refuse_stored(checked_shape(folder), folder)
    adapter = None if chosen.adapter is None else Adapter(chosen.adapter).folder
    chosen = replace(chosen, adapter=adapter)
    held_out = read_documents(options.perplexity)
    calibration = calibration_documents(options.calibration, options.input, folder, prompting)

    from llmpq.quality.omega import measure_omega, measure_points
    from quant.checkpoint.reader import Checkpoint  # slow to load, as they need torch

    Checkpoint(folder, adapter).check_files()
    with TaskProgress("measuring sensitivity") as progress:
        if chosen.needs_text:
            effort = _effort(folder, chosen)
            length = min(SEQUENCE_LENGTH, effort.shape.max_positions)
            tokens = chosen.sequences * (chosen.sequence_length or length)
            progress.say_expected(effort.indicator_s(tokens, chosen))
            progress.report(0, effort.shape.layers)
        content = measure_omega(
            folder, calibration, chosen, progress.report, importance_file=importance
        )
    if importance is not None:
        named = os.path.relpath(importance.absolute(), target.absolute().parent)
        content = replace(content, provenance={**content.provenance, FILE_ENTRY: named})
        _keep(importance)
    save_omega(target, content)  # it took an hour; kept even if the second text fails
    if held_out:
        settings = EvaluationOptions(
            chosen.sequence_length,
            options.max_tokens,
            chosen.device,
            chosen.dtype,
            importance,
            adapter=adapter,
        )
        with TaskProgress("measuring perplexity") as progress:
            most = settings.max_tokens
            if most is not None:
                progress.say_expected(_effort(folder, chosen).points_s(most, chosen))
            content = measure_points(content, folder, held_out, settings, progress.report)
        save_omega(target, content)
    console().print(_sensitivities_shown(content))
    _print_points(content)
    if importance is not None:
        tell_written(importance, "weights are rounded by it; the omega file names it")
    again = command_line("llmpq", "plan", "--model", options.model, "--omega_file", target)
    tell_written(target, f"plan with it: {again} --cluster cluster.yaml")
    return EXIT_DONE


def _effort(folder: Path, options: IndicatorOptions) -> Effort:
    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.subjects import compute_of
    from planner.model.finding import model_shape

    compute = compute_of(options.device, options.dtype)
    return Effort(model_shape(str(folder)), operations_per_s(compute))


def _importance_file(options: IndicatorCommand, target: Path) -> Path:
    """Where the importance is written: beside the omega file, if nothing else is asked for."""
    default = target.with_name(f"{target.stem}{SUFFIX}")
    path = Path(options.importance or default)
    if not names_a_file(path) or path == target:
        raise InputError(f"cannot write {path}: name another file, in a folder that exists")
    return path


def _keep(importance: Path) -> None:
    """Keep a copy where plans look for it by its fingerprint when the file has moved."""
    from quant.rounding.importance import keep_file, load_importance
    from quant.rounding.importance_header import FOLDER, by_fingerprint

    found = load_importance(importance)
    with suppress(SpecError, InputError):  # no home folder, or one that cannot be written
        folder = default_folder() / FOLDER
        keep_file(folder, by_fingerprint(folder, found.fingerprint), found)


def _indicator_options(options: IndicatorCommand, given: argparse.Namespace) -> IndicatorOptions:
    chosen = taken(IndicatorOptions, given)
    if chosen.get("method", ERROR) != ERROR:
        rounding = chosen.pop("rounding", VarianceForm.rounding)
        chosen["form"] = VarianceForm(rounding, options.scheme, options.scales)
    return IndicatorOptions(**chosen)


def _sensitivities_shown(content: OmegaContent) -> Fitting:
    told = content.provenance
    form = [str(told[key]) for key in ("method", "rounding", "scheme", "scales") if key in told]
    text = f", {told['calibration_tokens']} tokens" if "calibration_tokens" in told else ""
    unit = f" in {told['unit']}" if "unit" in told else ", no unit"
    title = f"sensitivity{unit}: {', '.join(form)}{text}, {float(told['seconds']):.1f} s"
    return Fitting(title, [partial(_sensitivity_table, content)])


def _sensitivity_table(content: OmegaContent) -> Table:
    table = new_table(["layer", *(f"{bits} bit" for bits in content.bits)], ())
    for layer, row in enumerate(content.matrix):
        is_last = layer == len(content.matrix) - 1
        table.add_row(str(layer), *(f"{value:.4g}" for value in row), end_section=is_last)
    sums = {"all": content.matrix, "of which experts": content.experts}
    for name, part in sums.items():
        if part is not None:
            table.add_row(name, *(f"{total:.4g}" for total in part.sum(axis=0)))
    return table


def _print_points(content: OmegaContent) -> None:
    """Print the measured perplexities and the curve through them, if they allow one."""
    if not content.points:
        return
    points = content.weighed_points()
    fit, note = None, ""
    try:
        fit = fit_perplexity(points, "this file")
    except SpecError as error:
        note = f"--max_ppl_delta cannot use {error}"
    heads = ("mean bits", "sensitivity", "perplexity", "above 16 bit", "± 1 σ", "by the fit")
    table = new_table(heads, ())
    for measured, point in zip(content.points, points, strict=True):
        table.add_row(
            f"{sum(measured.bitwidths) / len(measured.bitwidths):.2f}",
            f"{point.omega:.4g}",
            f"{point.perplexity:.3f}",
            f"{point.perplexity - points[0].perplexity:+.3f}",
            f"{point.error:.3f}",
            "" if fit is None else f"{fit.forecast(point.omega)[0]:+.3f}",
        )
    title = f"perplexity, {content.provenance['perplexity_tokens']} tokens"
    console().print(Fitting(title, [lambda: table]))
    if note:
        console().print(note, soft_wrap=True, highlight=False)


BITS_WIDTH = 12  # of the runs of bits in a line, where the terminal is narrow


def evaluate_main(arguments: Sequence[str] | None = None, prog: str = EVALUATE) -> int:
    given = evaluate_parser(prog).parse(arguments)
    return run_command(prog, lambda: _evaluate(made(EvaluateCommand, given), given))


def _evaluate(options: EvaluateCommand, given: argparse.Namespace) -> int:
    if not options.plan and not options.bits:
        raise SpecError("say what to evaluate: --plan, --bits, or both")
    if not options.text:
        raise SpecError("give a text to evaluate on: --text FILE, or --text - for standard input")
    target = None if options.json is None else target_file(options.json)
    results = _perplexities(options, given)
    first = results[0]
    title = f"perplexity per token, {first.tokens} tokens in {first.windows} windows"
    # Where the terminal is narrow, errors stand below what they are of.
    tables = [partial(_perplexity_table, results, apart) for apart in (True, False)]
    console().print(Fitting(title, tables))
    for note in _notes(results):
        console().print(note, soft_wrap=True, highlight=False)
    if target is not None:
        write_json(target, [result.to_dict() for result in results])
    return EXIT_DONE


def _perplexities(options: EvaluateCommand, given: argparse.Namespace) -> list[Perplexity]:
    settings = made(EvaluationOptions, given)
    plans = [(str(path), PlanSpec.load(path)) for path in options.plan]
    model = options.model
    if plans:
        reference = checkpoint_reference(plans[0][1], model)
    elif model is None:
        raise SpecError("name the model: --model FOLDER")
    else:
        reference = model
    with finding(reference):
        folder = resolve(reference)
    for _, plan in plans:
        shape_for_plan(plan, folder)
    shape = checked_shape(folder)
    adapter = checked_adapter(settings.adapter, shape, folder)
    mixtures = [checked_bitwidths(_bitwidths(text), shape.layers) for text in options.bits]
    if settings.importance is not None and not plans:
        checked_fingerprint(Path(settings.importance), shape)
    cache = cache_settings(settings.cache_dir, None, False)
    for _, plan in plans:
        importance_file(plan, settings.importance, cache, shape)
    documents = read_documents(options.text)

    import torch  # slow to load: what is refused without it is refused by now

    from actors.stage.layer_stream import compute_on
    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.scoring import evaluate
    from llmpq.quality.subjects import bits_subject, device_of, plan_subject, weighed, windows_of
    from quant.checkpoint.reader import Checkpoint

    device = device_of(settings.device)
    checkpoint = Checkpoint(folder, adapter)
    checkpoint.check_files()
    named = (folder, reference, adapter)
    with TaskProgress("finding what weights are rounded by"):
        subjects = [
            weighed(plan_subject(plan, name, device, settings.dtype), named, settings, device, plan)
            for name, plan in plans
        ]
        subjects += [
            weighed(
                bits_subject(bitwidths, shape.layers, device, settings.dtype, options.rounding),
                named,
                settings,
                device,
            )
            for bitwidths in mixtures
        ]
    windows = windows_of(documents, folder, settings)
    with TaskProgress("evaluating") as progress:
        effort = Effort(shape, operations_per_s(compute_on(device, torch.float32)))
        tokens = int(windows.counts.sum())
        progress.say_expected(effort.evaluation_s(tokens, [each.layers for each in subjects]))
        progress.report(0, shape.layers)
        return evaluate(checkpoint, windows, subjects, device, progress.report)


def _bitwidths(text: str) -> list[int]:
    """Read bitwidths from `4` or `3,3,4,…`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SpecError(f"--bits {text!r} is no bitwidth and no list such as 3,4,4,8") from error


def _perplexity_table(results: Sequence[Perplexity], apart: bool) -> Table:
    """One line for each subject, or two with the standard errors in the second one."""
    figures = ("perplexity", "nats a token", "above the first", "KL, nats")
    if apart:
        heads = ["what", "bits", *figures, "computed in"]
    else:
        heads = ["what", "bits", *(figure.replace(" ", "\n") for figure in figures), "in"]
    table = new_table(heads, (0, 1, 6))
    for result in results:
        above, above_error = result.above(results[0])
        is_first, divergence = result is results[0], result.divergence
        between = " ± " if apart else "\n± "
        runs = [f"{bits}x{count}" for bits, count in bit_runs(result.bitwidths)]
        table.add_row(
            result.name,
            " ".join(runs) if apart else stacked(runs, BITS_WIDTH),
            f"{result.perplexity:.3f}{between}{_error(result.standard_error)}",
            f"{result.nll:.5f}",
            "" if is_first else f"{above:+.3f}{between}{_error(above_error)}",
            ""
            if divergence is None
            else f"{divergence:.5f}{between}{_error(result.divergence_error, 5)}",
            ", ".join(result.dtypes),
        )
    return table


def _error(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _notes(results: Sequence[Perplexity]) -> Iterator[str]:
    """Yield sentences about what another device's kernels would do that was not done here."""
    for result in results:
        for backend, layers in result.represented.items():
            yield (
                f"{result.name}: {backend} does not run here; plain products with the numbers it "
                f"rounds to took its place in {part_runs(layers, 'layer')}"
            )

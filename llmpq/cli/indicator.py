"""`llmpq indicator`: how much each layer of a model loses at each bitwidth (LLM-PQ section 4.2)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command, tell_written
from llmpq.cli.measure_options import INDICATOR, IndicatorCommand, indicator_parser
from llmpq.cli.parser import made, taken
from llmpq.cli.terminal import TaskProgress, finding
from llmpq.model_check import checked_shape
from llmpq.quality.calibration import calibration_documents
from llmpq.quality.options import (
    ERROR,
    SEQUENCE_LENGTH,
    EvaluationOptions,
    IndicatorOptions,
    check_lengths,
    refuse_without_error,
)
from llmpq.quality.text_windows import read_documents
from llmpq.report.layout import Fitting, new_table
from planner.quality.perplexity_fit import fit_perplexity
from planner.quality.sensitivity import FILE_ENTRY, OmegaContent, save_omega
from quant.cache.settings import default_folder
from quant.checkpoint.model_reference import resolve
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file
from quant.importance.header import SUFFIX
from quant.sensitivity.variance_form import VarianceForm

if TYPE_CHECKING:
    from llmpq.quality.effort import Effort


def main(arguments: Sequence[str] | None = None, prog: str = INDICATOR) -> int:
    """Entry point; returns the exit code."""
    given = indicator_parser(prog).parse(arguments)
    return run_command(prog, lambda: _measure(made(IndicatorCommand, given), given))


def _measure(options: IndicatorCommand, given: argparse.Namespace) -> int:
    target = Path(options.output)
    if not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
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
    refuse_without_error(chosen, checked_shape(folder), folder)
    held_out = read_documents(options.perplexity)
    calibration = calibration_documents(options.calibration, options.input, folder, prompting)

    from llmpq.quality.omega import measure_omega, measure_points
    from quant.checkpoint.reader import Checkpoint  # slow to load, as they need torch

    Checkpoint(folder).check_files()
    with TaskProgress("measuring sensitivity") as progress:
        if chosen.needs_text:
            effort = _effort(folder, chosen)
            tokens = chosen.sequences * _length(chosen, effort)
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
        )
        with TaskProgress("measuring perplexity") as progress:
            most = settings.max_tokens
            if most is not None:
                progress.say_expected(_effort(folder, chosen).points_s(most, chosen))
            content = measure_points(content, folder, held_out, settings, progress.report)
        save_omega(target, content)
    console().print(_shown(content))
    _print_points(content)
    if importance is not None:
        tell_written(importance, "weights are rounded by it; the omega file names it")
    again = command_line("llmpq", "plan", "--model", options.model, "--omega_file", target)
    tell_written(target, f"plan with it: {again} --cluster cluster.yaml")
    return EXIT_DONE


def _effort(folder: Path, options: IndicatorOptions) -> Effort:
    """How fast the device at hand works on the model."""
    from actors.stage.layer_stream import compute_on
    from llmpq.quality.effort import Effort, operations_per_s
    from llmpq.quality.subjects import compute_dtype, device_of
    from planner.model.finding import model_shape

    device = device_of(options.device)
    compute = compute_on(device, compute_dtype(options.dtype, device))
    return Effort(model_shape(str(folder)), operations_per_s(compute))


def _length(options: IndicatorOptions, effort: Effort) -> int:
    return options.sequence_length or min(SEQUENCE_LENGTH, effort.shape.max_positions)


def _importance_file(options: IndicatorCommand, target: Path) -> Path:
    """Where the importance is written: beside the omega file, if nothing else is asked for."""
    default = target.with_name(f"{target.stem}{SUFFIX}")
    path = Path(options.importance or default)
    if not names_a_file(path) or path == target:
        raise InputError(f"cannot write {path}: name another file, in a folder that exists")
    return path


def _keep(importance: Path) -> None:
    """Keep a copy where plans look for it by its fingerprint when the file has moved."""
    from quant.importance.file import keep_file, load_importance
    from quant.importance.header import FOLDER, by_fingerprint

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


def _shown(content: OmegaContent) -> Fitting:
    """The sensitivities by layer and bitwidth, with their sums."""
    told = content.provenance
    form = [str(told[key]) for key in ("method", "rounding", "scheme", "scales") if key in told]
    text = f", {told['calibration_tokens']} tokens" if "calibration_tokens" in told else ""
    title = f"sensitivity: {', '.join(form)}{text}, {float(told['seconds']):.1f} s"
    return Fitting(title, [partial(_table, content)])


def _table(content: OmegaContent) -> Table:
    table = new_table(["layer", *(f"{bits} bit" for bits in content.bits)], ())
    for layer, row in enumerate(content.matrix):
        is_last = layer == len(content.matrix) - 1
        table.add_row(str(layer), *(f"{value:.4g}" for value in row), end_section=is_last)
    table.add_row("all", *(f"{total:.4g}" for total in content.matrix.sum(axis=0)))
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


if __name__ == "__main__":
    raise SystemExit(main())

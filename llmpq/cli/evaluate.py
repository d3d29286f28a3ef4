"""`llmpq eval`: perplexity of plans or bitwidths on a text, and their KL from 16 bit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.table import Table

from llmpq.cli.common import EXIT_DONE, console, run_command, tell_written
from llmpq.cli.measure_options import EVALUATE, EvaluateCommand, evaluate_parser
from llmpq.cli.parser import made
from llmpq.cli.terminal import TaskProgress, finding
from llmpq.model_check import checked_shape
from llmpq.quality.options import EvaluationOptions, checked_bitwidths
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import read_documents
from llmpq.report.layout import Fitting, new_table, stacked
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.run.importance import checked_fingerprint, importance_file
from planner.plan.spec import PlanSpec
from quant.cache.settings import cache_settings
from quant.checkpoint.model_reference import resolve
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file, write_whole

BITS_WIDTH = 12  # of the runs of bits in a line, where the terminal is narrow


def main(arguments: Sequence[str] | None = None, prog: str = EVALUATE) -> int:
    """Entry point; returns the exit code."""
    given = evaluate_parser(prog).parse(arguments)
    return run_command(prog, lambda: _evaluate(made(EvaluateCommand, given), given))


def _evaluate(options: EvaluateCommand, given: argparse.Namespace) -> int:
    if not options.plan and not options.bits:
        raise SpecError("say what to evaluate: --plan, --bits, or both")
    if not options.text:
        raise SpecError("give a text to evaluate on: --text FILE, or --text - for standard input")
    target = None if options.json is None else Path(options.json)
    if target is not None and not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
    results = _measure(options, given)
    console().print(_shown(results))
    for note in _notes(results):
        console().print(note, soft_wrap=True, highlight=False)
    if target is not None:
        _write_json(target, results)
        tell_written(target)
    return EXIT_DONE


def _measure(options: EvaluateCommand, given: argparse.Namespace) -> list[Perplexity]:
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
    from llmpq.quality.subjects import (
        Weighing,
        bits_subject,
        device_of,
        plan_subject,
        weighed,
        windows_of,
    )
    from quant.checkpoint.reader import Checkpoint

    device = device_of(settings.device)
    weighing = Weighing(folder, reference, settings)
    with TaskProgress("finding what weights are rounded by"):
        subjects = [
            weighed(plan_subject(plan, name, device, settings.dtype), weighing, device, plan)
            for name, plan in plans
        ]
        subjects += [
            weighed(
                bits_subject(bitwidths, shape.layers, device, settings.dtype, options.rounding),
                weighing,
                device,
            )
            for bitwidths in mixtures
        ]
    Checkpoint(folder).check_files()
    windows = windows_of(documents, folder, settings)
    with TaskProgress("evaluating") as progress:
        effort = Effort(shape, operations_per_s(compute_on(device, torch.float32)))
        tokens = int(windows.counts.sum())
        progress.say_expected(effort.evaluation_s(tokens, [each.layers for each in subjects]))
        progress.report(0, shape.layers)
        return evaluate(folder, windows, subjects, device, progress.report)


def _bitwidths(text: str) -> list[int]:
    """Read bitwidths from `4` or `3,3,4,…`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SpecError(f"--bits {text!r} is no bitwidth and no list such as 3,4,4,8") from error


def _shown(results: Sequence[Perplexity]) -> Fitting:
    """The figures of each subject; where the terminal is narrow, errors below what they are of."""
    first = results[0]
    title = f"perplexity per token, {first.tokens} tokens in {first.windows} windows"
    return Fitting(title, [partial(_table, results, apart) for apart in (True, False)])


def _table(results: Sequence[Perplexity], apart: bool) -> Table:
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
        runs = _runs(result.bitwidths)
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


def _runs(bitwidths: Sequence[int]) -> list[str]:
    """Runs of equal bits in layer order: `4x7` and `3x5`."""
    runs = [(bits, len(list(group))) for bits, group in groupby(bitwidths)]
    return [f"{bits}x{count}" for bits, count in runs]


def _notes(results: Sequence[Perplexity]) -> Iterator[str]:
    """Yield sentences about what another device's kernels would do that was not done here."""
    for result in results:
        for backend, layers in result.represented.items():
            yield (
                f"{result.name}: {backend} does not run here; plain products with the numbers it "
                f"rounds to took its place in {len(layers)} layer{'s' * (len(layers) != 1)} "
                f"({_ranges(layers)})"
            )


def _ranges(layers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: `0-3, 7`."""
    by_run = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    runs = [[layer for _, layer in group] for _, group in by_run]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _write_json(path: Path, results: Sequence[Perplexity]) -> None:
    """Write the figures; an existing file is replaced whole or not at all."""
    text = json.dumps([result.to_dict() for result in results], indent=1) + "\n"
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InputError(f"cannot write {path}: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())

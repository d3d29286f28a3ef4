"""`llmpq lengths`: train and judge predictors of output lengths, for runs under the policy s3."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from llmpq.cli.common import EXIT_DONE, command_line, console, run_command, tell_written
from llmpq.cli.measure_options import (
    LENGTHS,
    JudgeCommand,
    LengthsCommand,
    TrainCommand,
    lengths_parser,
)
from llmpq.cli.parser import made, taken
from llmpq.cli.terminal import TaskProgress
from llmpq.lengths.predictor import Agreement
from llmpq.lengths.training import Judgement, TrainingOptions
from llmpq.report.layout import Fitting, new_table
from quant.common.errors import InputError
from quant.common.files import names_a_file, write_whole

if TYPE_CHECKING:
    from llmpq.lengths.finished_rows import LearntRow
    from llmpq.lengths.training import ServedIds


def main(arguments: Sequence[str] | None = None, prog: str = LENGTHS) -> int:
    """Entry point; returns the exit code."""
    given = lengths_parser(prog).parse(arguments)
    if given.command == "train":
        return run_command(
            prog, lambda: _train(made(TrainCommand, given), taken(TrainingOptions, given))
        )
    return run_command(prog, lambda: _evaluate(made(JudgeCommand, given)))


def _train(options: TrainCommand, training: Mapping[str, Any]) -> int:
    from llmpq.lengths.folder import check_target, save_predictor
    from llmpq.lengths.training import train

    target, figures = Path(options.output).expanduser(), _json_file(options)
    check_target(target, options.overwrite)
    chosen = TrainingOptions(**training)
    _quiet()
    rows, ids = _rows(options)
    with TaskProgress(f"training on {len(rows)} rows"):
        model, judgement = train(rows, chosen, ids)
    save_predictor(target, model, judgement.confusion, options.overwrite)
    console().print(_table(judgement, f"{model.kind}, {model.trained_rows} rows learnt from"))
    console().print(_confusion(judgement, model.buckets))
    if judgement.predictor.accuracy <= judgement.majority.accuracy:
        console().print(
            "It is right no more often than the most frequent bucket alone: give it more rows, or "
            "the answers do not depend on what it reads.",
            soft_wrap=True,
        )
    _write_json(figures, judgement, model.buckets)
    words = ("--input", "prompts.jsonl", "--policy", "s3", "--predictor", target)
    tell_written(target, f"plan with it: {command_line('llmpq', 'plan', *words)}")
    return EXIT_DONE


def _evaluate(options: JudgeCommand) -> int:
    from llmpq.lengths.folder import check_tokenizer, load_predictor
    from llmpq.lengths.training import judge
    from planner.prediction import predictor_file
    from quant.common.errors import SpecError

    folder, figures = Path(options.predictor).expanduser(), _json_file(options)
    file = predictor_file(folder)
    _quiet()
    rows, ids = _rows(options)
    if ids is not None:
        check_tokenizer(file, folder, ids.digest, options.model or "")
    elif file.tokenizer is not None:
        raise SpecError(
            f"the predictor in {folder} reads token ids; name the model whose tokenizer makes "
            "them: --model"
        )
    model = load_predictor(folder)
    with TaskProgress(f"judging by {len(rows)} rows"):
        judgement = judge(model, rows)
    console().print(_table(judgement, f"{model.kind} in {folder}"))
    console().print(_confusion(judgement, model.buckets))
    _write_json(figures, judgement, model.buckets)
    return EXIT_DONE


def _rows(options: LengthsCommand) -> tuple[list[LearntRow], ServedIds | None]:
    """The finished rows as a predictor sees them, and the ids that they have."""
    from llmpq.lengths.finished_rows import as_prompts, read_finished
    from llmpq.lengths.folder import tokenizer_digest
    from llmpq.lengths.training import ServedIds
    from llmpq.model_check import checked_shape
    from quant.checkpoint.model_reference import resolve

    model, prompting = options.model, options.prompting
    finished = read_finished(options.input, options.lengths)
    if model is None:
        return as_prompts(finished, None), None
    folder = resolve(model, weights=False)
    vocab_size = checked_shape(folder).vocab_size
    ids = ServedIds(tokenizer_digest(folder, vocab_size), vocab_size)
    return as_prompts(finished, folder, prompting), ids


def _quiet() -> None:
    """Keep the progress bars of transformers out of the output, if it is going to be loaded."""
    import os

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _table(judgement: Judgement, what: str) -> Fitting:
    found = judgement.predictor
    heads = ["accuracy", "too\nshort", "buckets\noff", "calibration\nerror", "ms a\nprompt"]
    table = new_table(["predictor", *heads])
    table.add_row("this one", *_cells(found), f"{judgement.ms_per_prompt:.2f}")
    table.add_row("the most frequent bucket", *_cells(judgement.majority), "")
    table.add_row("the longest answer", *_cells(judgement.longest), "")
    return Fitting(f"{what}; {found.rows} rows held against", [lambda: table])


def _cells(found: Agreement) -> tuple[str, ...]:
    distance, error = found.wrong_distance, found.calibration_error
    return (
        f"{found.accuracy:.1%}",
        f"{found.too_short:.1%}",
        "-" if distance is None else f"{distance:.2f}",
        "" if error is None else f"{error:.3f}",
    )


def _confusion(judgement: Judgement, buckets: Sequence[int]) -> Fitting:
    """Rows by true and by predicted bucket: a matrix, or lists where that is too wide."""
    rows = list(zip(buckets, judgement.confusion.tolist(), strict=True))

    def matrix() -> Table:
        table = new_table(["tokens", *map(str, buckets)], ())
        for most, row in rows:
            table.add_row(str(most), *(str(count) if count else "·" for count in row))
        return table

    def lists() -> Table:
        table = new_table(["tokens", "rows by predicted bucket"], (1,))
        for most, row in rows:
            counts = zip(buckets, row, strict=True)
            table.add_row(str(most), ", ".join(f"{n} by {which}" for which, n in counts if n))
        return table

    title = "rows by true bucket (first column, up to so many tokens) and by predicted one"
    return Fitting(title, [matrix, lists])


def _json_file(options: LengthsCommand) -> Path | None:
    target = None if options.json is None else Path(options.json)
    if target is not None and not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
    return target


def _write_json(path: Path | None, judgement: Judgement, buckets: Sequence[int]) -> None:
    if path is None:
        return
    values: dict[str, Any] = dataclasses.asdict(judgement)
    values |= {"buckets": list(buckets), "confusion": judgement.confusion.tolist()}
    try:
        write_whole(path, json.dumps(values, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from error
    tell_written(path)


if __name__ == "__main__":
    raise SystemExit(main())

"""Part (a): the paper's models on modelled A100-80GB, in virtual time (tables 2 to 4, figure 5).

    python -m benchmarks.lengths papers [--data REFERENCE_DATA]

Every contestant drives the same stages, which take the seconds of the planner's latency model, over
the same rows. Nothing waits and nothing is random but by seed, so the tables are the same
everywhere; `own` is the share of the scheduler's own seconds on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.lengths.contestants import Contestant, Memory, contestants
from benchmarks.lengths.rows import IntArray, Rows, confusion_of, recorded, short_answers, tenths
from benchmarks.lengths.virtual_job import JobRun
from benchmarks.orca.pipelines import ModelledPipeline, Setting, modelled_pipeline
from benchmarks.orca.traces import Lengths

GPU = "A100-SXM4-80GB"
MOST_BATCH = 1024
ACCURACY = 0.9861
NEAR = 0.97
"""Of the predictor on Alpaca (section 3): right predictions, and of the wrong ones the share in a
neighbouring bucket, where their mean distance is 1.03."""

SETTINGS = tuple(
    Setting(model, gpus, paper, GPU, MOST_BATCH)
    for model, gpus, paper in (
        ("opt-6.7b", 1, "GPT-J 6B"),
        ("llama-13b", 1, "LLaMA 13B"),
        ("gpt-neox-20b", 1, "GPT-NeoX 20B"),
        ("llama-30b", 1, "LLaMA 33B"),
        ("opt-66b", 2, ""),
        ("opt-175b", 6, "GPT-3 175B, 6"),
        ("opt-175b", 8, "GPT-3 175B, 8"),
        ("opt-175b", 10, "GPT-3 175B, 10"),
    )
)
HEADER = (
    "| model | GPUs | rows | token slots | reserves for | tokens/s | / longest | / Oracle | batch "
    "| iterations | preempted | computed again | own |\n" + "|---" * 13 + "|"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", choices=sorted({s.model for s in SETTINGS}))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of the reference data (vicuna)")


def run(options: argparse.Namespace) -> None:
    """Print a line for each model, kind of rows and contestant."""
    print(HEADER)
    kinds = [short_answers(options.rows, options.seed)]
    if options.data is not None:
        kinds.append(recorded(options.data, options.rows, options.seed))
    for setting in SETTINGS:
        if options.models and setting.model not in options.models:
            continue
        for rows in kinds:
            memory = whole_memory(setting, rows)
            predictions = list(predictions_of(rows, options.seed))
            for line in lines(memory, rows, contestants(rows, predictions)):
                print(line, flush=True)


def whole_memory(setting: Setting, rows: Rows) -> Memory:
    """All the KV memory that the stages have beside weights of 16 bits."""
    pipeline = pipeline_for(setting, rows)
    return Memory(pipeline, pipeline.kv_tokens)


def pipeline_for(setting: Setting, rows: Rows) -> ModelledPipeline:
    """The modelled stages with room for as many of the longest rows as fit."""
    return modelled_pipeline(setting, Lengths(int(rows.prompts.max()), rows.limit))


def predictions_of(rows: Rows, seed: int) -> Iterator[tuple[str, IntArray]]:
    """What is expected of rows by a recorded classifier, and by one as good as the paper's."""
    if rows.predicted is not None:
        yield f"S³, recorded ({rows.accuracy(rows.predicted):.0%} right)", rows.predicted
    ten = replace(rows, bounds=tenths(rows.limit))
    yield f"S³, {ACCURACY:.1%} right", ten.expected_by(confusion_of(ACCURACY, NEAR), seed)


def lines(memory: Memory, rows: Rows, chosen: list[Contestant]) -> Iterator[str]:
    """The lines of a table for one setting."""
    runs = [(each, each.best(memory, rows)) for each in chosen]
    by_name = {each.name: run for each, run in runs}
    setting = memory.pipeline.setting
    for each, run in runs:
        yield _line(
            [
                setting.model,
                str(setting.gpus),
                rows.name,
                str(memory.kv_tokens),
                each.name,
                f"{run.tokens_per_s:.0f}",
                f"{run.tokens_per_s / by_name['longest (ORCA)'].tokens_per_s:.2f}",
                f"{run.tokens_per_s / by_name['Oracle'].tokens_per_s:.2f}",
                *costs_of(run, rows),
            ]
        )


def costs_of(run: JobRun, rows: Rows) -> list[str]:
    """Cells: requests at once, iterations, preemptions a row, tokens computed again, own time."""
    again = run.computed_again / (run.tokens + int(rows.prompts.sum()))
    return [
        f"{run.mean_batch:.1f}",
        str(len(run.held)),
        f"{run.preemptions / len(rows):.2f}",
        f"{again:.1%}",
        f"{run.scheduler_s / run.seconds:.1%}",
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

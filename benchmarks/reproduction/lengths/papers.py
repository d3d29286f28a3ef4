"""Part (a): the paper's models on modelled A100-80GB, in virtual time (tables 2 to 4, figure 5).

    python -m benchmarks.reproduction.lengths papers [--data REFERENCE_DATA]

Every contestant drives the same stages, which take the seconds of the planner's latency model, over
the same rows. Nothing waits and nothing is random but by seed, so the tables are the same
everywhere, but for the share of the scheduler's own seconds, which are this machine's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.reproduction.lengths.contestants import Contestant, Memory, contestants
from benchmarks.reproduction.lengths.rows import (
    IntArray,
    Rows,
    confusion_of,
    recorded,
    short_answers,
    tenths,
)
from benchmarks.reproduction.orca.pipelines import ModelledPipeline, Setting, modelled_pipeline
from benchmarks.reproduction.orca.traces import Lengths

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", choices=sorted({s.model for s in SETTINGS}))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of the reference data (vicuna)")


def run(options: argparse.Namespace) -> None:
    """Print a table for each kind of rows: a line for each model."""
    kinds = [short_answers(options.rows, options.seed)]
    if options.data is not None:
        kinds.append(recorded(options.data, options.rows, options.seed))
    for rows in kinds:
        chosen = contestants(rows, list(predictions_of(rows, options.seed)))
        names = " | ".join(each.name for each in chosen)
        print(f"\n{rows.name}:\n\n| model, GPUs | the paper's | token slots | {names} |")
        print("|---" * (len(chosen) + 3) + "|")
        for setting in SETTINGS:
            if options.models is None or setting.model in options.models:
                print(line(whole_memory(setting, rows), rows, chosen), flush=True)


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


def line(memory: Memory, rows: Rows, chosen: Sequence[Contestant]) -> str:
    """A line of the table: tokens per second, and in brackets how many times the first
    contestant's; requests at once; how often a row was preempted, the share of tokens that were
    computed again, and the scheduler's own share.
    """
    setting = memory.pipeline.setting
    runs = [each.best(memory, rows) for each in chosen]
    cells = [f"{setting.model}, {setting.gpus}", setting.paper or "-", str(memory.kv_tokens)]
    for run in runs:
        times = run.tokens_per_s / runs[0].tokens_per_s
        cell = f"{run.tokens_per_s:.0f} ({times:.2f}), {run.mean_batch:.1f}"
        if run.preemptions:
            again = run.computed_again / (run.tokens + int(rows.prompts.sum()))
            cell += f", {run.preemptions / len(rows):.2f} {again:.1%}"
        cells.append(f"{cell}, {run.scheduler_s / run.seconds:.1%}")
    return f"| {' | '.join(cells)} |"

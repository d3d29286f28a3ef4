"""Part (b): how right predictions must be, from all of them to chance.

    python -m benchmarks.reproduction.lengths accuracy --data REFERENCE_DATA

Ten buckets of a tenth of the longest answer. Wrong predictions are in a neighbouring bucket
("near"), or anywhere ("far"); chance is a tenth.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.reproduction.lengths.contestants import Contestant, Memory, contestants
from benchmarks.reproduction.lengths.papers import GPU, MOST_BATCH, pipeline_for
from benchmarks.reproduction.lengths.rows import Rows, confusion_of, recorded, short_answers, tenths
from benchmarks.reproduction.orca.pipelines import Setting

ACCURACIES = (1.0, 0.986, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LONGEST_REQUESTS = 8
"""Of the longest requests, so many have room: memory is scarce, and predicting worth while."""
SETTING = Setting("llama-30b", 1, "LLaMA 33B", GPU, MOST_BATCH)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run(options: argparse.Namespace) -> None:
    """Print a table for each kind of rows."""
    for rows in (
        recorded(options.data, options.rows, options.seed),
        short_answers(options.rows, options.seed),
    ):
        table(replace(rows, bounds=tenths(rows.limit)), options.seed)


def table(rows: Rows, seed: int) -> None:
    """Print tokens per second by accuracy, as shares of Oracle's."""
    pipeline = pipeline_for(SETTING, rows)
    memory = Memory(pipeline, LONGEST_REQUESTS * rows.longest)
    longest, oracle, blocks = (
        each.best(memory, rows).tokens_per_s for each in contestants(rows, [])
    )
    print(
        f"\n{rows.name}, {SETTING.model} on {SETTING.gpu}, {memory.kv_tokens} token slots: Oracle "
        f"{oracle:.0f} tokens/s; of that, reserving for the longest {longest / oracle:.2f}, blocks "
        f"on demand {blocks / oracle:.2f}.\n"
    )
    print("| right | near | preempted a row | far | preempted a row |\n|---|---|---|---|---|")
    for accuracy in ACCURACIES:
        cells = [f"{accuracy:.1%}"]
        for near in (1.0, 0.0):
            expected = rows.expected_by(confusion_of(accuracy, near), seed)
            run = Contestant("S³", "predicted", expected).best(memory, rows)
            cells += [
                f"{run.tokens_per_s / oracle:.2f}",
                f"{run.preemptions / len(rows):.2f}",
            ]
        print(f"| {' | '.join(cells)} |", flush=True)

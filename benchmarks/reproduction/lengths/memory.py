"""Part (a), memory: the same contestants with KV memory from scarce to ample.

    python -m benchmarks.reproduction.lengths memory --data REFERENCE_DATA [--models llama-30b …]

`requests` is how many of the longest requests the memory has room for. Clusters are A100-80GB
alone, and mixed ones of LLM-PQ's table 3, on the stages that its planner finds for them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.reproduction.lengths.contestants import Memory, contestants
from benchmarks.reproduction.lengths.papers import GPU, MOST_BATCH, pipeline_for, predictions_of
from benchmarks.reproduction.lengths.rows import recorded
from benchmarks.reproduction.orca.pipelines import Setting

LONGEST_REQUESTS = (2, 4, 8, 16, 32, 64)
SETTINGS = (
    Setting("llama-30b", 1, "LLaMA 33B", GPU, MOST_BATCH),
    Setting("opt-66b", 4, "", GPU, MOST_BATCH),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run(options: argparse.Namespace) -> None:
    """Print a table for each setting: tokens per second by memory."""
    rows = recorded(options.data, options.rows, options.seed)
    predictions = list(predictions_of(rows, options.seed))
    chosen = contestants(rows, predictions)
    for setting in SETTINGS:
        pipeline = pipeline_for(setting, rows)
        print(f"\n{setting.model} on {setting.gpus} {setting.gpu}, {rows.name}:\n")
        names = [each.name for each in chosen]
        print(f"| requests | token slots | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
        for requests in LONGEST_REQUESTS:
            memory = Memory(pipeline, requests * rows.longest)
            speeds = [each.best(memory, rows).tokens_per_s for each in chosen]
            cells = [f"{speed:.0f}" for speed in speeds]
            print(f"| {requests} | {memory.kv_tokens} | {' | '.join(cells)} |", flush=True)

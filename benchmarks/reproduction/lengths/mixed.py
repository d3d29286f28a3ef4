"""Part (a), mixed clusters of LLM-PQ's table 3, on the stages of llmpq's own plan for `orca`.

    python -m benchmarks.reproduction.lengths mixed --data REFERENCE_DATA [--cases 3 6 10]

Bits, partition and order of the devices are the plan's, and so is the KV memory: all contestants
have the same. Plans that count on predictions are the part `plans`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.planning.job_cases import Setting as ClusterSetting
from benchmarks.planning.job_cases import settings
from benchmarks.reproduction.lengths.contestants import Memory, contestants
from benchmarks.reproduction.lengths.papers import line, predictions_of
from benchmarks.reproduction.lengths.rows import Rows, recorded
from benchmarks.reproduction.orca.pipelines import ModelledPipeline, Setting, stage_times_of
from planner.lengths import Lengths
from planner.options import PlanOptions
from planner.search.search import find_priced_plan
from planner.workload import Job

CASES = ("3", "6", "10")
"""OPT-30b on three T4 and a V100; OPT-66b on two V100 and two A100, and on four V100."""
MOST_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run(options: argparse.Namespace) -> None:
    """Print a line for each cluster."""
    rows = recorded(options.data, options.rows, options.seed)
    chosen = contestants(rows, list(predictions_of(rows, options.seed)))
    print(f"| cluster | devices | token slots | {' | '.join(each.name for each in chosen)} |")
    print("|---" * (len(chosen) + 3) + "|")
    for setting in settings(options.cases):
        print(line(planned_memory(setting, rows), rows, chosen), flush=True)


def planned_memory(setting: ClusterSetting, rows: Rows) -> Memory:
    """The stages and the KV memory of the fastest plan for these rows under `orca`."""
    pairs = zip(rows.prompts.tolist(), rows.answers.tolist(), strict=True)
    job = Job(len(rows), Lengths.of(pairs, "answers", rows.limit))
    options = PlanOptions.of({"quality": "fast", "policy": "orca"})
    priced = find_priced_plan(setting.cluster, setting.shape, setting.model, job, options)
    devices = ", ".join(stage.accelerator for stage in priced.plan.stages)
    named = Setting(setting.model, len(priced.plan.stages), f"{setting.name}: {devices}")
    times = stage_times_of(priced, MOST_BATCH)
    pipeline = ModelledPipeline(named, priced.plan, times)
    return Memory(pipeline, pipeline.kv_tokens)

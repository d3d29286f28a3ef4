"""The experiments: papers' models, mixed clusters, scarce memory, and predictions of any accuracy.

Every contestant drives the same stages, which take the seconds of the planner's latency model, over
the same rows. Nothing waits and nothing is random but by seed, so the tables are the same
everywhere, but for the share of the scheduler's own seconds, which are this machine's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.lab import header, table_row
from benchmarks.planning.job_cases import Setting as ClusterSetting
from benchmarks.planning.job_cases import settings
from benchmarks.reproduction.lengths.rows import (
    Rows,
    confusion_of,
    long_prompts,
    recorded,
    short_answers,
    tenths,
)
from benchmarks.reproduction.lengths.virtual_job import (
    POLICIES,
    Contestant,
    Memory,
    Predicted,
    contestants,
)
from benchmarks.reproduction.orca.pipelines import (
    ModelledPipeline,
    Setting,
    modelled_pipeline,
    stage_times_of,
)
from benchmarks.reproduction.orca.traces import Lengths
from planner.lengths import Lengths as JobLengths
from planner.options import PlanOptions
from planner.search.find import find_plan
from planner.workload import Job

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


def papers_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", choices=sorted({s.model for s in SETTINGS}))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of the reference data (vicuna)")


def run_papers(options: argparse.Namespace) -> None:
    """Print a table for each kind of rows: a line for each model."""
    kinds = [short_answers(options.rows, options.seed)]
    if options.data is not None:
        kinds.append(recorded(options.data, options.rows, options.seed))
    for rows in kinds:
        chosen = contestants(rows, *predictions_of(rows, options.seed))
        names = " | ".join(each.name for each in chosen)
        print(f"\n{rows.name}:\n")
        print(header(f"model, GPUs | the paper's | token slots | {names}"))
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


def predictions_of(rows: Rows, seed: int) -> tuple[list[Predicted], list[Predicted]]:
    """What is expected of rows, for S³ as published and for `s3`: by a recorded classifier, where
    there is one, and by one as good as the paper's, with ten buckets of one width, or of as many
    rows each. As published the best that is recorded is enough.
    """
    recorded_by: list[Predicted] = []
    if rows.predicted is not None:
        accuracy = rows.accuracy(rows.predicted)
        recorded_by.append((f"recorded ({accuracy:.0%} right)", rows.predicted))
    confusion = confusion_of(ACCURACY, NEAR)
    even, ten = (
        replace(rows, bounds=bounds).expected_by(confusion, seed)
        for bounds in (tenths(rows.limit), rows.deciles)
    )
    name = f"{ACCURACY:.1%} right"
    return recorded_by or [(name, even)], [*recorded_by, (name, ten)]


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
    return table_row(cells)


CASES = ("3", "6", "10")
"""OPT-30b on three T4 and a V100; OPT-66b on two V100 and two A100, and on four V100."""
MIXED_BATCH = 256


def mixed_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run_mixed(options: argparse.Namespace) -> None:
    """Print a line for each cluster."""
    rows = recorded(options.data, options.rows, options.seed)
    chosen = contestants(rows, *predictions_of(rows, options.seed))
    print(header(f"cluster | devices | token slots | {' | '.join(each.name for each in chosen)}"))
    for setting in settings(options.cases):
        print(line(planned_memory(setting, rows), rows, chosen), flush=True)


def planned_memory(setting: ClusterSetting, rows: Rows) -> Memory:
    """The stages and the KV memory of the fastest plan for these rows under `orca`."""
    pairs = zip(rows.prompts.tolist(), rows.answers.tolist(), strict=True)
    job = Job(len(rows), JobLengths.of(pairs, "answers", rows.limit))
    options = PlanOptions.of({"quality": "fast", "policy": "orca"})
    priced = find_plan(setting.cluster, setting.shape, setting.model, job, options)
    devices = ", ".join(stage.accelerator for stage in priced.plan.stages)
    named = Setting(setting.model, len(priced.plan.stages), f"{setting.name}: {devices}")
    times = stage_times_of(priced, MIXED_BATCH)
    pipeline = ModelledPipeline(named, priced.plan, times)
    return Memory(pipeline, pipeline.kv_tokens)


MOST_REQUESTS = (2, 4, 8, 16, 32, 64)
SCARCE = (
    Setting("llama-30b", 1, "LLaMA 33B", GPU, MOST_BATCH),
    Setting("opt-66b", 4, "", GPU, MOST_BATCH),
)


def memory_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", choices=sorted({s.model for s in SCARCE}))
    parser.add_argument("--requests", nargs="+", type=int, default=MOST_REQUESTS)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="which rows and prompts are drawn")
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run_memory(options: argparse.Namespace) -> None:
    """Print a table for each setting: tokens per second by memory; in brackets times blocks."""
    rows = recorded(options.data, options.rows, options.seed)
    chosen = contestants(rows, *predictions_of(rows, options.seed))
    for setting in SCARCE:
        if options.models is not None and setting.model not in options.models:
            continue
        pipeline = pipeline_for(setting, rows)
        print(f"\n{setting.model} on {setting.gpus} {setting.gpu}, {rows.name}:\n")
        print(header(["requests", "token slots", *(each.name for each in chosen)]))
        for requests in options.requests:
            memory = Memory(pipeline, requests * rows.longest)
            speeds = [each.best(memory, rows).tokens_per_s for each in chosen]
            cells = [f"{speed:.0f} ({speed / speeds[-1]:.2f})" for speed in speeds]
            print(table_row([requests, memory.kv_tokens, *cells]), flush=True)


ACCURACIES = (1.0, 0.986, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LONGEST_REQUESTS = 8
"""Of the longest requests, so many have room: memory is scarce, and predicting worth while."""
SETTING = Setting("llama-30b", 1, "LLaMA 33B", GPU, MOST_BATCH)


def accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")


def run_accuracy(options: argparse.Namespace) -> None:
    """Print a accuracy_table for each kind of rows."""
    for rows in (
        recorded(options.data, options.rows, options.seed),
        short_answers(options.rows, options.seed),
    ):
        accuracy_table(replace(rows, bounds=rows.deciles), options.seed)


def accuracy_table(rows: Rows, seed: int) -> None:
    """Print tokens per second by accuracy, as shares of Oracle's."""
    pipeline = pipeline_for(SETTING, rows)
    memory = Memory(pipeline, LONGEST_REQUESTS * rows.longest)
    longest, _, oracle, blocks = (
        each.best(memory, rows).tokens_per_s for each in contestants(rows, (), ())
    )
    print(
        f"\n{rows.name}, {SETTING.model} on {SETTING.gpu}, {memory.kv_tokens} token slots: Oracle "
        f"{oracle:.0f} tokens/s; of that, reserving for the longest {longest / oracle:.2f}, blocks "
        f"on demand {blocks / oracle:.2f}.\n"
    )
    print(header("right | near | preempted a row | far | preempted a row"))
    for accuracy in ACCURACIES:
        cells = [f"{accuracy:.1%}"]
        for near in (1.0, 0.0):
            expected = rows.expected_by(confusion_of(accuracy, near), seed)
            run = Contestant("s3", "foreseen", expected).best(memory, rows)
            cells += [
                f"{run.tokens_per_s / oracle:.2f}",
                f"{run.preemptions / len(rows):.2f}",
            ]
        print(table_row(cells), flush=True)


SHORT_JOBS = (64, 256)
PROMPTED = (
    Setting("llama-13b", 1, "", GPU, MOST_BATCH),
    Setting("opt-66b", 4, "", GPU, MOST_BATCH),
)
BATCHES, PARTS = (8, 16, 32), (0, 128)


def prompts_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--seed", type=int, default=0)


def run_prompts(options: argparse.Namespace) -> None:
    """Print tokens per second of jobs that have room at once, for prompts whole and in parts, with
    the micro-batches that suit each policy best.
    """
    policies = ("longest", "published", "foreseen")
    print(header(f"rows | model, GPUs | parts | {' | '.join(POLICIES[each] for each in policies)}"))
    for count, setting, part in product(SHORT_JOBS, PROMPTED, PARTS):
        rows = long_prompts(count, options.seed)
        memory = whole_memory(setting, rows)
        cells = [str(count), f"{setting.model}, {setting.gpus}", str(part or "whole")]
        first = 0.0
        for kind in policies:
            contestant = Contestant(kind, kind, rows.answers, part_tokens=part)
            speed = max(contestant.run(memory, rows, most).tokens_per_s for most in BATCHES)
            first = first or speed
            cells.append(f"{speed:.1f} ({speed / first:.2f})")
        print(table_row(cells), flush=True)

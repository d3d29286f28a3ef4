"""Point 4: plans for `s3` beside those for `orca`, what predicted lengths bring before a run.

    python -m benchmarks.lengths plans --data REFERENCE_DATA

One table, as Markdown: requests in flight, mean bits and predicted tokens per second of the fastest
plans for real lengths, by a real classifier's predictions (of Vicuna-13B's answers) and by an
oracle; with prompts as they are (conversations), and a tenth as long (questions).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.job_cases import LONGEST_OUTPUT, REAL, RowLengths, settings
from benchmarks.lengths.rows import CLASS_QUANTILES
from benchmarks.token_slots import CASES, PROMPTS, mean_bits
from planner.assumed_predictor import ORACLE, AssumedPredictor
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.search import find_plan
from planner.workload import Job

PARTS = (1, 10)
"""What the lengths of prompts are divided by."""

PREDICTIONS = Path("lengths") / "vicuna13b_predictions.csv"


def classifier(data: Path) -> AssumedPredictor:
    """The predictor of the file, which names one of five classes of answers up to 511 tokens."""
    with (data / PREDICTIONS).open(encoding="utf-8", newline="") as file:
        rows = [(int(r["output_tokens"]), int(r["predicted_class"])) for r in csv.DictReader(file)]
    outputs, predicted = np.array([row for row in rows if 1 <= row[0] <= LONGEST_OUTPUT]).T
    buckets = (*np.quantile(outputs, CLASS_QUANTILES).astype(int).tolist(), LONGEST_OUTPUT)
    confusion = np.zeros((len(buckets), len(buckets)), dtype=np.int64)
    np.add.at(confusion, (np.searchsorted(buckets, outputs), predicted), 1)
    return AssumedPredictor(PREDICTIONS.name, buckets, tuple(map(tuple, confusion.tolist())))


def plans(
    data: Path, cases: Sequence[str], parts: Sequence[int]
) -> Iterator[tuple[str, list[PlanSpec]]]:
    """Plans for `orca`, for `s3` by the classifier, and by the oracle, for each cluster, with these
    parts of the prompts' lengths.
    """
    for part, setting in product(parts, settings(cases)):
        lengths = RowLengths(REAL, data).job(PROMPTS).lengths
        prompts = tuple(-(-tokens // part) for tokens in lengths.prompt_tokens)
        lengths = replace(lengths, prompt_tokens=prompts)
        found = []
        for predictor in (None, classifier(data), AssumedPredictor.named(ORACLE, lengths)):
            policy = "orca" if predictor is None else "s3"
            options = PlanOptions.of({"quality": "fast", "policy": policy})
            asked = Job(PROMPTS, lengths, predictor=predictor)
            found.append(find_plan(setting.cluster, setting.shape, setting.model, asked, options))
        tokens = f"prompts of {lengths.mean_prompt:.0f} tokens"
        yield f"{setting.name}, {setting.model}, {tokens}", found


def cell(plan: PlanSpec, beside: PlanSpec) -> str:
    """Requests in flight, mean bits and tokens per second, and how many times those `beside`."""
    rate = plan.predicted.tokens_per_s
    ratio = "" if plan is beside else f" ({rate / beside.predicted.tokens_per_s:.2f})"
    return f"{plan.workload.global_batch} x {mean_bits(plan):.1f} bit: {rate:.1f}{ratio}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--parts", type=int, nargs="+", default=PARTS)


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    right = classifier(options.data).accuracy
    print(f"| job | orca | s3, right class in {right:.0%} | s3, oracle |", flush=True)
    print("|---|---|---|---|", flush=True)
    for name, found in plans(options.data, options.cases, options.parts):
        cells = " | ".join(cell(each, found[0]) for each in found)
        print(f"| {name} | {cells} |", flush=True)

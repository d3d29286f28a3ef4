"""Predictors of output lengths: how well and how fast, and what they cost beside a run.

    python -m benchmarks.lengths_predictors [--rows 2000] [--rounds 3] [--parts accuracy run]

*accuracy*: prompts whose answers' lengths depend on what they ask for, with noise that nobody can
know; each predictor learns from four fifths. *run*: the demo model's own answers up to a full stop;
a predictor learns from them, and the same job runs with the predictor beside the stages, in turns
with a run that reads the same predictions from a file, so that both have the same schedule.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import processor_name
from llmpq import Cluster, Plan, Workload
from llmpq.lengths.buckets import Agreement
from llmpq.lengths.finished_rows import FinishedRow, LearntRow, as_prompts
from llmpq.lengths.folder import save_predictor, tokenizer_digest
from llmpq.lengths.predictor import Bucketed
from llmpq.lengths.training import KINDS, Judgement, Kind, ServedIds, TrainingOptions, train
from llmpq.rows.row import Row
from planner.model.finding import model_shape

MODEL = Path("examples/demo_model")
CLUSTER = "cluster_specs/demo_mixed_cpu.yaml"
NEW_TOKENS = 48
LONGEST = 512
TOPICS = ("birds", "generators", "rome", "rice", "mars", "decorators", "the sea", "tuples")
ASKED = (
    ("Is {} better than {}? Answer yes or no.", 4, 3),
    ("What is {} in one sentence, compared with {}?", 30, 8),
    ("Summarize {} and {} briefly.", 80, 20),
    ("List {number} steps from {} to {}:", 20, 4),
    ("Write a function for {} that uses {}.", 180, 40),
    ("Write an essay of {number}0 words on {} and {}.", 14, 2),
)
"""What prompts ask for, the mean tokens of answers and their deviation; of those with a number,
for each unit of it."""


def synthetic(count: int, seed: int = 0) -> list[FinishedRow]:
    """Rows whose answers are as long as their prompts ask for."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        text, mean, deviation = draw.choice(ASKED)
        times = draw.randint(2, 30)
        prompt = text.format(*draw.sample(TOPICS, 2), number=times)
        units = times if "{number}" in text else 1
        tokens = round(units * draw.gauss(mean, deviation))
        rows.append(FinishedRow(Row(f"s{number}", prompt), min(LONGEST, max(1, tokens))))
    return rows


def ids_of_model() -> ServedIds:
    vocab_size = model_shape(str(MODEL)).vocab_size
    return ServedIds(tokenizer_digest(MODEL, vocab_size), vocab_size)


def accuracy(rows: int) -> Iterator[str]:
    """Markdown of the first part."""
    learnt = as_prompts(synthetic(rows), MODEL)
    yield "| predictor | accuracy | too short | buckets off | calibration error | ms a prompt |"
    yield "|---|---|---|---|---|---|"
    judged: Judgement | None = None
    for kind in KINDS:
        _, judged = train(learnt, TrainingOptions(kind=kind), ids_of_model())
        yield f"| {kind} {_cells(judged.predictor)} | {judged.ms_per_prompt:.2f} |"
    assert judged is not None
    yield f"| most frequent bucket {_cells(judged.majority)} | |"
    yield f"| longest {_cells(judged.longest)} | |"


def _cells(found: Agreement) -> str:
    off = "" if found.wrong_distance is None else f"{found.wrong_distance:.2f}"
    error = "" if found.calibration_error is None else f"{found.calibration_error:.3f}"
    return f"| {found.accuracy:.1%} | {found.too_short:.1%} | {off} | {error}"


def beside_a_run(times: int, rounds: int, kinds: Sequence[Kind]) -> Iterator[str]:
    """Markdown of the second part: `times` the demo prompts, `rounds` runs with each of `kinds`."""
    lines = Path("examples/demo_prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    rows = [
        {"custom_id": f"{turn}-{place}", "prompt": prompt, "temperature": 0.8, "seed": turn}
        for turn in range(times)
        for place, prompt in enumerate(prompts)
    ]
    plan = Cluster.from_yaml(CLUSTER).plan(MODEL, Workload(16, 192, NEW_TOKENS))
    with tempfile.TemporaryDirectory() as name:
        learnt = _answers(plan, rows)
        yield "| predictor | accuracy | tokens/s beside | tokens/s from a file | ratio | said |"
        yield "|---|---|---|---|---|---|"
        for kind in kinds:
            yield _compared(plan, rows, _trained(kind, learnt, Path(name)), rounds)


@dataclass(frozen=True)
class Trained:
    """A predictor's folder, a file of the same predictions, and its accuracy on held-out rows."""

    folder: Path
    trace: Path
    accuracy: float


def _trained(kind: Kind, learnt: Sequence[LearntRow], folder: Path) -> Trained:
    """Train one on the answers `learnt`, and write what it expects of all of them."""
    model, judged = train(learnt, TrainingOptions(kind=kind), ids_of_model())
    found = Trained(folder / kind, folder / f"{kind}.csv", judged.predictor.accuracy)
    save_predictor(found.folder, model, judged.confusion)
    prompts = [replace(each.prompt, limit=NEW_TOKENS) for each in learnt]
    expected = Bucketed(model).expect(prompts)
    told = (f"{p.custom_id},{tokens}\n" for p, tokens in zip(prompts, expected, strict=True))
    found.trace.write_text("custom_id,expected_tokens\n" + "".join(told))
    return found


def _compared(plan: Plan, rows: Sequence[Any], predictor: Trained, rounds: int) -> str:
    """A line of the table: both runs in turns."""
    beside, file = [], []
    said = ""
    for _ in range(rounds):
        rate, said = _rate(plan, rows, str(predictor.folder))
        beside.append(rate)
        file.append(_rate(plan, rows, f"trace:{predictor.trace}")[0])
    ratios = [a / b for a, b in zip(beside, file, strict=True)]
    return (
        f"| {predictor.folder.name} | {predictor.accuracy:.1%} | {median(beside):.0f} | "
        f"{median(file):.0f} | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
        f"{said} |"
    )


def _answers(plan: Plan, rows: Sequence[Any]) -> list[LearntRow]:
    """The rows with the lengths that the model gives them."""
    with plan.run(rows, policy="s3", stop=["."]) as results:
        tokens = {each.custom_id: len(each.token_ids) for each in results}
    finished = [
        FinishedRow(Row(row["custom_id"], row["prompt"]), tokens[row["custom_id"]]) for row in rows
    ]
    return as_prompts(finished, MODEL)


def _rate(plan: Plan, rows: Sequence[Any], predictor: str) -> tuple[float, str]:
    """Tokens per second of a run, and what the predictor says in the end."""
    said: list[str] = []
    options = {"policy": "s3", "predictor": predictor, "stop": ["."]}
    with plan.run(rows, on_event=lambda event: said.append(event.text), **options) as results:
        for each in results:
            assert each.error is None, each.error
        summary = results.summary
    assert summary is not None
    return summary.tokens_per_s, said[-1] if said else ""


def main() -> None:
    """Print the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--times", type=int, default=6, help="the demo prompts so many times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["accuracy", "run"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(processor_name())
    if "accuracy" in options.parts:
        print("\n".join(accuracy(options.rows)), flush=True)
    if "run" in options.parts:
        for line in beside_a_run(options.times, options.rounds, options.kinds):
            print(line, flush=True)


if __name__ == "__main__":
    main()

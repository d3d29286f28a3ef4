"""The jobs of `job_plan`: clusters, models, and lengths of prompts and answers."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.planning.planner import CLUSTERS, PAPER
from planner.cluster.spec import ClusterSpec
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.workload import Job

PROMPTS = 3000
ALIKE, SHORT, REAL, LOGNORMAL = "alike", "short", "real", "lognormal"
KINDS = (ALIKE, SHORT, REAL, LOGNORMAL)
PROMPT_LENGTH, NEW_TOKENS = 512, 100  # LLM-PQ section 6.1
SAME = {ALIKE: (PROMPT_LENGTH, NEW_TOKENS), SHORT: (200, 100)}
LONGEST_PROMPT, LONGEST_OUTPUT = 1536, 511
"""Together within OPT's 2,048 positions. 83 % of the conversations' prompts are no longer, and no
answer of the file is."""
THETA = 1.0  # llmpq's own, before it knew qualities

TODAY: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("4 T4", "qwen2.5-14b", {"T4-16GB": 4}),
    ("2 V100-16GB, A100-40GB", "llama-3-8b", {"V100-SXM2-16GB": 2, "A100-SXM4-40GB": 1}),
    ("2 P100, 2 T4", "qwen2.5-7b", {"P100-PCIE-12GB": 2, "T4-16GB": 2}),
)
"""Today's models: what the cluster is called, the model, and its GPUs, one node for each kind."""
INTERNODE_GBIT_PER_S = 100.0

Pairs = Sequence[tuple[int, int]]
"""Prompt and output tokens of rows."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A model on a cluster; `theta` is that of plans of one batch, `values` the cluster file's."""

    name: str
    model: str
    theta: float
    values: dict[str, Any]

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster."""
        return ClusterSpec.from_dict(self.values, self.name)

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return model_shape(self.model)


@dataclass(frozen=True)
class RowLengths:
    """Where lengths of rows come from: `kind`, and the folder of the reference data."""

    kind: str
    data: Path

    def draw(self, rows: int, seed: int) -> Pairs:
        """Prompt and output tokens of `rows` rows."""
        if self.kind in SAME:
            return [SAME[self.kind]] * rows
        random = np.random.default_rng(seed)
        if self.kind == REAL:
            prompts, outputs = real_lengths(self.data)
            drawn = random.choice(prompts, rows), random.choice(outputs, rows)
        else:
            drawn = (
                _lognormal(random, rows, PROMPT_LENGTH, LONGEST_PROMPT),
                _lognormal(random, rows, NEW_TOKENS, LONGEST_OUTPUT),
            )
        return list(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True))

    def job(self, prompts: int, seed: int = 0) -> Job:
        """A job of so many rows; slots have room for the longest that may come."""
        if self.kind in SAME:
            return Job.of(prompts, *SAME[self.kind])
        pairs = self.draw(prompts, seed)
        return Job(prompts, Lengths.of(pairs, "answers", LONGEST_OUTPUT))


@cache
def real_lengths(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of prompts (conversations in Azure) and of answers (of Vicuna-13B) in the files."""
    prompts = _column(data / "traces" / "splitwise_conv.csv", "num_prefill_tokens")
    outputs = _column(data / "lengths" / "vicuna13b_predictions.csv", "output_tokens")
    return prompts[prompts <= LONGEST_PROMPT], outputs[outputs <= LONGEST_OUTPUT]


def _column(path: Path, name: str) -> np.ndarray:
    with path.open(encoding="utf-8", newline="") as file:
        found = np.array([int(row[name]) for row in csv.DictReader(file)])
    return found[found >= 1]


def _lognormal(random: np.random.Generator, rows: int, median: float, longest: int) -> np.ndarray:
    drawn = random.lognormal(math.log(median), 0.8, rows).round().astype(int)
    return np.clip(drawn, 1, longest)


def settings(names: Sequence[str]) -> Iterator[Setting]:
    """The paper's clusters and today's models, or those whose number or name is among `names`."""
    for number, (model, theta) in PAPER.items():
        path = CLUSTERS / f"paper_{number:02}.yaml"
        if not names or str(number) in names:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            yield Setting(f"paper {number}", model, theta, values)
    for name, model, counts in TODAY:
        if not names or model in names:
            nodes = [
                {"name": f"node{i}", "accelerators": {kind: count}}
                for i, (kind, count) in enumerate(counts.items())
            ]
            network = {"internode_gbit_per_s": INTERNODE_GBIT_PER_S}
            values = {"name": model, "nodes": nodes, "network": network}
            yield Setting(name, model, THETA, values)


def sweep_numbers(most: int, step: float) -> list[int]:
    """Numbers from 1 to `most`, each at most `step` times the one before or one more."""
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, max(numbers[-1] + 1, int(numbers[-1] * step))))
    return numbers


def best_number(
    rate: Callable[[int], float | None], most: int, coarse: float, fine: float
) -> tuple[int, float] | None:
    """The number in flight of the highest rate, and the rate; None where none fits.

    A number has no rate where it does not fit, and all larger ones do not either. All of a coarse
    sweep are tried and the greatest that fits, then ever nearer neighbours of the best.
    """
    rates: dict[int, float | None] = {}

    def at(number: int) -> float:
        if number not in rates:
            rates[number] = rate(number)
        found = rates[number]
        return -math.inf if found is None else found

    low, high = 0, most + 1
    for number in sweep_numbers(most, coarse):
        if math.isinf(at(number)):
            high = number
            break
        low = number
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if math.isinf(at(middle)) else (middle, high)
    if not low:
        return None
    step = coarse
    while True:
        step = max(fine, step**0.5)
        best = max(rates, key=at)
        near = (min(best - 1, int(best / step)), max(best + 1, math.ceil(best * step)))
        new = [number for number in near if 1 <= number <= low and number not in rates]
        if not new and step == fine:
            return best, at(best)
        for number in new:
            at(number)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan

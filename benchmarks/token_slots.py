"""Token slots of the policy `orca` against equal slots: requests at once, tokens per second, parts.

Three tables, as Markdown: how many requests one KV cache holds at once by the real scheduler in
virtual time, the predicted tokens per second of plans for either policy, and what parts of prompts
(`prefill_chunk_tokens`) do to tokens per second and to the seconds between two tokens.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.messages import FinishReason, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.orca import OrcaScheduler
from actors.schedule.scheduler import QueueSizes
from benchmarks.job_cases import ALIKE, REAL, RowLengths, Setting, settings
from llmpq.workload.input_job import job_of_input
from planner.explanation.planned_assignment import PlannedAssignment, planned_assignment
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.schedule.orca import MixedPass
from planner.search.search import PricedPlan, find_priced_plan
from planner.workload import HOLES, Job

EQUAL_SLOTS, STAGES = 32, 4
ROWS, PROMPTS = 2000, 3000
MODEL = "opt-13b"
CASES = ("3", "9", "qwen2.5-14b")
CHUNKS = (0, 32, 64, 128, 256, 512)


class Rows(NamedTuple):
    """Rows by prompt, output, and the most new tokens that each may get."""

    name: str
    prompts: Sequence[int]
    outputs: Sequence[int]
    limits: Sequence[int]


@dataclass
class _Queue:
    """A pipeline without a clock, in which every request runs all of its output tokens."""

    rows: Rows
    stages: int
    moved: int = 0

    def __post_init__(self) -> None:
        self._row: dict[int, int] = {}  # by slot

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        """Note the moves and the requests that begin."""
        self.moved += sum(move.tokens for move in batch.moves)
        self._row |= {each.slot: int(each.custom_id) for each in batch.admitted}
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        """A token for every request that has its whole prompt."""
        rows = handle.sampled_rows
        ends = (handle.starts + handle.counts)[rows]
        reasons: list[FinishReason | None] = [
            "length" if end - self.rows.prompts[row] + 1 == self.rows.outputs[row] else None
            for end, row in zip(
                ends.tolist(), (self._row[s] for s in handle.slots[rows].tolist()), strict=True
            )
        ]
        return Sampled(np.zeros(len(reasons), dtype=np.int64), tuple(reasons))


def requests_at_once(rows: Rows, holes: float) -> str:
    """A row of the first table: one KV cache with equal slots, and with token slots of which the
    share `holes` stays free.
    """
    totals = [p + n for p, n in zip(rows.prompts, rows.limits, strict=True)]
    kv_tokens, count = EQUAL_SLOTS * max(totals), len(totals)
    n_slots = round((1 - holes) * kv_tokens)
    sizes = QueueSizes(STAGES * count, 1, count, max(totals), "orca", kv_tokens, n_slots, count)
    queue = _Queue(rows, STAGES)
    scheduler = OrcaScheduler(sizes, STAGES)
    driver = PipelineDriver(scheduler, queue)
    driver.add(
        [Request(str(i), (0,) * rows.prompts[i], rows.limits[i], Sampling()) for i in range(count)],
        last=True,
    )
    at_once: list[int] = []
    while scheduler.waiting:
        if driver.submit_next() is None:
            driver.take_back()
            at_once.append(scheduler.in_slots)
    steady = at_once[len(at_once) // 10 :]  # the slots have been filled by then
    moved = queue.moved / (sum(rows.prompts) + sum(rows.outputs))
    return (
        f"| {rows.name} | {holes:.0%} | {np.mean(totals):.0f} of {max(totals)} | {EQUAL_SLOTS} | "
        f"{np.mean(steady):.0f} | {np.quantile(steady, 0.1):.0f} | "
        f"{np.mean(steady) / EQUAL_SLOTS:.1f} | {moved:.2f} |"
    )


def demo_rows(new_tokens: int) -> Rows:
    """The demo's prompts, each of which gets all of its new tokens."""
    job = job_of_input("examples/demo_prompts.jsonl", "examples/demo_model", new_tokens)
    prompts, outputs = (each.tolist() for each in job.ordinary.lengths.rows(ROWS))
    return Rows(f"demo, {new_tokens} new tokens", prompts, outputs, outputs)


def conversations(data: Path, one_limit: bool) -> Rows:
    """Conversations, their lengths scaled so that the longest fills the model's positions."""
    with (data / "traces" / "splitwise_conv.csv").open(encoding="utf-8", newline="") as file:
        pairs = [
            (int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))
            for row in csv.DictReader(file)
        ]
    longest = max(map(sum, pairs))
    factor = model_shape(MODEL).max_positions / longest
    scaled = [(max(1, int(p * factor)), max(1, int(n * factor))) for p, n in pairs[:ROWS]]
    prompts, outputs = (list(each) for each in zip(*scaled, strict=True))
    limits = [max(outputs)] * len(outputs) if one_limit else outputs
    which = "one limit" if one_limit else "limits of their own"
    return Rows(f"conversations, {which}", prompts, outputs, limits)


def mean_bits(plan: PlanSpec) -> float:
    """Mean bits of a layer."""
    return sum(sum(stage.bitwidths) for stage in plan.stages) / plan.model.layers


def planned(setting: Setting, job: Job, **options: object) -> PricedPlan:
    """The fastest plan of a job."""
    chosen = PlanOptions.of({"quality": "fast", **options})
    return find_priced_plan(setting.cluster, setting.shape, setting.model, job, chosen)


def token_gaps(found: PlannedAssignment) -> tuple[float, float]:
    """Mean and 99th percentile of the seconds between two tokens of a request."""
    simulated = found.simulate()
    returned_s = np.insert(simulated.link_end_s[:, -1], 0, 0.0)
    gaps = [
        (returned_s[number + 1] - returned_s[each.results_before], each.decodes)
        for number, each in enumerate(simulated.passes)
        if isinstance(each, MixedPass) and each.decodes
    ]
    seconds, weights = np.array(sorted(gaps)).T
    share = weights.cumsum() / weights.sum()
    p99 = float(seconds[np.searchsorted(share, 0.99)])
    return float((seconds * weights).sum() / weights.sum()), p99


def in_parts(found: PricedPlan, chunk: int) -> PlannedAssignment:
    """The plan with prompts in parts of so many tokens."""
    policy = replace(found.plan.policy, prefill_chunk_tokens=chunk)
    return planned_assignment(replace(found.plan, policy=policy), found.costs)


def _plans(data: Path, kinds: Sequence[str]) -> Iterator[tuple[str, PricedPlan, PricedPlan]]:
    for setting in settings(CASES):
        for kind in kinds:
            job = RowLengths(kind, data).job(PROMPTS)
            name = f"{setting.name}, {setting.model}, {kind}"
            yield name, planned(setting, job), planned(setting, job, policy="orca")


def _plan_text(plan: PlanSpec) -> str:
    bits, rate = mean_bits(plan), plan.predicted.tokens_per_s
    return f"{plan.workload.global_batch} x {bits:.1f} bit: {rate:.1f}"


def show(data: Path, kinds: Sequence[str], say: Callable[[str], None] = print) -> None:
    """Print the three tables."""
    say(
        "| rows | holes | mean of longest | equal slots | at once | 10th percentile | ratio "
        "| moved |"
    )
    say("|---|---|---|---|---|---|---|---|")
    for rows in (demo_rows(48), conversations(data, False), conversations(data, True)):
        for holes in (0.0, HOLES):
            say(requests_at_once(rows, holes))
    say("\n| job | static | orca | its micro-batch | ratio |\n|---|---|---|---|---|")
    plans = []
    for name, static, orca in _plans(data, kinds):
        ratio = orca.plan.predicted.tokens_per_s / static.plan.predicted.tokens_per_s
        both = f"{_plan_text(static.plan)} | {_plan_text(orca.plan)}"
        most = orca.plan.policy.max_batch_size
        say(f"| {name} | {both} | {most} | {ratio:.2f} |")
        plans.append((name, orca))
    say("\n| job | " + " | ".join(f"{chunk or 'whole'}" for chunk in CHUNKS) + " |")
    say("|---|" + "---|" * len(CHUNKS))
    for name, orca in plans:
        cells = []
        for chunk in CHUNKS:
            found = in_parts(orca, chunk)
            mean_s, p99_s = token_gaps(found)
            cells.append(f"{found.forecast().tokens_per_s:.1f}; {mean_s:.2f}, {p99_s:.2f} s")
        say(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--kinds", nargs="+", default=[ALIKE, REAL])
    options = parser.parse_args()
    show(options.data, options.kinds, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()

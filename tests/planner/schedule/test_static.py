"""The schedule of jobs against the scheduler and driver that run them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.messages import FinishReason, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from planner.schedule.passes import JobRows
from planner.schedule.static import JobSchedule
from planner.workload import MicroBatches
from tests.actors.driving import drive

Submitted = tuple[str, tuple[int, ...], int, int]
"""Phase, prompts of a prefill or sum of contexts in a decode step, requests, results before."""


@dataclass
class RecordingPipeline:
    """Notes what the driver submits; ends requests at the tokens in `outputs`, by their id."""

    stages: int
    outputs: list[int]
    submitted: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    results: int = 0
    request_of: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        for admission in batch.admitted:
            self.request_of[admission.slot] = int(admission.custom_id)
            self.tokens[int(admission.custom_id)] = 0
        phase = "prefill" if batch.admitted else "decode"
        lengths = batch.counts if batch.admitted else batch.starts
        self.submitted.append((phase, tuple(lengths.tolist()), self.results))
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        self.results += 1
        reasons: list[FinishReason | None] = []
        for slot in handle.slots.tolist():
            request = self.request_of[slot]
            self.tokens[request] += 1
            ends = self.tokens[request] == self.outputs[request]
            reasons.append("length" if ends else None)
        return Sampled(np.full(len(reasons), 7, dtype=np.int64), tuple(reasons))


def random_outputs(rng: np.random.Generator, kind: str, rows: int) -> list[int]:
    mean = int(rng.integers(1, 30))
    drawn = {
        "constant": np.full(rows, mean),
        "uniform": rng.integers(1, 2 * mean + 1, rows),
        "heavy-tailed": np.minimum(np.ceil(rng.lognormal(np.log(mean), 1.2, rows)), 200),
        "one": np.ones(rows),
        "few kinds": rng.choice([1, 2, mean + 1], rows),
    }
    return [int(each) for each in drawn[kind]]


@pytest.mark.parametrize("kind", ["constant", "uniform", "heavy-tailed", "one", "few kinds"])
@pytest.mark.parametrize("seed", range(12))
def test_every_decision_is_that_of_the_scheduler(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, slots = int(rng.integers(1, 7)), int(rng.integers(1, 41))
    sizes = MicroBatches(int(rng.integers(1, slots + 2)), int(rng.integers(1, slots + 2)))
    rows = int(rng.integers(1, 6 * slots + 1))
    outputs = random_outputs(rng, kind, rows)
    prompts = rng.integers(1, 50, rows).tolist() if seed % 2 else [9] * rows
    requests = [
        Request(str(i), (3,) * prompt, output, Sampling())
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    recorded = RecordingPipeline(stages, outputs)
    scheduler = StaticScheduler(QueueSizes(slots, sizes.prefill, sizes.decode, 64), stages)
    scheduler.add(requests)
    for _ in drive(scheduler, recorded):
        pass
    schedule = JobSchedule(JobRows(prompts, outputs), slots, sizes, stages)
    passes = list(schedule.passes())
    assert len(passes) == len(recorded.submitted)
    for each, (phase, lengths, results) in zip(passes, recorded.submitted, strict=True):
        mean = int(np.floor(np.mean(lengths) + 0.5))
        assert (each.phase, each.requests, each.results_before) == (phase, len(lengths), results)
        if phase == "prefill":
            assert each.prompts in ((), lengths)
            assert (each.all_tokens, each.tokens) == (sum(lengths), mean)
        else:
            assert (each.all_tokens, each.context_length) == (len(lengths), mean)
    assert schedule.prefilled == rows
    again = JobSchedule(JobRows(prompts, outputs), slots, sizes, stages)
    assert list(again.phases()) == [each.phase for each in passes]

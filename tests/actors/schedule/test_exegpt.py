"""The policy `exegpt` against a simulation of RRA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from actors.messages import Finished, MicroBatch, Request, Sampled
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from actors.schedule.scheduler import QueueSizes
from planner.schedule.passes import TurnSizes
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError
from tests.actors.driving import run_dry, served
from tests.actors.schedule.exegpt_cases import queue_sizes_of
from tests.actors.schedule.exegpt_simulation import Plan, Query, RraSimulation
from tests.actors.schedule.token_pipeline import TokenPipeline, assert_right_tokens, request
from tests.seeds import seeds


@dataclass
class Setting:
    """Requests with their outputs and arrivals, and a pipeline for them."""

    stages: int
    schedule: RequestSchedule
    kv_tokens: int
    requests: list[Request]
    outputs: list[int]
    arrivals_s: list[float]
    worker_s: list[float]

    @classmethod
    def random(cls, seed: int, arrivals_s: float) -> Setting:
        rng = np.random.default_rng(seed)
        stages, decode = int(rng.integers(1, 5)), int(rng.integers(1, 40))
        count, longest = int(rng.integers(1, 120)), int(rng.integers(2, 20))
        prompts, most = rng.integers(1, longest, (2, count)).tolist()
        schedule = RequestSchedule(
            "rra",
            int(rng.integers(1, decode + 1)),
            decode,
            int(rng.integers(1, 9)),
            int(rng.integers(1, 6)),
            int(rng.integers(1, 6)),
            float(rng.integers(2, 2 * longest)) / 2,
            float(rng.choice([0.05, 0.1, 0.25])),
        )
        replays = int(rng.integers(0, count + 1)) if seed % 3 == 0 else 0
        done = [int(rng.integers(0, n)) if i < replays else 0 for i, n in enumerate(most)]
        return cls(
            stages,
            schedule,
            int(rng.integers(2 * longest, 3 * longest * decode)),
            [request(i, *each) for i, each in enumerate(zip(prompts, most, done, strict=True))],
            [int(rng.integers(g + 1, n + 1)) for n, g in zip(most, done, strict=True)],
            np.sort(np.round(rng.uniform(0, arrivals_s, count))).tolist(),
            rng.uniform(0.2, 2.0, stages).tolist(),
        )

    def seconds(self, worker: int, tokens: int) -> float:
        return self.worker_s[worker] * (1 + tokens / 7)

    def sizes(self) -> QueueSizes:
        sizes = TurnSizes.of(self.schedule, self.kv_tokens)
        return queue_sizes_of(sizes, self.kv_tokens)

    def pipeline(self) -> TokenPipeline:
        outputs = {r.custom_id: n for r, n in zip(self.requests, self.outputs, strict=True)}
        pipeline = TokenPipeline(self.stages, self.kv_tokens, outputs)
        pipeline.expect(self.requests)
        return pipeline

    def check(self, pipeline: TokenPipeline, finished: Sequence[Finished]) -> None:
        """Hold every micro-batch, and the tokens that came out, against the simulation."""
        made = self.schedule
        plan = Plan(
            made.prefill_requests,
            made.decode_requests,
            made.decode_steps,
            made.decode_micro_batches,
            made.prefill_micro_batch,
            Fraction(made.mean_prompt_tokens),
            Fraction(str(made.tolerance)),
        )
        simulation = RraSimulation(plan, self.stages, self.kv_tokens, self.seconds)
        rows = zip(self.requests, self.arrivals_s, self.outputs, strict=True)
        wanted = simulation.run(
            [
                Query(
                    each.custom_id,
                    at_s,
                    len(each.prompt_ids),
                    len(each.prompt_ids) + each.max_new_tokens,
                    outputs,
                    len(each.generated),
                )
                for each, at_s, outputs in rows
            ]
        )
        found = [tuple(batch.counts.tolist()) for batch in pipeline.batches]
        assert pipeline.names == [each.names for each in wanted]
        assert found == [each.tokens for each in wanted]
        assert [each.custom_id for each in finished] == simulation.completed
        assert_right_tokens(finished, self.requests, self.outputs)


def fed(case: Setting, pipeline: TokenPipeline, chunk: int) -> Iterator[Finished]:
    """As a live run that waits is fed: by chunks, whenever more are wanted."""
    scheduler = RraScheduler(case.sizes(), case.stages)
    for finished in run_dry(PipelineDriver(scheduler, pipeline), case.requests, chunk):
        yield from finished


@pytest.mark.parametrize("seed", seeds(8, 15))
def test_a_queue_is_served_as_the_paper_says(seed: int) -> None:
    """Whatever the chunks are in which the queue is filled."""
    case = Setting.random(seed, arrivals_s=0.0)
    pipeline = case.pipeline()
    chunk = int(np.random.default_rng(seed + 1000).integers(1, 50))
    case.check(pipeline, list(fed(case, pipeline, chunk)))


@pytest.mark.parametrize("seed", seeds(8, 15))
def test_arrivals_are_served_as_the_paper_says(seed: int) -> None:
    case = Setting.random(seed, arrivals_s=float(4 ** (seed % 6)))
    pipeline = case.pipeline()
    case.check(pipeline, list(served(RraScheduler(case.sizes(), case.stages), case, pipeline)))


SCHEDULE = RequestSchedule("rra", 4, 8, 3, 2, 2, 4.0)


def sizes_of(schedule: RequestSchedule, kv_tokens: int = 500) -> QueueSizes:
    return queue_sizes_of(TurnSizes.of(schedule, kv_tokens), kv_tokens)


def goes_on(batch: MicroBatch) -> Sampled:
    """The answer to a micro-batch that ends no request."""
    count = len(batch.slots)
    return Sampled(np.zeros(count, dtype=np.int64), (None,) * count)


def test_turns_of_two_groups_and_their_steps() -> None:
    """Both prefill two requests in a micro-batch, and then make three steps between turns."""
    requests = [request(i, 4, 8) for i in range(8)]
    pipeline = TokenPipeline(2, 500, {r.custom_id: 8 for r in requests})
    pipeline.expect(requests)
    scheduler = RraScheduler(sizes_of(SCHEDULE), 2)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    list(run_dry(driver))
    names = ["".join(each) for each in pipeline.names]
    assert names[:2] == ["01", "23"]
    assert names[2:8] == ["01", "23"] * 3
    assert names[8:10] == ["45", "67"]
    assert names[10:16] == ["0145", "2367"] * 3
    assert names[16:] == ["0145", "2367"] + ["45", "67"] * 3


def test_a_lone_request_starts_at_once_and_others_join_it() -> None:
    """Nobody waits for a turn to fill, and one who comes later has a group of its own."""
    scheduler = RraScheduler(sizes_of(SCHEDULE), 2)
    scheduler.add([request(0, 4, 30)])
    first = scheduler.next_batch()
    assert first is not None
    assert scheduler.next_batch() is None
    scheduler.add([request(1, 4, 30)])
    second = scheduler.next_batch()
    assert second is not None
    assert [each.custom_id for each in second[0].admitted] == ["1"]


def test_a_turn_that_found_nobody_is_made_up_for_after_any_step() -> None:
    scheduler = RraScheduler(sizes_of(replace(SCHEDULE, decode_micro_batches=1)), 1)
    scheduler.add([request(0, 4, 30)])
    kinds = []
    for step in range(9):
        if step == 1:
            scheduler.add([request(1, 4, 30)])
        if step == 7:
            scheduler.add([request(2, 4, 30)])
        following = scheduler.next_batch()
        assert following is not None
        kinds.append(following[0].kind[0])
        scheduler.complete(following[0], goes_on(following[0]))
    assert "".join(kinds) == "pdddpdddp", "three steps between turns"
    scheduler.add([request(3, 4, 30)])
    assert scheduler.in_slots == 3


def test_more_requests_are_wanted_only_where_a_turn_could_have_them() -> None:
    scheduler = RraScheduler(sizes_of(SCHEDULE), 2)
    assert scheduler.wants_requests
    scheduler.add([request(i, 4, 8) for i in range(8)])
    assert not scheduler.wants_requests
    batches = [scheduler.next_batch(), scheduler.next_batch()]
    assert not scheduler.wants_requests, "both groups have steps to make"
    for following in batches:
        assert following is not None
        scheduler.complete(following[0], goes_on(following[0]))
    assert not scheduler.wants_requests


def test_newcomers_that_are_cancelled_before_their_prefill_leave_the_others_to_it() -> None:
    scheduler = RraScheduler(sizes_of(replace(SCHEDULE, decode_micro_batches=1)), 1)
    scheduler.add([request(i, 4, 8) for i in range(4)])
    first = scheduler.next_batch()
    assert first is not None
    assert scheduler.in_slots == 4
    scheduler.cancel("2")
    scheduler.cancel("3")
    assert scheduler.in_slots == 2
    assert scheduler.next_batch() is None, "the first two are still under way"
    scheduler.complete(first[0], goes_on(first[0]))
    following = scheduler.next_batch()
    assert following is not None
    assert following[0].kind == "decode"


def test_an_error_ends_a_request() -> None:
    scheduler = RraScheduler(sizes_of(SCHEDULE), 1)
    scheduler.add([request(0, 2, 2)])
    following = scheduler.next_batch()
    assert following is not None
    (ended,) = scheduler.complete(following[0], Sampled(np.array([5]), ("error",)))
    assert (ended.custom_id, ended.finish_reason) == ("0", "error")
    assert scheduler.in_slots == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_tokens": 0}, "kv_tokens is 0; .* at least 1"),
        ({"prefill_micro_batch": 0}, "prefill_micro_batch is 0"),
        ({"n_slots": 501}, "n_slots is 501; .* up to 500"),
        ({"schedule": None}, "the schedule is none; .* rra"),
        ({"schedule": replace(SCHEDULE, kind="waa-c", decode_steps=1)}, "the schedule is waa-c"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RraScheduler(replace(sizes_of(SCHEDULE), **changes), 2)


def test_a_request_longer_than_the_cache_is_refused() -> None:
    scheduler = RraScheduler(sizes_of(SCHEDULE, 20), 1)
    with pytest.raises(SpecError, match=r"'0' needs 15 prompt and 6 new tokens, .* 20 token slots"):
        scheduler.add([request(0, 15, 6)])

"""The policy `orca` against a simulation of Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from actors.messages import Finished, Request, Sampled
from actors.schedule.driver import PipelineDriver
from actors.schedule.orca import OrcaScheduler
from quant.common.errors import SpecError
from tests.actors.driving import drive, run_dry, served
from tests.actors.schedule.orca_simulation import OrcaSimulation, SimRequest
from tests.actors.schedule.token_pipeline import (
    TokenPipeline,
    assert_right_tokens,
    request,
    sizes_of,
)
from tests.seeds import seeds

SEEDS = seeds(24, 200)


@dataclass
class Setting:
    """Requests with their outputs and arrivals, and an engine for them."""

    stages: int
    max_batch_size: int
    kv_tokens: int
    requests: list[Request]
    outputs: list[int]
    arrivals_s: list[float]
    worker_s: list[float]
    chunk: int = 0
    cap: int = 0

    @classmethod
    def random(cls, seed: int, arrivals_s: float) -> Setting:
        rng = np.random.default_rng(seed)
        stages, max_batch_size = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        count, longest = int(rng.integers(1, 50)), int(rng.integers(2, 20))
        prompts, most = rng.integers(1, longest, (2, count)).tolist()
        kv_tokens = int(rng.integers(2 * longest, 2 * longest * max_batch_size * stages + 1))
        return cls(
            stages,
            max_batch_size,
            kv_tokens,
            [request(i, p, n) for i, (p, n) in enumerate(zip(prompts, most, strict=True))],
            [int(rng.integers(1, n + 1)) for n in most],
            np.sort(np.round(rng.uniform(0, arrivals_s, count))).tolist(),
            rng.uniform(0.2, 2.0, stages).tolist(),
        )

    def seconds(self, worker: int, tokens: int) -> float:
        return self.worker_s[worker] * (1 + tokens / 7)

    def simulation(self) -> OrcaSimulation:
        engine = OrcaSimulation(self.stages, self.max_batch_size, self.kv_tokens, self.seconds)
        engine.part_tokens = self.chunk or engine.part_tokens
        engine.batch_tokens = self.cap or engine.batch_tokens
        return engine

    def simulated(self) -> list[SimRequest]:
        return [
            SimRequest(
                r.custom_id, at_s, len(r.prompt_ids), len(r.prompt_ids) + r.max_new_tokens, n
            )
            for r, at_s, n in zip(self.requests, self.arrivals_s, self.outputs, strict=True)
        ]

    def scheduler(self) -> OrcaScheduler:
        sizes = sizes_of(self.stages, self.max_batch_size, self.kv_tokens, self.chunk, self.cap)
        return OrcaScheduler(sizes, self.stages)

    def pipeline(self) -> TokenPipeline:
        outputs = {r.custom_id: n for r, n in zip(self.requests, self.outputs, strict=True)}
        pipeline = TokenPipeline(self.stages, self.kv_tokens, outputs)
        pipeline.expect(self.requests)
        return pipeline

    def check(self, pipeline: TokenPipeline, finished: Sequence[Finished]) -> None:
        """Hold every batch, and the tokens that came out, against the simulation."""
        wanted = self.simulation().run(self.simulated())
        assert pipeline.names == [each.names for each in wanted]
        assert [tuple(b.counts.tolist()) for b in pipeline.batches] == [b.tokens for b in wanted]
        assert pipeline.n_rsrv == [each.n_rsrv for each in wanted]
        assert_right_tokens(finished, self.requests, self.outputs)


def fed(
    scheduler: OrcaScheduler, pipeline: TokenPipeline, requests: Sequence[Request], chunk: int
) -> Iterator[Finished]:
    """As a live run that waits is fed: by chunks, whenever more are wanted."""
    for finished in run_dry(PipelineDriver(scheduler, pipeline), requests, chunk):
        yield from finished


@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_is_served_as_algorithm_1_says(seed: int) -> None:
    """Whatever the chunks are in which the queue is filled."""
    case = Setting.random(seed, arrivals_s=0.0)
    pipeline = case.pipeline()
    chunk = int(np.random.default_rng(seed + 1000).integers(1, 12))
    case.check(pipeline, list(fed(case.scheduler(), pipeline, case.requests, chunk)))


@pytest.mark.parametrize("seed", SEEDS)
def test_arrivals_are_served_as_algorithm_1_says(seed: int) -> None:
    case = Setting.random(seed, arrivals_s=float(4 ** (seed % 5)))
    pipeline = case.pipeline()
    case.check(pipeline, list(served(case.scheduler(), case, pipeline)))


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_prompts_and_bounded_batches_keep_the_order(seed: int) -> None:
    rng = np.random.default_rng(seed + 2000)
    chunk, cap = (int(n) for n in rng.integers([0, 1], [8, 24]))
    case = replace(Setting.random(seed, float(4 ** (seed % 5))), chunk=chunk, cap=cap)
    pipeline = case.pipeline()
    case.check(pipeline, list(served(case.scheduler(), case, pipeline)))


def test_figure_8a() -> None:
    """Three workers, batches of two, A to F: AB, CD and EF go round, and no worker waits."""
    requests = [request(i, 3, 9) for i in range(6)]
    case = Setting(3, 2, 72, requests, [9] * 6, [0.0] * 6, [1.0] * 3)
    pipeline = case.pipeline()
    case.check(pipeline, list(fed(case.scheduler(), pipeline, requests, 6)))
    names = ["".join("ABCDEF"[int(each)] for each in batch) for batch in pipeline.names]
    assert names == ["AB", "CD", "EF"] * 9


def test_a_batch_mixes_prompts_and_single_tokens() -> None:
    requests = [request(0, 3, 1), request(1, 2, 4), request(2, 5, 2)]
    case = Setting(1, 2, 40, requests, [1, 4, 2], [0.0] * 3, [1.0])
    pipeline = case.pipeline()
    list(fed(case.scheduler(), pipeline, requests, 8))
    mixed = pipeline.batches[1]
    assert pipeline.names[:2] == [("0", "1"), ("1", "2")]
    assert (mixed.starts.tolist(), mixed.counts.tolist()) == ([2, 0], [1, 5])
    assert mixed.samples is None
    assert not mixed.is_decode


def test_no_request_overtakes_one_that_has_no_room() -> None:
    requests = [request(0, 5, 5), request(1, 6, 5), request(2, 1, 1)]
    case = Setting(2, 4, 20, requests, [5, 5, 1], [0.0] * 3, [1.0] * 2)
    pipeline = case.pipeline()
    list(fed(case.scheduler(), pipeline, requests, 8))
    assert pipeline.names == [("0",)] * 5 + [("1", "2")] + [("1",)] * 4


def test_long_prompts_are_given_in_parts() -> None:
    requests = [request(0, 7, 2), request(1, 3, 3)]
    pipeline = TokenPipeline(1, 20, {"0": 2, "1": 3})
    pipeline.expect(requests)
    scheduler = OrcaScheduler(sizes_of(1, 2, 20, chunk=3), 1)
    finished = list(fed(scheduler, pipeline, requests, 8))
    assert_right_tokens(finished, requests, [2, 3])
    counts = [batch.counts.tolist() for batch in pipeline.batches]
    assert counts == [[3, 3], [3, 1], [1, 1], [1]]
    samples = [None if b.samples is None else b.samples.tolist() for b in pipeline.batches]
    assert samples == [[False, True], [False, True], None, None]


def test_tokens_of_a_batch_are_bounded() -> None:
    """A prompt beyond the bound is a batch of its own, and nobody overtakes it."""
    requests = [request(0, 4, 3), request(1, 4, 1), request(2, 9, 1), request(3, 1, 1)]
    pipeline = TokenPipeline(1, 99, {"0": 3, "1": 1, "2": 1, "3": 1})
    pipeline.expect(requests)
    scheduler = OrcaScheduler(sizes_of(1, 4, 99, cap=6), 1)
    list(fed(scheduler, pipeline, requests, 8))
    assert pipeline.names == [("0",), ("0", "1"), ("0",), ("2",), ("3",)]


def test_a_request_under_way_is_cancelled_when_it_comes_back() -> None:
    requests = [request(i, 2, 4) for i in range(3)]
    pipeline = TokenPipeline(2, 12, dict.fromkeys("012", 4))
    pipeline.expect(requests)
    scheduler = OrcaScheduler(sizes_of(2, 1, 12), 2)
    scheduler.add(requests)
    first, second = (pipeline.submit(*batch) for _ in "01" if (batch := scheduler.next_batch()))
    scheduler.cancel("0")
    assert scheduler.next_batch() is None, "its token slots are still its own"
    assert [name for name, _ in scheduler.slot_tokens().values()] == ["1"]
    assert scheduler.complete(first, pipeline.result(first)) == ()
    assert scheduler.in_slots == 1
    third = scheduler.next_batch()
    assert third is not None
    assert [each.custom_id for each in third[0].admitted] == ["2"]
    scheduler.complete(second, pipeline.result(second))
    scheduler.cancel("1")
    assert scheduler.in_slots == 1, "it was not under way"
    scheduler.cancel("unknown")
    assert scheduler.next_batch() is None


def test_more_requests_are_wanted_only_where_a_batch_could_have_them() -> None:
    scheduler = OrcaScheduler(sizes_of(1, 2, 30), 1)
    pipeline = TokenPipeline(1, 30, dict.fromkeys("01", 3))
    assert scheduler.wants_requests
    requests = [request(i, 2, 3) for i in range(2)]
    pipeline.expect(requests)
    scheduler.add(requests)
    assert not scheduler.wants_requests
    following = scheduler.next_batch()
    assert following is not None
    assert scheduler.wants_requests
    batch = pipeline.submit(*following)
    scheduler.complete(batch, pipeline.result(batch))
    assert not scheduler.wants_requests, "those that came back are a batch"
    scheduler.cancel("0")
    assert scheduler.wants_requests


def test_a_waiting_request_is_cancelled_at_once() -> None:
    scheduler = OrcaScheduler(sizes_of(1, 2, 30), 1)
    scheduler.add([request(0, 2, 2), request(1, 2, 2)])
    scheduler.cancel("0")
    assert scheduler.waiting == 1
    batch = scheduler.next_batch()
    assert batch is not None
    assert [each.custom_id for each in batch[0].admitted] == ["1"]


def test_no_more_requests_than_slots_are_under_way() -> None:
    """As of models with constant states, for which memory may be less than for full batches."""
    scheduler = OrcaScheduler(replace(sizes_of(2, 3, 100), slots=4), 2)
    pipeline = TokenPipeline(2, 100, dict.fromkeys(map(str, range(9)), 3))
    requests = [request(i, 2, 3) for i in range(9)]
    pipeline.expect(requests)
    scheduler.add(requests)
    most = ended = 0
    for finished in drive(scheduler, pipeline):
        ended += len(finished)
        most = max(most, scheduler.in_slots + len(finished))
    assert ended == 9
    assert most == 4


def test_an_error_ends_a_request() -> None:
    scheduler = OrcaScheduler(sizes_of(1, 2, 30), 1)
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
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"prefill_chunk_tokens": -1}, "prefill_chunk_tokens is -1"),
        ({"n_slots": 31}, "n_slots is 31; .* up to 30"),
        ({"slots": 0}, "slots is 0; .* at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        OrcaScheduler(replace(sizes_of(2, 2, 30), **changes), 2)  # type: ignore[arg-type]


def test_a_request_longer_than_the_cache_is_refused() -> None:
    scheduler = OrcaScheduler(replace(sizes_of(1, 2, 30), n_slots=20), 1)
    with pytest.raises(SpecError, match=r"'0' needs 15 prompt and 6 new tokens, .* 20 token slots"):
        scheduler.add([request(0, 15, 6)])


def test_messages_have_at_most_the_tokens_that_have_a_slot() -> None:
    sizes = sizes_of(2, 8, 100)
    assert sizes.limits(30, 100, columns=4).rows == 100
    assert sizes.limits(5, 100, columns=4).rows == 40
    assert replace(sizes, max_batch_tokens=20).limits(30, 100, columns=4).rows == 30
    assert replace(sizes, prefill_chunk_tokens=10).limits(30, 100, columns=4).rows == 80
    assert sizes.limits(30, 100, columns=4).requests == 8

"""ORCA's experiments: the baseline's batches, and virtual time against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from actors.messages import MicroBatch, Request, Sampled, Sampling
from actors.schedule.orca import OrcaScheduler
from actors.schedule.scheduler import QueueSizes
from benchmarks.reproduction.orca.request_level import RequestLevelScheduler
from benchmarks.reproduction.orca.traces import Arrival, Lengths, lengths_of, poisson
from benchmarks.reproduction.orca.virtual_time import outcomes
from planner.plan.modelled_times import ModelledTimes

SLOT = 100
PREFILL_S, DECODE_S = 3.0, 1.0
TIMES = ModelledTimes.constant(PREFILL_S, DECODE_S)


def request(number: int, prompt: int, new: int) -> Request:
    return Request(str(number), tuple(range(1, prompt + 1)), new, Sampling(ignore_eos=True))


def baseline(max_bs: int, mbs: int) -> RequestLevelScheduler:
    return RequestLevelScheduler(max_bs, mbs, SLOT, max_bs * SLOT)


def orca(stages: int, max_batch_size: int) -> OrcaScheduler:
    sizes = QueueSizes(
        slots=stages * max_batch_size,
        prefill_micro_batch=1,
        decode_micro_batch=max_batch_size,
        slot_tokens=SLOT,
        policy="orca",
        kv_tokens=100 * SLOT,
        max_batch_size=max_batch_size,
    )
    return OrcaScheduler(sizes, stages)


def played(scheduler: RequestLevelScheduler) -> list[tuple[MicroBatch, list[int]]]:
    """All passes of what is in the queue; the n-th sampled token of the run is 1000 + n."""
    passes = []
    token = 1000
    left: dict[int, int] = {}
    while (following := scheduler.next_batch()) is not None:
        batch, ids = following
        passes.append((batch, ids.tolist()))
        left |= {each.slot: each.max_new_tokens for each in batch.admitted}
        slots = batch.slots[batch.sampled_rows].tolist()
        reasons = []
        for slot in slots:
            left[slot] -= 1
            reasons.append(None if left[slot] else "length")
        tokens = np.arange(token, token + len(slots))
        token += len(slots)
        scheduler.complete(batch, Sampled(tokens, tuple(reasons)))
    assert all(count == 0 for count in left.values())
    return passes


def test_a_batch_starts_at_its_shortest_prompt_and_ends_all_together() -> None:
    scheduler = baseline(2, 2)
    scheduler.add([request(0, 3, 4), request(1, 5, 1)])
    passes = played(scheduler)
    # positions 0-2 at once, then 3, 4 and 5: token 3 + 4 of the first request needs position 5
    assert [batch.counts.tolist() for batch, _ in passes] == [[3, 3], [1, 1], [1, 1], [1, 1]]
    assert [batch.starts.tolist() for batch, _ in passes] == [[0, 0], [3, 3], [4, 4], [5, 5]]
    assert passes[0][1] == [1, 2, 3, 1, 2, 3]
    assert [ids for _, ids in passes[1:]] == [[1000, 4], [1001, 5], [1002, 5]]
    sampled = [batch.sampled_rows.tolist() for batch, _ in passes]
    assert sampled == [[0], [0], [0], [0, 1]]


def test_the_next_batch_waits_for_the_whole_one_before() -> None:
    scheduler = baseline(2, 1)
    scheduler.add([request(i, 4, new) for i, new in enumerate((1, 3, 2))])
    admitted = [[a.custom_id for a in batch.admitted] for batch, _ in played(scheduler)]
    assert admitted == [["0"], [], [], ["1"], [], [], ["2"], []]


def test_memory_bounds_the_batch() -> None:
    with pytest.raises(ValueError, match="3 requests of 100 tokens"):
        RequestLevelScheduler(3, 3, SLOT, 3 * SLOT - 1)


def test_one_request_after_the_other_takes_the_sum_of_its_passes() -> None:
    lengths = [Lengths(5, 4), Lengths(9, 1), Lengths(2, 3)]
    trace = [Arrival(0.0, each) for each in lengths]
    found = outcomes(baseline(1, 1), [TIMES, TIMES], trace)
    alone = [2 * (PREFILL_S + DECODE_S * (each.new - 1)) for each in lengths]
    assert [each.latency_s for each in found] == pytest.approx(np.cumsum(alone).tolist())


def test_orca_alone_takes_as_long_as_the_baseline_alone() -> None:
    trace = poisson([Lengths(5, 4), Lengths(9, 2)], 1e-3, seed=0)
    both = [outcomes(each, [TIMES] * 3, trace) for each in (orca(3, 4), baseline(1, 1))]
    assert both[0] == both[1]
    assert both[0][0].latency_s == pytest.approx(3 * (PREFILL_S + 3 * DECODE_S))
    assert both[0][0].first_s == pytest.approx(3 * PREFILL_S)


def test_micro_batches_keep_both_stages_busy() -> None:
    trace = [Arrival(0.0, Lengths(4, 3))] * 2
    together = outcomes(baseline(2, 2), [TIMES, TIMES], trace)
    apart = outcomes(baseline(2, 1), [TIMES, TIMES], trace)
    assert together[1].latency_s == pytest.approx(2 * (PREFILL_S + 2 * DECODE_S))
    # the second half follows the first by one stage's prefill, and its steps fill the gaps
    assert apart[1].latency_s == pytest.approx(3 * PREFILL_S + 2 * 2 * DECODE_S)


def test_under_orca_a_newcomer_joins_and_a_short_request_leaves() -> None:
    trace = [Arrival(0.0, Lengths(4, 10)), Arrival(0.5, Lengths(4, 1))]
    by_iteration = outcomes(orca(1, 4), [TIMES], trace)
    by_request = outcomes(baseline(4, 4), [TIMES], trace)
    assert by_request[1].latency_s == pytest.approx(PREFILL_S + 9 * DECODE_S - 0.5 + PREFILL_S)
    mixed_s = PREFILL_S  # less one decode step that is saved
    assert by_iteration[1].latency_s == pytest.approx(PREFILL_S - 0.5 + mixed_s)


def test_lengths_are_those_of_the_paper_and_arrivals_have_the_rate() -> None:
    lengths = lengths_of("uniform", 4000, seed=1)
    assert {min(x.prompt for x in lengths), max(x.prompt for x in lengths)} == {32, 512}
    assert {min(x.new for x in lengths), max(x.new for x in lengths)} == {1, 128}
    slow, fast = (poisson(lengths, rate, seed=1) for rate in (0.5, 2.0))
    assert slow[-1].at_s == pytest.approx(4 * fast[-1].at_s)
    assert len(fast) / fast[-1].at_s == pytest.approx(2.0, rel=0.05)

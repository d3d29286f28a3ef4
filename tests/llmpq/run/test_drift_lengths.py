"""Mean lengths while rows are still running, against the distribution that they are drawn from."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import pytest

from actors.messages import Finished, Request, Sampling
from llmpq.run.drift import LengthRecord, OutputLengths, length_weights
from llmpq.run.meter import RunMeter
from llmpq.run.rows_in_flight import RowsInFlight
from llmpq.tokenizing.requests import RequestMaker
from planner.workload import Job, Workload

MEAN = 40.0


def refilled(lengths: list[int], slots: int, until: int) -> tuple[list[int], list[int]]:
    """Lengths of rows that have ended at step `until` of a schedule that refills slots, in the
    order in which they end, and the tokens so far of the others that have begun.
    """
    heap: list[tuple[int, int, int]] = []
    ended, waiting = [], list(reversed(lengths))
    for _ in range(slots):
        length = waiting.pop()
        heapq.heappush(heap, (length, 0, length))
    while heap and heap[0][0] <= until:
        end, _, length = heapq.heappop(heap)
        ended.append(length)
        if waiting:
            length = waiting.pop()
            heapq.heappush(heap, (end + length, end, length))
    return ended, [until - begin for _, begin, _ in heap]


@pytest.mark.parametrize("until", [160, 300, 2000])
def test_the_mean_is_that_of_all_rows_although_short_ones_end_first(until: int) -> None:
    found, naive = [], []
    for seed in range(40):
        random = np.random.default_rng(seed)
        lengths = [int(each) for each in np.ceil(random.exponential(MEAN, 20000))]
        ended, running = refilled(lengths, 64, until)
        weights = length_weights(ended, running)
        assert weights is not None
        assert weights.sum() == pytest.approx(1)
        found.append(float(weights @ np.array(ended)))
        naive.append(float(np.mean(ended)))
    assert np.mean(found) == pytest.approx(MEAN, rel=0.05)
    if until == 160:
        assert np.mean(naive) < 0.85 * MEAN, "or there is nothing to correct"


def test_nothing_is_said_while_many_are_longer_than_all_that_ended() -> None:
    assert length_weights([], [5, 5]) is None
    assert length_weights([3] * 64, [3] * 64) is None
    assert length_weights([3] * 64, [2] * 64) is not None
    assert length_weights([3] * 96, [3] * 4) is not None
    assert length_weights([3] * 94, [3] * 6) is None


def test_rows_that_all_ended_count_alike() -> None:
    weights = length_weights([2, 8, 8, 30], [])
    assert weights == pytest.approx([0.25] * 4)


def test_prompts_are_those_of_all_that_began_and_a_sample_keeps_the_room() -> None:
    record = LengthRecord()
    requests = [Request(str(i), (1,) * (1 + i % 9), 50, Sampling()) for i in range(200)]
    for request in requests:
        record.begin(request)
    assert record.mean_prompt == pytest.approx(np.mean([1 + i % 9 for i in range(200)]))
    for i, request in enumerate(requests):
        record.end(request, 1 + i % 20)
    outputs = record.outputs([])
    assert outputs is not None
    assert record.ended == 200
    assert (outputs.mean, outputs.longest) == (pytest.approx(10.5), 20)
    lengths = outputs.lengths(Workload(4, 100, 50))
    assert (lengths.longest_prompt, lengths.longest_output) == (100, 50)
    assert lengths.mean_output == pytest.approx(10.5, rel=0.02)
    assert lengths.mean_prompt == pytest.approx(record.mean_prompt, rel=0.06)
    assert lengths.outputs_from == "finished rows"
    halves = np.array(lengths.output_tokens[:256]), np.array(lengths.output_tokens[256:])
    assert abs(halves[0].mean() - halves[1].mean()) < 2, "in no particular order"


def test_a_sample_keeps_slots_that_are_shorter_than_both_lengths() -> None:
    outputs = OutputLengths([(10, 3), (95, 60), (40, 40)], np.full(3, 1 / 3))
    room = Workload(4, 90, 50, slot_tokens=100)
    lengths = outputs.lengths(room)
    assert Job(9, lengths).in_flight(4) == room
    assert set(zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)) == {
        (10, 3),
        (90, 10),
        (40, 40),
    }


def test_what_rows_in_flight_have_is_longer_where_lengths_differ() -> None:
    equal = OutputLengths([(1, 10)] * 4, np.full(4, 0.25))
    assert equal.mean_so_far == pytest.approx(5)
    uneven = OutputLengths([(1, 2), (1, 18)], np.full(2, 0.5))
    assert uneven.mean_so_far == pytest.approx((4 + 324) / 2 / 20)


def end_all(rows: RowsInFlight, requests: Iterable[Request | None], tokens: int) -> None:
    for request in filter(None, requests):
        finished = Finished(request.custom_id, (7,) * tokens, "length")
        assert [each.error for each in rows.results([finished])] == [None]


def test_long_rows_are_not_compared_with_the_lengths_of_the_others() -> None:
    room, long_room = Workload(4, 8, 6), Workload(1, 64, 6)
    rows = RowsInFlight(RequestMaker(room, 100, Sampling(), None, long_room), RunMeter(None, None))
    made = [Request(str(i), (1,) * (64 if i % 2 else 8), 6, Sampling()) for i in range(40)]
    end_all(rows, rows.requests(iter(made)), 2)
    assert rows.record.mean_prompt == 8
    end_all(rows, rows.long_requests(), 6)
    outputs = rows.record.outputs([])
    assert outputs is not None
    assert (rows.record.mean_prompt, outputs.mean) == (64, 6)
    assert rows.record.ended == 40
    rows.long.close()

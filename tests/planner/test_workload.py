"""Workloads refuse sizes that are no batch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.workload import MAX_REQUESTS, MAX_TOKENS, MicroBatches, Workload, micro_batch_pairs
from quant.common.errors import SpecError


def test_total_length() -> None:
    assert Workload(global_batch=32, prompt_length=512, new_tokens=100).total_length == 612


def test_slots_shorter_than_the_longest_lengths_together() -> None:
    slots = Workload(4, 700, 500, slot_tokens=720)
    assert slots.total_length == 720
    fitting = [(700, 20), (220, 500), (1, 1)]
    beyond = [(700, 21), (221, 500), (701, 1), (1, 501)]
    assert [slots.has_room(*each) for each in (*fitting, *beyond)] == [True] * 3 + [False] * 4
    assert Workload(4, 700, 500).has_room(700, 500)
    for wrong in (700, 1201, 0, True, "800"):
        with pytest.raises(SpecError, match=r"slot_tokens is .* must have 701 to 1200"):
            Workload(4, 700, 500, wrong)  # type: ignore[arg-type]
    assert Workload(4, 700, 500, 701).total_length == 701
    assert Workload(4, 700, 500, 1200).total_length == 1200


def test_numbers_beyond_any_batch() -> None:
    largest = [MAX_REQUESTS, MAX_TOKENS, MAX_TOKENS]
    assert Workload(*largest).total_length == 2 * MAX_TOKENS
    for position, most in enumerate(largest):
        numbers = [1, 1, 1]
        numbers[position] = most + 1
        with pytest.raises(SpecError, match=f"is above {most}"):
            Workload(*numbers)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("position", range(3))
def test_only_positive_whole_numbers(value: Any, position: int) -> None:
    numbers = [1, 1, 1]
    numbers[position] = value
    with pytest.raises(SpecError, match="must be a whole number of at least 1"):
        Workload(*numbers)


def test_the_paper_s_batch_on_four_stages() -> None:
    pairs = micro_batch_pairs(32, 4)
    decode = {4: [1, 2, 4], 8: [1, 2, 4, 8], 16: [1, 2, 4, 8, 16]}
    assert pairs == tuple(MicroBatches(p, d) for d, sizes in decode.items() for p in sizes)


@pytest.mark.parametrize("stages", [1, 3, 8, 16])
@pytest.mark.parametrize("batch", [1, 7, 30, 97, 128, 720])
def test_pairs_keep_to_the_batch_and_to_each_other(batch: int, stages: int) -> None:
    pairs = micro_batch_pairs(batch, stages)
    assert len(set(pairs)) == len(pairs) > 0
    for pair in pairs:
        assert 1 <= pair.prefill <= pair.decode <= batch
        rounded_up = -(-batch // stages)
        assert pair.decode <= max(2 * batch / stages, rounded_up)
        assert pair.decode >= min(batch / (2 * stages), rounded_up)


@pytest.mark.parametrize("batch", [1, 7, 30, 97, 128, 720])
@pytest.mark.parametrize("stages", [1, 3, 8])
def test_the_even_share_is_always_among_them(batch: int, stages: int) -> None:
    """In number of micro-batches: a smaller size with as many of them is never slower."""
    even = -(-batch // stages)
    counts = {-(-batch // pair.decode) for pair in micro_batch_pairs(batch, stages)}
    assert -(-batch // even) in counts


def test_one_stage_may_decode_the_whole_batch_at_once() -> None:
    assert MicroBatches(1, 30) in micro_batch_pairs(30, 1)


def test_no_two_prefill_sizes_need_equally_many_micro_batches() -> None:
    for decode in {pair.decode for pair in micro_batch_pairs(97, 2)}:
        sizes = [pair.prefill for pair in micro_batch_pairs(97, 2) if pair.decode == decode]
        assert len({-(-97 // size) for size in sizes}) == len(sizes)


@pytest.mark.parametrize(("batch", "stages"), [(0, 2), (4, 0), (-1, 1)])
def test_nothing_to_split_is_refused(batch: int, stages: int) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        micro_batch_pairs(batch, stages)

"""Workloads refuse sizes that are no batch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.workload import MAX_REQUESTS, MAX_TOKENS, Workload
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

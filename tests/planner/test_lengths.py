"""Lengths of a job: what slots have room for, and outputs expected by those that were observed."""

from __future__ import annotations

import numpy as np
import pytest

from planner.lengths import (
    LEAST_OBSERVED,
    Lengths,
    ended_together,
    expected_outputs,
    observed_lengths,
)
from planner.workload import Job, Workload
from quant.common.errors import SpecError


def test_slots_have_room_for_the_limit_though_answers_are_shorter() -> None:
    lengths = Lengths((10, 20), (3, 5), "answers", output_limit=64)
    assert Job(100, lengths).in_flight(4).total_length == 20 + 64
    assert lengths.mean_output == 4
    assert Job(100, Lengths((10, 20), (3, 5))).in_flight(4).total_length == 25
    with pytest.raises(SpecError, match="an output has 5 tokens, but no row may get more than 4"):
        Lengths((10, 20), (3, 5), "answers", output_limit=4)


def test_slots_of_the_longest_row() -> None:
    slots = Job(9, Lengths((10, 20), (5, 3), "answers", 64, longest_total=70)).in_flight(4)
    assert slots == Workload(4, 20, 64, slot_tokens=70)
    whole = Job(9, Lengths((10, 20), (5, 3), longest_total=25)).in_flight(4)
    assert whole == Workload(4, 20, 5), "where a row has the most of both, nothing is said"
    for wrong in (22, 26):
        with pytest.raises(SpecError, match=f"longest_total is {wrong}, but rows have up to 23"):
            Lengths((10, 20), (5, 3), longest_total=wrong)


def test_rows_that_ended_tell_as_far_as_nearly_all_ended() -> None:
    ended = np.array([True] * 30 + [False] + [True] * 9 + [False, True] * 30)
    known = ended_together(ended)
    ends = [k for k in range(1, len(ended) + 1) if ended[:k].mean() >= 0.95]
    assert known.tolist() == [bool(e) and i < max(ends) for i, e in enumerate(ended)]
    assert 30 < known.sum() < 50
    assert not ended_together(np.array([False, True, True])).any()


def test_a_default_limit_is_a_number_of_tokens() -> None:
    assert Job(9, Lengths((1,), (1,)), 5).default_new_tokens == 5
    with pytest.raises(SpecError, match="default_new_tokens is 0; it must be a whole number"):
        Job(9, Lengths((1,), (1,)), 0)


def test_a_sample_keeps_the_longest_and_the_limit() -> None:
    rows = [(i % 50 + 1, 7) for i in range(5000)]
    rows[1234], rows[4321] = (900, 7), (3, 800)
    lengths = Lengths.of(rows, "answers", 1000)
    assert len(lengths.prompt_tokens) == 512
    assert lengths.longest_prompt == 900
    assert max(lengths.output_tokens) == 800
    assert lengths.longest_output == 1000


def test_outputs_follow_those_of_prompts_of_similar_length() -> None:
    observed = observed_lengths([(p, 1000 - p) for p in range(1, 500)], "answers")
    prompts = np.array([1, 100, 250, 400, 499, 10_000])
    limits = np.full(6, 2000)
    found = expected_outputs(observed, prompts, limits)
    assert np.abs(found - (1000 - np.minimum(prompts, 499))).max() <= 32
    assert expected_outputs(observed, prompts, np.full(6, 30)).tolist() == [30] * 6


def test_expected_outputs_are_spread_as_the_observed_ones() -> None:
    seen = [1, 1, 1, 9] * 25
    observed = observed_lengths([(50, output) for output in seen], "answers")
    found = expected_outputs(observed, np.full(4000, 50), np.full(4000, 100))
    assert set(found.tolist()) == {1, 9}
    assert found.mean() == pytest.approx(3.0, rel=0.05)


def test_a_few_rows_say_nothing() -> None:
    rows = [(5, 5)] * LEAST_OBSERVED
    assert observed_lengths(rows, "r.jsonl").outputs_from == "r.jsonl"
    with pytest.raises(SpecError, match=r"r\.jsonl has 15 finished rows .* wait for 16"):
        observed_lengths(rows[1:], "r.jsonl")

"""How many newcomers a turn has, against all numbers that it might have."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schedule.turns import TurnGroup, Turns, even_parts
from planner.scheduling import RequestSchedule


def schedule_of(
    prefill: int, decode: int, groups: int, mean: float = 5.0, tolerance: float = 0.1
) -> RequestSchedule:
    return RequestSchedule("rra", prefill, decode, 8, groups, 4, mean, tolerance)


@pytest.mark.parametrize(
    ("decode", "groups", "tolerance", "least", "most"),
    [
        (40, 2, 0.1, 18, 22),
        (40, 2, 0.05, 19, 21),
        (5, 2, 0.1, 2, 3),
        (1, 4, 0.1, 0, 1),
        (30, 3, 0.1, 9, 11),
        (3, 3, 0.3, 1, 1),
    ],
)
def test_a_group_has_the_mean_number_within_the_tolerance(
    decode: int, groups: int, tolerance: float, least: int, most: int
) -> None:
    turns = Turns.of(schedule_of(1, decode, groups, tolerance=tolerance))
    assert (turns.least, turns.most) == (least, most)


def test_smaller_groups_are_more_groups() -> None:
    schedule = schedule_of(8, 40, 2)
    assert Turns.of(schedule, 22).groups == 2
    assert Turns.of(schedule, 11).groups == 4
    assert (Turns.of(schedule, 11).least, Turns.of(schedule, 11).most) == (9, 11)
    assert Turns.of(schedule, 1).groups == 40


@given(prefill=st.integers(1, 30), groups=st.integers(1, 7), turns=st.integers(1, 20))
def test_over_all_turns_groups_share_the_newcomers(prefill: int, groups: int, turns: int) -> None:
    """Each group gets its share within one; all together, in one turn each, those planned."""
    of = Turns.of(schedule_of(prefill, 10**6, groups, mean=1.0))
    credits = [of.first_credit(group) for group in range(groups)]
    had = [0] * groups
    for _ in range(turns):
        joined = 0
        for group, credit in enumerate(credits):
            at_turn = TurnGroup(group, credit, of.least)
            count = of.newcomers(at_turn, 10**6, [1] * (2 * prefill))
            credits[group] = of.next_credit(credit)
            had[group] += count
            joined += count
        assert joined == prefill
    assert all(abs(count - Fraction(turns * prefill, groups)) < 1 for count in had)


@settings(max_examples=150)
@given(
    prefill=st.integers(1, 12),
    decode=st.integers(1, 30),
    groups=st.integers(1, 4),
    mean=st.integers(1, 12),
    tolerance=st.sampled_from([0.05, 0.1, 0.3]),
    requests=st.integers(0, 30),
    ended=st.integers(0, 12),
    replayed=st.integers(0, 5),
    texts=st.lists(st.integers(1, 20), min_size=1, max_size=40),
)
def test_a_turn_is_as_near_to_the_plan_as_the_tolerance_allows(
    prefill: int,
    decode: int,
    groups: int,
    mean: int,
    tolerance: float,
    requests: int,
    ended: int,
    replayed: int,
    texts: list[int],
) -> None:
    turns = Turns.of(schedule_of(prefill, decode, groups, float(mean), tolerance))
    requests = min(requests, turns.most)
    group = TurnGroup(0, turns.first_credit(0), requests, ended)
    texts = texts[: turns.most]
    count = turns.newcomers(group, turns.most, texts, replayed)
    nominal = prefill // groups
    after = requests + count
    assert 0 <= count <= len(texts)
    assert after <= turns.most
    if not requests:
        assert count >= 1
    if requests + max(nominal + ended, replayed) >= turns.least and len(texts) >= turns.most:
        assert after >= turns.least, "enough may come, and do not"
    in_size = range(max(0, turns.least - requests), turns.most - requests + 1)
    wanted = min(in_size, key=lambda n: abs(n - nominal))
    if not 0 < wanted <= max(nominal + ended, replayed):
        return
    low, high = (round(wanted * mean * share, 9) for share in (1 - tolerance, 1 + tolerance))
    counts = [n for n in in_size if 0 < n <= len(texts)]
    if any(low <= sum(texts[:n]) <= high for n in counts):
        assert low <= sum(texts[:count]) <= high, "the prompts could have been within the tolerance"


def test_lone_requests_are_shared_among_empty_groups() -> None:
    turns = Turns.of(schedule_of(8, 40, 2))
    assert turns.newcomers(TurnGroup(0, 0), 2, [5, 5, 5]) == 2
    assert turns.newcomers(TurnGroup(0, 0), 1, [5]) == 1


def test_what_ran_before_a_fault_comes_back_at_once() -> None:
    """Though their prompts, with the tokens that they have, are longer than planned."""
    turns = Turns.of(schedule_of(8, 40, 2))
    texts = [30] * 22
    assert turns.newcomers(TurnGroup(0, 0), 40, texts, replayed=22) == 18
    assert turns.newcomers(TurnGroup(0, 0), 40, texts, replayed=7) == 7
    assert turns.newcomers(TurnGroup(0, 0), 40, texts) == 1


@given(requests=st.integers(0, 60), most=st.integers(1, 12))
def test_parts_are_few_and_even(requests: int, most: int) -> None:
    parts = even_parts(requests, most)
    assert sum(parts) == requests
    assert len(parts) == -(-requests // most)
    assert not parts or max(parts) <= min(most, min(parts) + 1)

"""How many prompts begin: so many that those which decode stay as many as the schedule says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from actors.handover.ledger import DividedLedger
from actors.handover.pace import Load, PrefillPace
from actors.messages import Progress, Request, Sampling
from actors.schedule.scheduler import QueueSizes
from planner.scheduling import RequestSchedule

PREFILL = QueueSizes(8, 2, 2, 65, parked_tokens=1000)
DECODE = QueueSizes(44, 2, 22, 128, "exegpt", kv_tokens=44 * 128, parked_tokens=2000)
IDLE = Load()


def pace_of(
    turn: int = 4,
    decoding: int = 40,
    stages: int = 2,
    prefill: QueueSizes = PREFILL,
    decode: QueueSizes = DECODE,
) -> PrefillPace:
    schedule = RequestSchedule("waa-c", turn, decoding, 1, 2, 2, 16.0, tolerance=0.1)
    return PrefillPace(schedule, stages, prefill, decode)


def requests(prompts: Sequence[int], new_tokens: int = 20) -> list[Request]:
    return [
        Request(str(i), (3,) * prompt, new_tokens, Sampling()) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("load", "begins"),
    [
        (IDLE, 4),
        (Load(decoding=36), 4),
        (Load(decoding=40), 4),
        (Load(decoding=41), 0),
        (Load(prefilling=8, decoding=32), 4),
        (Load(prefilling=4, decoding=38), 0),
        (Load(prefilling=4, decoding=38, leaving=4), 4),
        (Load(prefilling=4, decoding=38, leaving=2), 4),
        (Load(prefilling=4, decoding=38, leaving=1), 0),
        (Load(prefilling=8), 4),
        (Load(prefilling=10), 2),
        (Load(prefilling=12), 0),
    ],
)
def test_a_turn_begins_unless_too_many_would_decode_or_wait_for_being_prefilled(
    load: Load, begins: int
) -> None:
    """44 may decode; two stages prefill a turn each, and one more waits there."""
    assert pace_of().turn(requests([16] * 20), load) == begins


def test_a_turn_is_smaller_where_more_would_decode_than_the_tolerance_allows() -> None:
    assert pace_of(turn=10).turn(requests([16] * 20), Load(decoding=38)) == 6
    assert pace_of(turn=10).turn(requests([16] * 20), Load(decoding=40)) == 4


@pytest.mark.parametrize(
    ("prompts", "begins"),
    [
        ([16] * 8, 4),
        ([8] * 8, 8),  # as many tokens
        ([32] * 8, 2),
        ([60, 16], 1),
        ([70, 1, 1], 1),
        ([10, 10, 44, 10], 3),
        ([10, 10, 51, 10], 2),
        ([16, 16], 2),
        ([], 0),
    ],
)
def test_prompts_of_a_turn_have_the_tokens_of_so_many_of_the_mean(
    prompts: list[int], begins: int
) -> None:
    """Four of 16 tokens, or up to a tenth more; a longer one makes a turn alone."""
    assert pace_of().turn(requests(prompts), IDLE) == begins


def test_nothing_begins_without_room_in_host_memory_or_in_the_kv_cache() -> None:
    pace, waiting = pace_of(), requests([16] * 8)
    assert pace.turn(waiting, Load(4, 10, host_tokens=968)) == 2, "on the side that has less"
    assert pace.turn(waiting, Load(4, 10, host_tokens=990)) == 0
    full = DECODE.kv_tokens - 2 * (16 + 20)
    assert pace.turn(waiting, Load(0, 10, reserved=full)) == 2
    assert pace.turn(waiting, Load(0, 10, reserved=full + 37)) == 0
    leaving = Load(8, 8, leaving=8, reserved=DECODE.kv_tokens)
    assert pace.turn(waiting, leaving) == 4, "as half of it will be free"
    reservable = QueueSizes(44, 2, 22, 128, "exegpt", kv_tokens=5000, n_slots=80, parked_tokens=99)
    assert pace_of(decode=reservable).turn(waiting, IDLE) == 2


def test_a_request_that_never_has_room_runs_when_nothing_else_does() -> None:
    small = QueueSizes(8, 2, 2, 65, parked_tokens=10)
    pace, waiting = pace_of(prefill=small), requests([16] * 8)
    assert pace.turn(waiting, IDLE) == 1
    assert pace.turn(waiting, Load(decoding=1, reserved=36)) == 0


@pytest.mark.parametrize(("passes", "steps"), [(1, 10), (3, 10), (6, 20), (2, 64)])
def test_in_the_steady_state_the_planned_number_decodes(passes: int, steps: int) -> None:
    """In rounds, by a queue of its own: stages that could prefill half as many requests again as
    end, each of which takes so many passes; then they decode for 1 to `2 * steps - 1` rounds.
    """
    random, turn, planned = Random(1), 4, 4 * steps
    prefill = replace(PREFILL, parked_tokens=10**6)
    decode = replace(DECODE, kv_tokens=10**6, parked_tokens=10**6)
    ledger = DividedLedger(pace_of(turn, planned, passes, prefill, decode), count())
    numbers, queue, counts = count(), deque[str](), list[int]()
    under_way: deque[list[str]] = deque([] for _ in range(passes))
    left: dict[str, int] = {}
    for _ in range(40 * steps):
        ended = [name for name, rounds in left.items() if rounds == 1]
        left = {name: rounds - 1 for name, rounds in left.items() if rounds > 1}
        ledger.decoded([Progress(name, (5,), "length") for name in ended])
        firsts = [Progress(name, (4,), "length") for name in under_way.popleft()]
        moving = ledger.prefilled(firsts).moving
        ledger.moved(moving, (), 1)
        left |= {name: random.randint(1, 2 * steps - 1) for name in moving}
        begun = True
        while begun:
            while ledger.wanted:
                ledger.add(Request(str(next(numbers)), (3,) * 16, 30, Sampling()))
            begun = ledger.begin().prefill
            queue.extend(each.custom_id for each in begun)
        under_way.append([queue.popleft() for _ in range(min(len(queue), 3 * turn // 2))])
        counts.append(len(left))
    settled = counts[10 * steps :]
    assert 0.9 * planned <= sum(settled) / len(settled) <= 1.1 * planned
    assert max(counts) <= 1.3 * planned

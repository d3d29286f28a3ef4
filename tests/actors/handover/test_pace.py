"""How many prompts begin: so many that those which decode stay as many as the schedule says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from actors.handover.ledger import DividedLedger, Load, PrefillPace
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


def test_turns_are_those_of_another_schedule_from_the_next_one_on() -> None:
    """Though not for more requests than the stages that decode have slots for."""
    pace, waiting = pace_of(), requests([16] * 100)
    other = RequestSchedule("waa-c", 2, 20, 1, 1, 2, 16.0, tolerance=0.1)
    pace.follow(other)
    assert pace.ahead == 4
    assert [pace.turn(waiting, Load(0, n)) for n in (0, 20, 21, 40)] == [2, 2, 0, 0]
    assert [pace.turn(waiting, Load(n, 0)) for n in (4, 5, 6)] == [2, 1, 0], "three turns"
    pace.follow(replace(other, decode_requests=400, prefill_requests=8))
    assert [pace.turn(waiting, Load(0, n)) for n in (30, 40, 44, 100)] == [8, 4, 0, 0]
    pace.follow(replace(other, mean_prompt_tokens=32.0))
    assert pace.turn(waiting, IDLE) == 4, "as many tokens"


class Rounds:
    """Stages that prefill in so many passes, half as many requests again as a turn has in each, and
    others that decode in rounds, for 1 to `2 * steps - 1` of them; `counts`: who decodes in each.
    """

    def __init__(self, pace: PrefillPace, turn: int, passes: int, steps: int) -> None:
        self._ledger, self._random = DividedLedger(pace, count()), Random(1)
        self._turn, self._steps = turn, steps
        self._numbers, self._queue = count(), deque[str]()
        self._under_way: deque[list[str]] = deque([] for _ in range(passes))
        self._left: dict[str, int] = {}
        self.counts = list[int]()

    def go_on(self, rounds: int) -> list[int]:
        """Run so many rounds; returns who decoded in the second half of them."""
        for _ in range(rounds):
            self._round()
        return self.counts[-rounds // 2 :]

    def _round(self) -> None:
        ledger = self._ledger
        ended = [name for name, rounds in self._left.items() if rounds == 1]
        self._left = {name: rounds - 1 for name, rounds in self._left.items() if rounds > 1}
        ledger.decoded([Progress(name, (5,), "length") for name in ended])
        firsts = [Progress(name, (4,), "length") for name in self._under_way.popleft()]
        _, moving, _ = ledger.prefilled(firsts)
        ledger.moved(moving, (), 1)
        self._left |= {name: self._random.randint(1, 2 * self._steps - 1) for name in moving}
        turn: list[Request] | None = None
        while turn != []:
            while ledger.wanted:
                ledger.add(Request(str(next(self._numbers)), (3,) * 16, 30, Sampling()))
            turn, _ = ledger.begin()
            self._queue.extend(each.custom_id for each in turn)
        most = min(len(self._queue), 3 * self._turn // 2)
        self._under_way.append([self._queue.popleft() for _ in range(most)])
        self.counts.append(len(self._left))


def roomy(slots: int) -> tuple[QueueSizes, QueueSizes]:
    """Sizes of either side with memory for everything, and so many slots."""
    decode = replace(DECODE, slots=slots, kv_tokens=10**6, parked_tokens=10**6)
    return replace(PREFILL, parked_tokens=10**6), decode


@pytest.mark.parametrize(("passes", "steps"), [(1, 10), (3, 10), (6, 20), (2, 64)])
def test_in_the_steady_state_the_planned_number_decodes(passes: int, steps: int) -> None:
    turn, planned = 4, 4 * steps
    rounds = Rounds(pace_of(turn, planned, passes, *roomy(10**6)), turn, passes, steps)
    settled = rounds.go_on(40 * steps)
    assert 0.9 * planned <= sum(settled) / len(settled) <= 1.1 * planned
    assert max(rounds.counts) <= 1.3 * planned


def test_the_number_that_decodes_becomes_that_of_another_schedule() -> None:
    """Less, more, and no more than the slots."""
    pace = pace_of(4, 40, 2, *roomy(66))
    rounds = Rounds(pace, 4, 2, 10)
    for planned, expected in ((40, 40), (20, 20), (60, 60), (600, 66)):
        pace.follow(RequestSchedule("waa-c", planned // 10, planned, 1, 1, 2, 16.0, tolerance=0.1))
        settled = rounds.go_on(200)
        assert 0.85 * expected <= sum(settled) / len(settled) <= 1.1 * expected
        assert max(settled) <= 1.3 * expected

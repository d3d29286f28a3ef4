"""The ledger of a run, with pretend stages that some rows kill, and that die at random."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator

import pytest

from actors.messages import Finished, Request, Sampling
from actors.recovery.faults import Fault, RequestLedger
from quant.common.errors import DeviceError, StageLostError

SLOTS = 8


def requests(count: int) -> list[Request]:
    return [Request(str(i), (3,), 3, Sampling()) for i in range(count)]


class Runner:
    """Runs `coming` requests as a ledger says, `SLOTS` at a time; a poison row kills its batch
    always, any batch dies with `chance`. Counts how often each row was in a batch of its own that
    died.
    """

    def __init__(
        self,
        ledger: RequestLedger,
        coming: list[Request],
        poison: Collection[str] = (),
        chance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.results: list[Finished] = []
        self.died_alone: Counter[str] = Counter()
        self.deaths = 0
        self._ledger = ledger
        self._coming = deque(coming)
        self._poison = poison
        self._chance = chance
        self._random = random.Random(seed)

    def run(self) -> None:
        while (turn := self._ledger.next_turn()) or self._coming:
            for batch in self._batches(turn):
                ids = [request.custom_id for request in batch]
                if self._dies(ids):
                    break
                for custom_id in ids:
                    self._ledger.finish(custom_id)
                    self.results.append(Finished(custom_id, (1, 2), "stop"))

    def _batches(self, turn: tuple[Request, ...]) -> Iterator[tuple[Request, ...]]:
        yield from (turn[first : first + SLOTS] for first in range(0, len(turn), SLOTS))
        while self._coming and not self._ledger.has_suspects:
            new = [self._coming.popleft() for _ in range(min(SLOTS, len(self._coming)))]
            self._ledger.add(new)
            yield tuple(new)

    def _dies(self, ids: list[str]) -> bool:
        if not {*self._poison} & set(ids) and self._random.random() >= self._chance:
            return False
        self.deaths += 1
        self.died_alone.update(ids if len(ids) == 1 else ())
        self._ledger.progress({i: (1,) for i in ids})
        known = self._random.random() < 0.5  # else the first stage died
        hit = frozenset(ids) if known else None
        self.results += self._ledger.fault(Fault("died", 1, "stage 1 died", hit))
        return True


@pytest.mark.parametrize("seed", range(40))
def test_every_row_ends_once_and_only_what_failed_twice_alone_is_an_error(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 120)
    poison = {str(rng.randrange(count)) for _ in range(rng.randrange(4))}
    ledger = RequestLedger(retries=rng.randrange(1, 4), restarts=40)
    runner = Runner(ledger, requests(count), poison, rng.choice([0.0, 0.05, 0.3]), seed)
    runner.run()
    assert sorted(f.custom_id for f in runner.results) == sorted(map(str, range(count)))
    errors = {f.custom_id: f for f in runner.results if f.finish_reason == "error"}
    assert set(errors) >= poison
    for custom_id, error in errors.items():
        assert runner.died_alone[custom_id] == 2
        assert error.token_ids == (1,), "with the tokens it had"
        assert "stage 1 died" in str(error.error)
    assert ledger.unfinished == ()


def test_one_poison_row_is_found_in_few_restarts_among_many() -> None:
    ledger = RequestLedger(retries=2, restarts=5)
    runner = Runner(ledger, requests(1000), {"500"})
    runner.run()
    assert [f.custom_id for f in runner.results if f.finish_reason == "error"] == ["500"]
    assert runner.deaths <= 2 + 3 + 2, "twice, halves of eight rows, twice alone"


def test_stages_that_always_die_end_the_run() -> None:
    runner = Runner(RequestLedger(retries=9, restarts=5), requests(100), chance=1.0)
    with pytest.raises(StageLostError, match="6 restarts in a row, and no request finished"):
        runner.run()
    runner = Runner(RequestLedger(retries=2, restarts=5), requests(100), chance=1.0)
    with pytest.raises(StageLostError, match="6 requests in a row failed alone"):
        runner.run()
    assert len(runner.results) == 5


def test_memory_that_is_short_for_every_request_is_an_error_of_the_device() -> None:
    ledger = RequestLedger(retries=1, restarts=2)
    ledger.add(requests(20))
    fault = Fault("memory", 1, "stage 1 ran out of memory")

    def run() -> None:
        while ledger.next_turn():
            ledger.fault(fault)

    with pytest.raises(DeviceError, match=r"3 requests in a row.*out of memory"):
        run()


def test_what_is_unfinished_has_its_tokens_for_another_run() -> None:
    ledger = RequestLedger(retries=2, restarts=5)
    ledger.add(requests(4))
    ledger.finish("1")
    ledger.progress({"2": (7, 8), "1": (5,), "8": (1,)})
    ledger.progress({"2": (7,)})
    assert [(r.custom_id, r.generated) for r in ledger.unfinished] == [
        ("0", ()),
        ("2", (7, 8)),
        ("3", ()),
    ]


def test_suspects_have_a_turn_of_their_own_in_which_nothing_else_begins() -> None:
    ledger = RequestLedger(retries=1, restarts=5)
    ledger.add(requests(4))
    assert len(ledger.next_turn()) == 4
    assert not ledger.has_suspects
    ledger.fault(Fault("died", 1, "stage 1 died", frozenset({"1", "2", "3"})))
    assert [each.custom_id for each in ledger.next_turn()] == ["1", "2"]
    assert ledger.has_suspects
    ledger.finish("1")
    ledger.cancel("2")
    assert [each.custom_id for each in ledger.next_turn()] == ["3"]
    ledger.finish("3")
    assert [each.custom_id for each in ledger.next_turn()] == ["0"]
    assert not ledger.has_suspects

"""The ledger of a run, with pretend stages that some rows kill, and that die at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from actors.messages import Finished, Request, Sampling
from actors.recovery.faults import Fault, RequestLedger
from quant.common.errors import DeviceError, SpecError, StageLostError

SLOTS = 8


def requests(count: int) -> list[Request]:
    return [Request(str(i), (3,), 3, Sampling()) for i in range(count)]


class Runner:
    """Runs what a ledger says, `SLOTS` at a time; a poison row kills its batch always, any batch
    dies with `chance`. Counts how often each row was in a batch of its own that died.
    """

    def __init__(self, ledger: RequestLedger, poison: set[str], chance: float, seed: int) -> None:
        self.results: list[Finished] = []
        self.died_alone: Counter[str] = Counter()
        self.deaths = 0
        self.most_held = 0
        self._ledger = ledger
        self._poison = poison
        self._chance = chance
        self._random = random.Random(seed)

    def run(self) -> None:
        while self._ledger.next_turn():
            for batch in self._batches():
                self.most_held = max(self.most_held, len(self._ledger.unfinished))
                ids = [request.custom_id for request in batch]
                if self._dies(ids):
                    break
                ended = [Finished(i, (1, 2), "stop") for i in ids]
                for each in ended:
                    if self._ledger.finish(each.custom_id):
                        self.results.append(each)
                    assert not self._ledger.finish(each.custom_id)

    def _batches(self) -> Iterator[tuple[Request, ...]]:
        taken: tuple[Request, ...] = (None,) * SLOTS  # type: ignore[assignment]
        while len(taken) == SLOTS:
            taken = self._ledger.take(SLOTS)
            if taken:
                yield taken

    def _dies(self, ids: list[str]) -> bool:
        if not self._poison & set(ids) and self._random.random() >= self._chance:
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
    ledger = RequestLedger(requests(count), retries=rng.randrange(1, 4), restarts=40)
    runner = Runner(ledger, poison, rng.choice([0.0, 0.05, 0.3]), seed)
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
    ledger = RequestLedger(requests(1000), retries=2, restarts=5)
    runner = Runner(ledger, {"500"}, 0.0, 0)
    runner.run()
    assert [f.custom_id for f in runner.results if f.finish_reason == "error"] == ["500"]
    assert runner.deaths <= 2 + 3 + 2, "twice, halves of eight rows, twice alone"
    assert runner.most_held <= 2 * SLOTS, "of the source only what is needed is held"


def test_stages_that_always_die_end_the_run() -> None:
    runner = Runner(RequestLedger(requests(100), retries=9, restarts=5), set(), 1.0, 0)
    with pytest.raises(StageLostError, match="6 restarts in a row, and no request finished"):
        runner.run()
    runner = Runner(RequestLedger(requests(100), retries=2, restarts=5), set(), 1.0, 0)
    with pytest.raises(StageLostError, match="6 requests in a row failed alone"):
        runner.run()
    assert len(runner.results) == 5


def test_memory_that_is_short_for_every_request_is_an_error_of_the_device() -> None:
    ledger = RequestLedger(requests(20), retries=1, restarts=2)
    fault = Fault("memory", 1, "stage 1 ran out of memory")

    def run() -> None:
        while ledger.next_turn():
            ledger.take(64)
            ledger.fault(fault)

    with pytest.raises(DeviceError, match=r"3 requests in a row.*out of memory"):
        run()


def test_what_is_unfinished_has_its_tokens_for_another_run() -> None:
    ledger = RequestLedger(requests(9), retries=2, restarts=5)
    ledger.next_turn()
    ledger.take(4)
    ledger.finish("1")
    ledger.progress({"2": (7, 8), "1": (5,), "8": (1,)})
    ledger.progress({"2": (7,)})
    assert [(r.custom_id, r.generated) for r in ledger.unfinished] == [
        ("0", ()),
        ("2", (7, 8)),
        ("3", ()),
    ]


def test_a_source_that_pauses_is_neither_read_on_nor_taken_for_ended() -> None:
    one, two, three = requests(3)
    read: list[Request | None] = []

    def source() -> Iterator[Request | None]:
        for each in (one, None, None, two, three):
            read.append(each)
            yield each

    ledger = RequestLedger(source(), retries=2, restarts=5)
    ledger.next_turn()
    taken = [(ledger.take(2), ledger.paused, len(read)) for _ in range(4)]
    assert taken == [((one,), True, 2), ((), True, 3), ((two, three), False, 5), ((), False, 5)]
    for i in range(3):
        ledger.finish(str(i))
    assert not ledger.next_turn()


def test_two_rows_of_one_id_and_a_broken_source_are_the_users() -> None:
    ledger = RequestLedger(requests(2) + requests(1), retries=2, restarts=5)
    ledger.next_turn()
    with pytest.raises(SpecError, match="'0' is in the run twice"):
        ledger.take(3)

    def broken() -> Iterator[Request]:
        yield from requests(1)
        raise StageLostError("of another group")

    ledger = RequestLedger(broken(), retries=2, restarts=5)
    ledger.next_turn()
    with pytest.raises(StageLostError):
        ledger.take(3)

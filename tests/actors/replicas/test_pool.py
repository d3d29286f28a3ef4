"""Replicas that share rows: who gets them, what the loss of one means, and how it comes back."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Condition, Event
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import Request, Sampling
from actors.replicas.replica import Restarts
from actors.replicas.run import SharedRun
from quant.common.errors import CheckpointError, DeviceError, DeviceLostError, SpecError
from quant.common.errors import StageLostError as Lost
from tests.actors.replicas.pretend_groups import NO_END, WAIT_S, Scene, pretend_plan, requests

COUNT = 60
AHEAD = 3  # requests that wait at a replica at most


def by_replica(scene: Scene) -> Counter[int]:
    return Counter(index for index, _ in scene.handled)


def ids(finished: object) -> list[str]:
    return sorted((each.custom_id for each in finished), key=int)  # type: ignore[attr-defined]


def waiting_for(event: Event) -> Callable[[], None]:
    def wait() -> None:
        assert event.wait(WAIT_S)

    return wait


ALL = [str(i) for i in range(COUNT)]


def test_rows_go_where_slots_are_free_and_no_row_is_read_before() -> None:
    """One replica finishes nothing until the other has done all but what it has itself."""
    scene = Scene(3, 5)
    scene.may[1] = 0
    scene.begins[0] = lambda: scene.is_full(1)
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for request in requests(COUNT):
            read += 1
            yield request

    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(source())
        ended = []
        while len(ended) < COUNT - 5 - AHEAD:
            ended += next(results)
            assert read <= len(scene.handled) + 3 + 5 + 2 * AHEAD
        assert by_replica(scene)[0] >= COUNT - 5 - AHEAD
        scene.let(1)
        ended += [each for finished in results for each in finished]
    assert ids(ended) == ALL
    assert 5 <= by_replica(scene)[1] <= 5 + AHEAD
    assert pool.unfinished() == ()
    assert sorted(scene.released)[0] == 0
    assert scene.events == []


def test_few_rows_are_spread_by_the_slots() -> None:
    scene = Scene(4, 8)
    scene.may = [0, 0]

    with scene.pool as pool:
        scene.until_all_ready()
        run = pool.whole_answers()
        scene.until_all_take_part()
        run.submit(*requests(6))
        assert [len(scene.groups[index].run.held) for index in (0, 1)] == [2, 4]
        assert run.tokens_in_flight.keys() == {str(i) for i in range(6)}
        run.close()
        scene.let(0), scene.let(1)
        assert len([each for told in run.events() for each in told]) == 6


def test_the_rows_of_one_that_is_lost_go_to_the_others_with_their_tokens() -> None:
    scene = Scene(3, 4)
    scene.may = [2, 0]
    scene.begins[1] = lambda: bool(scene.events)
    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(iter(requests(COUNT)))
        ended = [*next(results)]
        while len(ended) < 2:
            ended += next(results)
        may_load = Event()
        scene.loads[0] = waiting_for(may_load)
        scene.lose(0, Lost("its node has burnt down"))
        scene.let(1)
        while len(ended) < COUNT // 2:
            ended += next(results)
        assert len(scene.events) == 1
        lost = r"replica 0 \(1 T4\) is lost: its node has burnt down; its [345] rows go"
        assert re.match(lost, scene.texts()[0])
        assert by_replica(scene)[0] == 2
        with scene.changed:
            scene.may[1], scene.may[0] = 0, NO_END
        may_load.set()
        scene.until(lambda: len(scene.events) == 2)
        back = r"replica 0 \(1 T4\) is back after \d+ s and takes rows again"
        assert re.fullmatch(back, scene.texts()[1])
        while by_replica(scene)[0] == 2:
            ended += next(results)
        scene.let(1)
        ended += [each for finished in results for each in finished]
    assert {event.kind for event in scene.events} == {"replica"}
    assert ids(ended) == ALL
    replayed = [request for _, request in scene.handled if request.generated == (7, 7)]
    assert len(replayed) == 3


def test_rows_that_come_back_last_wake_those_who_were_done() -> None:
    scene = Scene(5, 5, restarts=Restarts(attempts=0))
    scene.may = [NO_END, 0]
    scene.begins[0] = lambda: scene.is_full(1)
    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(iter(requests(COUNT)))
        ended = [*next(results)]
        while len(ended) < COUNT - 5 - AHEAD:
            ended += next(results)
        scene.lose(1, DeviceLostError("late", (0,), ("b/T4:0",)))
        ended += [each for finished in results for each in finished]
    assert ids(ended) == ALL
    assert by_replica(scene) == {0: COUNT}
    lost = r".* late; the pipelines of a fleet are not planned again; its \d rows .* is given up"
    assert re.match(lost, scene.texts()[0])


@pytest.mark.parametrize("seed", range(12))
def test_no_row_is_lost_or_doubled_however_replicas_come_and_go(seed: int) -> None:
    draws = random.Random(seed)
    scene = Scene(2, 3, 4, restarts=Restarts(attempts=100, pause_s=0.0))
    with scene.pool as pool:
        scene.until_all_ready()
        ended: list[str] = []
        for finished in pool.generate(iter(requests(COUNT))):
            ended += [each.custom_id for each in finished]
            if draws.random() < 0.5:
                scene.lose(draws.randrange(3), Lost("again"))
    assert sorted(ended, key=int) == ALL


def test_when_all_are_given_up_the_run_ends_and_says_why() -> None:
    scene = Scene(2, 2, restarts=Restarts(attempts=1, pause_s=0.0))
    scene.may = [0, 0]
    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(iter(requests(COUNT)))

        def refuse() -> None:
            raise DeviceError("in use")

        scene.loads = {0: refuse, 1: refuse}
        scene.lose(0, Lost("first"))
        scene.lose(1, Lost("second"))
        with pytest.raises(Lost, match=r"all 2 replicas are lost, at last replica . .*: in use"):
            list(results)
        assert len(pool.unfinished()) <= 4


def test_one_that_cannot_be_loaded_does_not_keep_the_others() -> None:
    scene = Scene(2, 2, restarts=Restarts(attempts=2, pause_s=0.0))

    def refuse() -> None:
        raise DeviceError("in use")

    scene.loads = {0: refuse}
    with scene.pool:
        assert ids(scene.run(iter(requests(COUNT)))) == ALL
        scene.until(lambda: any("given up" in text for text in scene.texts()))
        del scene.loads[0]
        assert ids(scene.run(iter(requests(COUNT)))) == ALL, "of the next run it gets a chance"
        scene.until(lambda: any("is back" in text for text in scene.texts()))


def test_where_none_can_be_loaded_it_is_said_as_of_one() -> None:
    scene = Scene(2, 2)

    def refuse() -> None:
        raise DeviceError("in use")

    scene.loads = {0: refuse, 1: refuse}
    with pytest.raises(DeviceError, match="in use"), scene.pool:
        pass


def test_a_mistake_of_the_users_ends_it_at_once() -> None:
    scene = Scene(2, 2)
    scene.may = [0, 0]
    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(iter([*requests(2), None, *requests(COUNT)[2:]]))
        assert next(results) == (), "the source pauses"
        scene.lose(0, CheckpointError("of another model"))
        with pytest.raises(CheckpointError, match="of another model"):
            list(results)
        pool.abandon()
        scene.let(0), scene.let(1)
        assert ids(scene.run(iter(requests(COUNT)))) == ALL


def test_an_id_that_comes_twice_is_refused_wherever_the_first_is() -> None:
    scene = Scene(2, 2)
    scene.may = [0, 0]
    with scene.pool as pool:
        with pytest.raises(SpecError, match="'1' is in the run twice"):
            list(pool.generate(iter([*requests(3), *requests(2)[1:]])))
        pool.abandon()


def test_a_run_that_is_left_leaves_replicas_that_are_ready_for_the_next() -> None:
    scene = Scene(2, 3)
    scene.may = [3, 3]
    with scene.pool as pool:
        scene.until_all_ready()
        results = pool.generate(iter(requests(COUNT)))
        next(results)
        groups = dict(scene.groups)
        pool.abandon()
        scene.let(0), scene.let(1)
        assert ids(scene.run(iter(requests(COUNT)))) == ALL
        assert scene.groups == groups
    assert scene.events == []


def test_pauses_double_and_end() -> None:
    restarts = Restarts(attempts=4, pause_s=10.0)
    error, gone = Lost("x"), DeviceLostError("y", (0,), ("a",))
    pauses = [restarts.pause_before(attempt, error) for attempt in range(1, 6)]
    assert pauses == [10.0, 20.0, 40.0, 80.0, None]
    assert Restarts(on_device_loss="wait").pause_before(100, gone) == 600.0
    assert Restarts(on_device_loss="wait").pause_before(100, error) is None
    assert Restarts(on_device_loss="fail").pause_before(1, gone) is None
    assert Restarts(on_device_loss="fail").pause_before(1, error) == 10.0


def test_on_one_node_they_load_one_after_another() -> None:
    scene = Scene(1, 1, 1, nodes="aab")
    may_load = Event()
    scene.loads = dict.fromkeys((0, 1), waiting_for(may_load))
    with scene.pool:
        scene.until(lambda: scene.loaded == [2] and len(scene.groups) == 2)
        assert scene.groups.keys() != {0, 1}
        may_load.set()
        scene.until_all_ready()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=20))
def test_each_request_goes_where_the_fewest_tokens_are_reserved(
    sizes: list[tuple[int, int]],
) -> None:
    """Against bins that are filled one by one, the emptier by its size first."""
    small, large = pretend_plan(1, "a"), pretend_plan(3, "b")
    run = SharedRun((small, large), False, Condition(), lambda: None)
    held: list[set[str]] = [set(), set()]
    for index in (0, 1):
        adds = lambda *given, own=held[index]: own.update(r.custom_id for r in given)  # noqa: E731
        run.join(index, SimpleNamespace(submit=adds))  # type: ignore[arg-type]
    filled = [0, 0]
    for number, (prompt, new) in enumerate(sizes):
        run.submit(Request(str(number), (3,) * prompt, new, Sampling()))
        wanted = 0 if filled[0] * 3 <= filled[1] else 1
        filled[wanted] += prompt + new
        assert str(number) in held[wanted]


def test_tokens_come_as_they_are_sampled_and_one_that_is_given_up_makes_room() -> None:
    scene = Scene(2, 2)
    scene.may = [0, 0]
    with scene.pool as pool:
        run = pool.live()
        scene.until_all_take_part()
        run.submit(*requests(6))
        run.cancel("0"), run.cancel("5"), run.cancel("none of that name")
        assert [len(scene.groups[index].run.held) for index in (0, 1)] == [2, 2]
        with pytest.raises(SpecError, match="'1' is in the run twice"):
            run.submit(requests(2)[1])
        run.submit(*requests(1))
        assert run.under_way == 5
        scene.let(0), scene.let(1)
        run.close()
        told = [each for some in run.events() for each in some]
        assert ids(told) == ["0", "1", "2", "3", "4"]
        assert run.under_way == 0

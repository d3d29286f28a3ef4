"""Several engines behind one server: where requests go, and what the loss of one means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from actors.processes import placement, reservation
from actors.processes.placement import Placement
from actors.sampling_options import GREEDY
from llmpq.errors import DeviceError, SpecError
from llmpq.serve.engine import (
    EngineStatus,
    EngineStoppingError,
    GenerationError,
    GenerationRequest,
)
from llmpq.serve.engines.replica_count import count_replicas, parse_replicas
from llmpq.serve.engines.replicas import ReplicatedEngine
from tests.llmpq.serve.asking import COMPLETIONS, JSON, client_of, completion, run, service_of
from tests.llmpq.serve.pretend_engine import IDLE, PretendEngine


@dataclass
class PretendReplica(PretendEngine):
    """An engine that is loaded when `may_load` is set, and becomes `loaded_as`."""

    status: EngineStatus = "loading"
    loaded_as: EngineStatus = "ready"
    may_load: threading.Event = field(default_factory=threading.Event)
    is_started: bool = False
    is_closed: bool = False

    def start(self) -> None:
        self.is_started = True

    def wait_loaded(self) -> None:
        self.may_load.wait(30)
        if not self.is_closed:
            self.status = self.loaded_as

    def close(self) -> None:
        self.is_closed = True
        self.status = "draining"
        self.may_load.set()


def ready(count: int, **options: object) -> list[PretendReplica]:
    return [PretendReplica(status="ready", **options) for _ in range(count)]


def request(name: str, prompt_tokens: int = 5, new_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(name, (7,) * prompt_tokens, new_tokens, GREEDY, name)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=20))
def test_each_request_goes_where_the_fewest_tokens_are_reserved(
    sizes: list[tuple[int, int]],
) -> None:
    """Against bins that are filled one by one, the emptier by its size first."""

    async def scenario() -> None:
        small, large = ready(2, hold_after=0)
        large.queue = replace(IDLE, kv_tokens=3 * IDLE.kv_tokens)
        engine = ReplicatedEngine((small, large))
        filled = [0, 0]
        tasks = []
        for number, (prompt, new) in enumerate(sizes):
            wanted = 0 if filled[0] * 3 <= filled[1] else 1
            filled[wanted] += prompt + new
            events = engine.generate(request(str(number), prompt, new))
            tasks.append(asyncio.ensure_future(anext(events)))
            await until(lambda: len(small.seen) + len(large.seen) == len(tasks))
            assert (small, large)[wanted].seen[-1].id == str(number)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not small.live | large.live)

    run(scenario)


def test_one_that_is_lost_ends_its_own_answers_alone() -> None:
    async def scenario() -> None:
        replicas = ready(2, hold_after=2)
        engine = ReplicatedEngine(replicas)
        async with client_of(service_of(engine)) as client:
            body = completion(stream=True)
            answers = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(4)]
            await until(lambda: all(each.is_holding for each in replicas))
            await until(lambda: [len(each.live) for each in replicas] == [2, 2])
            lost, left = replicas
            lost.fault, lost.fault_after, lost.status = GenerationError("lost"), 3, "failed"
            for each in replicas:
                each.go_on.set()
            texts = [(await each).text for each in answers]
            assert sorted("the generation failed: lost" in text for text in texts) == [0, 0, 1, 1]
            assert (await client.get("/ready")).status_code == 200
            assert engine.queue == left.queue
            again = await client.post(COMPLETIONS, json=completion(), headers=JSON)
            assert again.json()["choices"][0]["text"] == "Hello"
            assert len(lost.seen) == 2
            left.status = "failed"
            assert (await client.get("/ready")).json() == {"status": "failed"}
            with pytest.raises(EngineStoppingError):
                await anext(engine.generate(request("late")))

    run(scenario)


def test_an_answer_that_is_left_frees_its_tokens_at_once() -> None:
    async def scenario() -> None:
        first, second = ready(2, hold_after=1)
        engine = ReplicatedEngine((first, second))
        for number in range(3):  # the first one is the emptier again and again
            async with aclosing(engine.generate(request(str(number)))) as events:
                await anext(events)
            assert not first.live
        assert [len(first.seen), len(second.seen)] == [3, 0]

    run(scenario)


def test_they_load_one_after_another_and_the_first_makes_the_server_ready() -> None:
    async def scenario() -> None:
        first, second, third = (PretendReplica() for _ in range(3))
        second.loaded_as = "failed"
        engine = ReplicatedEngine((first, second, third))
        engine.start()
        await until(lambda: first.is_started)
        assert engine.status == "loading"
        assert not second.is_started
        first.may_load.set()
        await until(lambda: engine.status == "ready")
        second.may_load.set()
        await until(lambda: third.is_started)
        engine.close()
        assert all(each.is_closed for each in (first, second, third))
        assert engine.status == "draining"

    run(scenario)


Bundle = dict[str, float]


def counted(text: str, free: int, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> int:
    """Copies that are started where Ray grants `free` of them, which take `bundle` each."""
    granted = [Placement(bundle, 0.0, 0.0, 1)] * 4
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(placement, "place", lambda stages, offered: granted)
    monkeypatch.setattr(reservation, "copies_granted", lambda placements, most: min(free, most))
    return count_replicas([None] * 4, parse_replicas(text))


@pytest.mark.parametrize(
    ("text", "free", "expected"),
    [
        ("1", 0, 1),
        ("2", 3, 2),
        ("auto", 3, 3),
        ("3", 2, "free devices for 2 copies of the plan, 4 each; give --replicas 2, add nodes"),
        ("2", 0, "free devices for 0 copies of the plan, 4 each; add nodes"),
        ("auto", 0, "--replicas auto: there are free devices for 0"),
        ("0", 3, "--replicas is '0'; give 1 to 64, or auto"),
        ("two", 3, "--replicas is 'two'"),
        ("65", 100, "--replicas is '65'"),
    ],
)
def test_as_many_are_started_as_have_devices(
    text: str, free: int, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(expected, int):
        assert counted(text, free, {"T4": 1.0}, monkeypatch) == expected
        return
    with pytest.raises((SpecError, DeviceError), match=expected):
        counted(text, free, {"T4": 1.0}, monkeypatch)


def test_emulated_stages_have_no_devices_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted("3", 3, {}, monkeypatch) == 3
    with pytest.raises(SpecError, match="emulated; give a number"):
        counted("auto", 64, {}, monkeypatch)

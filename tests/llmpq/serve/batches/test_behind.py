"""Batches run behind online requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Request
from llmpq.serve.access import Gate
from llmpq.serve.batches.lines import BehindOnline
from llmpq.serve.engine import QueueState, TokenEvent
from llmpq.serve.options import ServeOptions
from tests.llmpq.serve.asking import COMPLETIONS, completion, run
from tests.llmpq.serve.batches.world import line, world
from tests.llmpq.serve.pretend_engine import PretendEngine

SLOTS = 4


@dataclass
class SlottedEngine(PretendEngine):
    """Serves first come, first served, in `SLOTS` slots, one token of each a step."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))
    waiting: int = 0
    running: int = 0
    most_waiting: int = 0

    @property
    def queue(self) -> QueueState:
        return QueueState(self.waiting, self.running, SLOTS, 0, 1000)

    @queue.setter
    def queue(self, value: QueueState) -> None:
        """Only the field's default sets it."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        self.waiting += 1
        try:
            if self.free.locked():
                self.most_waiting = max(self.most_waiting, self.waiting)
            await self.free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            async for event in super().generate(request):
                yield event
        finally:
            self.running -= 1
            self.free.release()


def test_an_online_request_runs_before_the_rest_of_a_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = SlottedEngine()
        async with world(tmp_path, engine) as made:
            begun = await made.begun([line(f"{number:03d}") for number in range(60)])
            await made.until(begun, lambda batch: batch["request_counts"]["completed"] >= 10)
            before = len(engine.seen)
            asked = [
                made.client.post(COMPLETIONS, json=completion(prompt=f"on {number}"))
                for number in range(8)
            ]
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
            seen = [bytes(request.prompt_ids) for request in engine.seen]
            last = max(seen.index(b"on %d" % number) for number in range(8))
            between = sum(each.startswith(b"of") for each in seen[before:last])
            assert between <= SLOTS  # those that began before the online requests were read
            assert len(seen) < 60
            assert (await made.finished(begun))["request_counts"]["completed"] == 60
            assert len(engine.seen) == 68
            assert engine.most_waiting <= 8  # online ones: none of the batch waits in the engine

    run(scenario)


def test_a_batch_alone_fills_the_slots_and_never_waits_in_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = SlottedEngine()
        most = 0

        def answer(request: Request) -> bytes:
            nonlocal most
            most = max(most, engine.running)
            return b"x" * 20

        engine.answer = answer
        async with world(tmp_path, engine) as made:
            lines = [line("many", n=40), *(line(f"{number}") for number in range(20))]
            batch = await made.finished(await made.begun(lines))
            assert batch["request_counts"]["completed"] == 21
            assert most == SLOTS
            assert engine.most_waiting == 0

    run(scenario)


def test_online_requests_find_the_whole_queue_while_a_batch_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = SlottedEngine(hold_after=0)
        options = ServeOptions(queue_limit=1)
        async with world(tmp_path, engine, options) as made:
            begun = await made.begun([line(str(number)) for number in range(9)])
            await made.until(begun, lambda batch: engine.is_holding)
            body = completion(n=SLOTS + 1)
            asked = asyncio.create_task(made.client.post(COMPLETIONS, json=body))
            while made.service.gate.answers < SLOTS + 1:
                await asyncio.sleep(0)
            assert (await made.client.post(COMPLETIONS, json=completion())).status_code == 429
            engine.go_on.set()
            assert (await asked).status_code == 200
            assert (await made.finished(begun))["request_counts"]["completed"] == 9

    run(scenario)


@settings(max_examples=200)
@given(
    slots=st.integers(1, 40),
    online=st.integers(0, 50),
    background=st.integers(0, 40),
    others=st.integers(0, 50),
)
def test_room_is_what_online_requests_leave(
    slots: int, online: int, background: int, others: int
) -> None:
    engine = PretendEngine()
    engine.queue = replace(engine.queue, slots=slots, running=others + background)
    gate = Gate(engine, ServeOptions())
    behind = BehindOnline(engine, gate)
    gate.answers, gate.background = online, background
    assert behind.has_room == (max(online, others) + background < slots)
    gate.close()
    assert not behind.has_room


def test_few_generations_start_at_once_and_one_that_is_left_frees_its_place() -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=0)
        engine.queue = replace(engine.queue, slots=8)
        gate = Gate(engine, ServeOptions())
        behind = BehindOnline(engine, gate)

        async def read(number: int) -> list[TokenEvent]:
            request = Request(str(number), (65,), 5, engine.sampling, draw_id="0")
            return [event async for event in behind.generate(request)]

        tasks = [asyncio.create_task(read(number)) for number in range(8)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine.live) == gate.background == 2
        for task in tasks[:2]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        while engine.live != {"2", "3"}:
            await asyncio.sleep(0)
        engine.go_on.set()
        found = await asyncio.gather(*tasks[2:])
        assert [len(events) for events in found] == [2] * 6
        assert gate.background == 0

    run(scenario)

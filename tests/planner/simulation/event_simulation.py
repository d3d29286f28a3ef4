"""A pipeline of given seconds, and an event simulation of it that shares no code with ours."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np

from planner.costs.pass_times import PassSeconds
from planner.schedule.passes import JobRows, Pass
from planner.workload import MicroBatches


@dataclass(frozen=True)
class Pipeline:
    """Seconds per request on stages and links, for each phase [N], and per token of context."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    prefill_comm: tuple[float, ...]
    decode_comm: tuple[float, ...]
    per_context: float = 0.0
    size_matters: bool = True

    @property
    def stages(self) -> int:
        return len(self.prefill)

    def seconds(self, each: Pass) -> PassSeconds:
        size = each.requests if self.size_matters else 1
        own, comm = (
            (self.prefill, self.prefill_comm)
            if each.phase == "prefill"
            else (self.decode, self.decode_comm)
        )
        grown = self.per_context * each.context_length
        return PassSeconds(
            tuple(size * (one + grown) for one in own), tuple(size * one for one in comm)
        )


@dataclass
class Machine:
    """A stage or link that serves first come, first served."""

    waiting: list[int] = field(default_factory=list)
    busy: bool = False


class EventSimulation:
    """The same system by events: a clock, queues in front of machines, a first stage that decides.

    Written without the recurrence: machines 0 .. 2N-1 are stage 0, link 0, stage 1, link 1, and so
    on; `returned` holds what is back and not yet taken in.
    """

    def __init__(
        self, pipeline: Pipeline, rows: JobRows, sizes: MicroBatches, slots: int | None = None
    ) -> None:
        self.pipeline, self.rows, self.sizes = pipeline, rows, sizes
        count = len(rows.prompts) if slots is None else slots
        self.queue = list(range(len(rows.prompts)))
        self.never_used = count
        self.free = list(range(count))
        self.refilling, self.prefill_was_last = True, False
        self.request_in: dict[int, int] = {}
        self.tokens: dict[int, int] = dict.fromkeys(self.queue, 0)
        self.ended_s: dict[int, float] = {}
        self.groups = [range(count)[i : i + sizes.decode] for i in range(count)[:: sizes.decode]]
        self.begun: set[int] = set()  # groups that have stepped since they were last empty
        self.stepping: set[int] = set()
        self.ready: list[int] = []
        self.flights: list[tuple[Pass, list[int]]] = []
        self.returned: dict[int, float] = {}
        self.taken = 0
        self.machines = [Machine() for _ in range(2 * pipeline.stages)]
        self.events: list[tuple[float, int, int, int]] = []
        self.order = itertools.count()
        self.spans: dict[tuple[int, int], tuple[float, float]] = {}

    def run(self) -> float:
        self.decide(0.0)
        now = 0.0
        while self.events:
            now, _, machine, flight = heapq.heappop(self.events)
            self.machines[machine].busy = False
            if machine + 1 == len(self.machines):
                self.returned[flight] = now
            else:
                self.machines[machine + 1].waiting.append(flight)
            for index in range(1, len(self.machines)):
                self.serve(index, now)
            self.decide(now)
        assert list(self.tokens.values()) == list(self.rows.outputs)
        return now

    def serve(self, index: int, now: float) -> None:
        machine = self.machines[index]
        if machine.busy or not machine.waiting:
            return
        flight = machine.waiting.pop(0)
        seconds = self.pipeline.seconds(self.flights[flight][0])
        taken = (seconds.transfer if index % 2 else seconds.compute)[index // 2]
        machine.busy = True
        self.spans[flight, index] = now, now + taken
        heapq.heappush(self.events, (now + taken, next(self.order), index, flight))

    def decide(self, now: float) -> None:
        """What the first stage's actor does whenever it is not computing."""
        while not self.machines[0].busy:
            if len(self.flights) - self.taken < 2 * self.pipeline.stages and self.submit():
                self.serve(0, now)
            elif self.taken in self.returned:
                self.take_in(*self.flights[self.taken], self.returned[self.taken])
                self.taken += 1
            else:
                return

    def submit(self) -> bool:
        """Choose the next micro-batch by looking at every slot anew."""
        room = min(self.never_used or len(self.free), len(self.queue), self.sizes.prefill)
        newcomers = room if self.refilling else 0
        group = next((each for each in self.ready if self.may_step(each, newcomers > 0)), None)
        idle = any(not any(s in self.request_in for s in slots) for slots in self.groups)
        if group is None and not newcomers and idle:
            newcomers = room
        prefers = self.never_used > 0 or group is None or not self.prefill_was_last
        if newcomers and prefers:
            self.submit_prefill(newcomers)
        elif group is not None:
            self.submit_decode(group)
        else:
            return False
        return True

    def may_step(self, group: int, newcomers: bool) -> bool:
        """A group that begins waits for all who come."""
        states = [self.tokens_in(slot) for slot in self.groups[group]]
        waits = 0 in states or (newcomers and None in states)
        return group in self.begun or not waits

    def tokens_in(self, slot: int) -> int | None:
        return self.tokens[self.request_in[slot]] if slot in self.request_in else None

    def submit_prefill(self, count: int) -> None:
        slots, self.free = sorted(self.free[:count]), self.free[count:]
        self.never_used = max(0, self.never_used - count)
        if not self.free:
            self.refilling = False
        for slot in slots:
            self.request_in[slot] = self.queue.pop(0)
        prompts = tuple(self.rows.prompts[self.request_in[slot]] for slot in slots)
        self.prefill_was_last = True
        self.send(Pass("prefill", 0, 0, len(slots), round(np.mean(prompts)), 0, 0, prompts), slots)

    def submit_decode(self, group: int) -> None:
        slots = [slot for slot in self.groups[group] if self.tokens_in(slot)]
        contexts = []
        for slot in slots:
            request = self.request_in[slot]
            contexts.append(self.rows.prompts[request] + self.tokens[request] - 1)
        self.ready.remove(group)
        self.begun.add(group)
        self.stepping.add(group)
        self.prefill_was_last = False
        context = int(np.floor(np.mean(contexts) + 0.5))
        self.send(Pass("decode", 0, 0, len(slots), 1, context, 0), slots)

    def send(self, entry: Pass, slots: list[int]) -> None:
        self.machines[0].waiting.append(len(self.flights))
        self.flights.append((entry, slots))

    def take_in(self, entry: Pass, slots: list[int], back_s: float) -> None:
        touched = sorted({slot // self.sizes.decode for slot in slots})
        if entry.phase == "decode":
            self.stepping.discard(touched[0])
        for slot in slots:
            self.tokens[self.request_in[slot]] += 1
        for slot in slots:
            request = self.request_in[slot]
            if self.tokens[request] == self.rows.outputs[request]:
                self.ended_s[request] = back_s
                del self.request_in[slot]
                self.free.append(slot)
                share = max(1, sum(map(len, self.groups)) // 4)
                if self.pipeline.stages == 1:
                    share = min(share, self.sizes.prefill)
                self.refilling |= len(self.free) >= share
        for group in touched:
            decodes = any(self.tokens_in(slot) for slot in self.groups[group])
            if not decodes:
                self.begun.discard(group)
            elif group not in self.stepping and group not in self.ready:
                self.ready.append(group)

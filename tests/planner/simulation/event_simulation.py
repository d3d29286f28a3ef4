"""A pipeline of given seconds, and an event simulation of it that shares no code with ours."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from planner.micro_batches import MicroBatches
from planner.simulation.simulation import (
    Pass,
    PassSeconds,
)
from planner.workload import Workload


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

    def __init__(self, pipeline: Pipeline, workload: Workload, sizes: MicroBatches) -> None:
        self.pipeline, self.workload, self.sizes = pipeline, workload, sizes
        self.slots = range(workload.global_batch)
        self.todo = [self.slots[i : i + sizes.prefill] for i in self.slots[:: sizes.prefill]]
        self.tokens: dict[int, int] = defaultdict(int)
        self.ready: list[int] = []
        self.flights: list[tuple[Pass, range]] = []
        self.returned: set[int] = set()
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
                self.returned.add(flight)
            else:
                self.machines[machine + 1].waiting.append(flight)
            for index in range(1, len(self.machines)):
                self.serve(index, now)
            self.decide(now)
        assert set(self.tokens.values()) == {self.workload.new_tokens}
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
                self.take_in(*self.flights[self.taken])
                self.taken += 1
            else:
                return

    def submit(self) -> bool:
        if self.todo:
            slots, tokens, context, phase = self.todo.pop(0), self.workload.prompt_length, 0, 0
        elif self.ready:
            first = self.ready.pop(0) * self.sizes.decode
            slots, tokens, phase = self.slots[first : first + self.sizes.decode], 1, 1
            context = self.workload.prompt_length + self.tokens[first] - 1
        else:
            return False
        kind = ("prefill", "decode")[phase]
        entry = Pass(kind, 0, 0, len(slots), tokens, context, 0)  # type: ignore[arg-type]
        self.machines[0].waiting.append(len(self.flights))
        self.flights.append((entry, slots))
        return True

    def take_in(self, _: Pass, slots: range) -> None:
        for slot in slots:
            self.tokens[slot] += 1
        for group in sorted({slot // self.sizes.decode for slot in slots}):
            first = group * self.sizes.decode
            counts = {self.tokens[s] for s in self.slots[first : first + self.sizes.decode]}
            if 0 not in counts and counts != {self.workload.new_tokens}:
                self.ready.append(group)

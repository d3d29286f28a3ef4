"""Simulation of WAA event by event, with lengths drawn at random: some stages prefill, their keys
and values are handed over one micro-batch after the other, and other stages decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from planner.latency_bound.simulate import (
    DrawnRequest,
    ObservedRequests,
    PipelineOfRequests,
    RequestQueue,
    Watch,
)
from planner.latency_bound.waa_sides import Handover, WaaSides
from planner.schedule.prefills import WAITING, PrefillSizes, newcomers
from planner.scheduling import RequestSchedule


class DecodeGroup:
    """The requests of a group; `context_tokens` are those that all of them have before a step."""

    def __init__(self) -> None:
        self.size = self.context_tokens = 0
        self._step = 0
        self._ends: dict[int, list[DrawnRequest]] = {}

    def join(self, requests: Iterable[DrawnRequest]) -> None:
        """Take in requests whose first token is there and that want more."""
        for request in requests:
            self.size += 1
            self.context_tokens += request.prompt
            self._ends.setdefault(self._step + request.output - 1, []).append(request)

    def made_step(self) -> list[DrawnRequest]:
        """Count a step that is back; returns those that have ended with it."""
        self._step += 1
        self.context_tokens += self.size
        ended = self._ends.pop(self._step, [])
        self.size -= len(ended)
        self.context_tokens -= sum(each.prompt + each.output - 1 for each in ended)
        return ended


def simulate_waa(
    sides: WaaSides,
    schedule: RequestSchedule,
    watch: Watch,
    generator: np.random.Generator,
) -> ObservedRequests:
    """Simulate what the runtime does under `schedule`, from when all stages are empty. Latencies
    count from when a prefill is submitted.

    Memory is never short, and what stages do is known at once.
    """
    lengths, handover = sides.lengths, sides.handover
    run = _WaaRun(
        RequestQueue(lengths, generator),
        _Prefill(
            PipelineOfRequests(sides.prefill, handover.keep),
            PrefillSizes.of(schedule, lengths.prompts.longest),
            watch,
        ),
        _Decode(PipelineOfRequests(sides.decode, handover.restore), schedule),
        schedule,
        watch,
    )
    run.run(handover)
    return watch.observed()


class _Prefill:
    """The stages that prefill: a queue, and the micro-batches under way."""

    def __init__(self, pipeline: PipelineOfRequests, sizes: PrefillSizes, watch: Watch) -> None:
        self._pipeline, self._sizes, self._watch = pipeline, sizes, watch
        self.stages = pipeline.stages
        self._waiting: deque[DrawnRequest] = deque()
        self._waiting_tokens = 0
        self._under_way: deque[tuple[float, list[DrawnRequest]]] = deque()

    @property
    def next_s(self) -> float:
        """When the oldest micro-batch is back."""
        return self._under_way[0][0] if self._under_way else inf

    def add(self, requests: Sequence[DrawnRequest]) -> None:
        """Put requests at the end of the queue."""
        self._waiting.extend(requests)
        self._waiting_tokens += sum(each.prompt for each in requests)

    def submit(self, now_s: float) -> None:
        """Submit what may be under way."""
        while self._waiting and len(self._under_way) < self.stages + WAITING:
            waiting = (each.prompt for each in self._waiting)
            count = self._sizes.next_part(waiting, self._waiting_tokens)
            taken = [self._waiting.popleft() for _ in range(count)]
            prompts = [each.prompt for each in taken]
            self._waiting_tokens -= sum(prompts)
            self._watch.begin(taken, now_s, bounds=True)
            kept = [each.prompt for each in taken if each.output > 1]
            self._under_way.append((self._pipeline.prefill(prompts, now_s, kept), taken))

    def take_back(self) -> list[DrawnRequest]:
        """The requests of the oldest micro-batch, which is back."""
        return self._under_way.popleft()[1]


class _Decode:
    """The stages that decode: groups, each with a step under way or resting, and the requests that
    have come and join a group between two of its steps.
    """

    def __init__(self, pipeline: PipelineOfRequests, schedule: RequestSchedule) -> None:
        self._pipeline = pipeline
        most = schedule.most_in_flight
        self._most_in_group = -(-most // schedule.decode_micro_batches)
        self._groups = [DecodeGroup() for _ in range(-(-most // self._most_in_group))]
        self._resting = deque(self._groups)
        self._under_way: deque[tuple[float, DecodeGroup]] = deque()
        self._arrived: deque[DrawnRequest] = deque()
        self._in_groups = 0

    @property
    def next_s(self) -> float:
        """When the oldest step is back."""
        return self._under_way[0][0] if self._under_way else inf

    def add(self, requests: Sequence[DrawnRequest]) -> None:
        """Take in requests whose keys and values have come."""
        self._arrived.extend(requests)

    def submit(self, now_s: float) -> None:
        """Have every resting group make a step that has requests, in the order of their coming."""
        for _ in range(len(self._resting)):
            group = self._resting.popleft()
            restored = self._join(group)
            if group.size:
                context = group.context_tokens
                back_s = self._pipeline.decode(group.size, context, now_s, restored)
                self._under_way.append((back_s, group))
            else:
                self._resting.append(group)

    def take_back(self) -> list[DrawnRequest]:
        """Count the oldest step, which is back; returns who has ended with it."""
        _, group = self._under_way.popleft()
        ended = group.made_step()
        self._in_groups -= len(ended)
        self._resting.append(group)
        return ended

    def _join(self, group: DecodeGroup) -> list[int]:
        """Let requests join; returns the tokens of their prompts."""
        if not self._arrived:
            return []
        even = ceil((self._in_groups + len(self._arrived)) / len(self._groups))
        room = max(0, min(even, self._most_in_group) - group.size)
        joining = [self._arrived.popleft() for _ in range(min(room, len(self._arrived)))]
        group.join(joining)
        self._in_groups += len(joining)
        return [each.prompt for each in joining]


@dataclass(slots=True)
class _Load:
    """Requests in flight: those whose prompts wait or are prefilled, and those that are handed over
    and `decoding`; so many of these were `leaving` while the last one was prefilled.
    """

    prefilling: int = 0
    decoding: int = 0
    leaving: int = 0
    ended: int = 0


class _WaaRun:
    """The state of a simulation."""

    def __init__(
        self,
        queue: RequestQueue,
        prefill: _Prefill,
        decode: _Decode,
        schedule: RequestSchedule,
        watch: Watch,
    ) -> None:
        self._queue, self._schedule, self._watch = queue, schedule, watch
        self._prefill, self._decode = prefill, decode
        self._load = _Load()
        self._ended_before: deque[int] = deque()  # those that had when each began that prefills
        self._moving: deque[tuple[float, list[DrawnRequest]]] = deque()
        self._moved_s = 0.0

    def run(self, handover: Handover) -> None:
        """Run until all that are watched have ended."""
        self._begin(0.0)
        while not self._watch.done:
            prefilled_s, decoded_s = self._prefill.next_s, self._decode.next_s
            moved_s = self._moving[0][0] if self._moving else inf
            if decoded_s <= prefilled_s and decoded_s <= moved_s:
                now_s = decoded_s
                self._end(self._decode.take_back(), now_s)
            elif moved_s <= prefilled_s:
                now_s = moved_s
                self._decode.add(self._moving.popleft()[1])
            else:
                now_s = prefilled_s
                self._take_prefilled(now_s, handover)
            self._begin(now_s)
            self._decode.submit(now_s)

    def _begin(self, now_s: float) -> None:
        """Begin what may begin."""
        load = self._load
        while turn := self._turn():
            load.prefilling += len(turn)
            self._ended_before.extend([load.ended] * len(turn))
            self._prefill.add(turn)
        self._prefill.submit(now_s)

    def _turn(self) -> list[DrawnRequest]:
        """The requests that begin now, if any do."""
        load = self._load
        present = load.decoding + max(0, load.prefilling - load.leaving)
        schedule, stages = self._schedule, self._prefill.stages
        numbers = newcomers(schedule, stages, present, load.prefilling)
        return self._queue.take(schedule, *numbers)

    def _take_prefilled(self, now_s: float, handover: Handover) -> None:
        """Take in first tokens; those who want more are handed over, after those before them."""
        requests, load = self._prefill.take_back(), self._load
        going = [each for each in requests if each.output > 1]
        for each in requests:
            load.leaving = load.ended - self._ended_before.popleft()
            if each.output == 1:
                load.ended += 1
        load.prefilling -= len(requests)
        load.decoding += len(going)
        self._watch.end((each for each in requests if each.output == 1), now_s)
        if going:
            seconds = handover.sent_s(sum(each.prompt for each in going))
            self._moved_s = max(self._moved_s, now_s) + seconds
            self._moving.append((self._moved_s, going))

    def _end(self, requests: Sequence[DrawnRequest], now_s: float) -> None:
        self._watch.end(requests, now_s)
        self._load.decoding -= len(requests)
        self._load.ended += len(requests)

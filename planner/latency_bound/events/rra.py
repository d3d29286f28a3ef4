"""Discrete-event simulation of RRA with lengths drawn at random.

Micro-batches come back in the order in which they were submitted, since stages and links serve
first come, first served. So groups act in one order for ever: in every round each of them makes a
decode step or has its newcomers prefilled, and what it does next is decided when its last
micro-batch is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from planner.latency_bound.events.decode_group import DecodeGroup
from planner.latency_bound.events.drawn_requests import DrawnRequest, RequestQueue
from planner.latency_bound.events.passes import PipelineOfRequests, evenly_divided
from planner.latency_bound.events.watch import Observed, Watch
from planner.latency_bound.stage_times import StageTimes
from planner.length_distribution import RequestLengths
from planner.schedule.static import UNDER_WAY_PER_STAGE
from planner.scheduling import RequestSchedule

_ROUNDING = 1e-9


def simulate_rra(
    times: StageTimes,
    lengths: RequestLengths,
    schedule: RequestSchedule,
    watch: Watch,
    generator: np.random.Generator,
) -> Observed:
    """Simulate groups that have their turns in the same round, and again after `decode_steps` more,
    from when all are empty.

    A group without newcomers makes a decode step in that round, and one whose requests have all
    ended waits for the next; if none has requests, their turns come at once. Prefills leave a
    bubble behind them which those of all groups share then.
    """
    run = _RraRun(times, RequestQueue(lengths, generator), schedule, watch)
    while not watch.done:
        run.advance()
    return watch.observed()


class _Group(DecodeGroup):
    """A group; `owed` are the newcomers that its earlier turns had too few, in shares of one."""

    def __init__(self, owed: float) -> None:
        super().__init__()
        self.owed = owed
        self.ended = self.rounds_to_go = self.under_way = 0
        self.parts: deque[Sequence[DrawnRequest]] = deque()


@dataclass(frozen=True)
class _UnderWay:
    """A micro-batch: the prompts of these newcomers, or a decode step of the group; or nothing, of
    a group that waits.
    """

    back_s: float
    group: _Group
    newcomers: Sequence[DrawnRequest]


class _RraRun:
    """The state of a simulation: who is under way, and which groups wait to be."""

    def __init__(
        self, times: StageTimes, queue: RequestQueue, schedule: RequestSchedule, watch: Watch
    ) -> None:
        self._pipeline, self._queue = PipelineOfRequests(times), queue
        self._schedule, self._watch = schedule, watch
        self._share = schedule.prefill_requests / schedule.decode_micro_batches
        self._most_under_way = UNDER_WAY_PER_STAGE * times.stages
        self._groups = [_Group(i * self._share % 1) for i in range(schedule.decode_micro_batches)]
        self._ready = deque(self._groups)
        self._under_way: deque[_UnderWay] = deque()
        self._now_s = 0.0

    def advance(self) -> None:
        """Submit what may be under way, and take in the oldest micro-batch."""
        while self._ready and len(self._under_way) < self._most_under_way:
            self._submit(self._ready[0])
        oldest = self._under_way.popleft()
        self._now_s, group = oldest.back_s, oldest.group
        ended = [each for each in oldest.newcomers if each.output == 1]
        group.join(each for each in oldest.newcomers if each.output > 1)
        if not oldest.newcomers and group.size:
            ended = group.made_step()
        self._watch.end(ended, self._now_s)
        group.ended += len(ended)
        group.under_way -= 1
        if not group.under_way and not group.parts:
            self._ready.append(group)

    def _submit(self, group: _Group) -> None:
        """Submit the next micro-batch of the group that has been ready for longest."""
        if not group.parts:
            if not group.rounds_to_go:
                self._begin_turn(group)
            else:
                group.rounds_to_go -= 1
        part: Sequence[DrawnRequest] = group.parts.popleft() if group.parts else ()
        if part:
            back_s = self._pipeline.prefill([each.prompt for each in part], self._now_s)
        elif group.size:
            back_s = self._pipeline.decode(group.size, group.context_tokens, self._now_s)
        else:
            back_s = self._under_way[-1].back_s if self._under_way else self._now_s
        group.under_way += 1
        self._under_way.append(_UnderWay(back_s, group, part))
        if not group.parts:
            self._ready.popleft()

    def _begin_turn(self, group: _Group) -> None:
        newcomers = self._newcomers(group)
        self._watch.begin(newcomers, self._now_s, group is self._groups[0])
        group.parts.extend(evenly_divided(newcomers, self._schedule.prefill_micro_batch))
        group.rounds_to_go, group.ended = self._schedule.decode_steps, 0

    def _newcomers(self, group: _Group) -> list[DrawnRequest]:
        """The newcomers of a turn (ExeGPT section 5.2): so many as the schedule says, and as ended
        where else the group would have too few.
        """
        schedule = self._schedule
        mean = schedule.decode_requests / schedule.decode_micro_batches
        fewest = min(floor(mean), ceil((1 - schedule.tolerance) * mean - _ROUNDING))
        most = max(ceil(mean), floor((1 + schedule.tolerance) * mean + _ROUNDING))
        group.owed += self._share
        wanted = floor(group.owed + _ROUNDING)
        group.owed -= wanted
        missing, room = fewest - group.size, most - group.size
        if wanted < missing:
            wanted = min(missing, wanted + group.ended)
        wanted = min(max(wanted, int(not group.size)), room)
        if wanted < 1:
            return []
        tokens = wanted * schedule.mean_prompt_tokens
        within = (1 - schedule.tolerance) * tokens, (1 + schedule.tolerance) * tokens
        return self._queue.take(wanted, missing if wanted >= missing else 0, room, within)

"""Live runs in virtual time: the product's own scheduler and driver over stages that take their
modelled seconds, without waiting for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.messages import (
    Admission,
    FinishReason,
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.schedule.driver import PipelineDriver
from actors.schedule.live_run import Inbox, LiveRun, Mail
from actors.schedule.scheduler import Scheduler
from benchmarks.reproduction.orca.traces import Arrival, Lengths, Trace
from planner.plan.modelled_times import ModelledTimes

_SAMPLING = Sampling(ignore_eos=True)


@dataclass(frozen=True)
class Outcome:
    """A request's lengths, and the seconds from its arrival to its first and to its last token."""

    lengths: Lengths
    first_s: float
    latency_s: float
    ended_s: float

    @property
    def normalized_s(self) -> float:
        """Latency for each generated token (section 6.2)."""
        return self.latency_s / self.lengths.new


@dataclass
class VirtualClock:
    """The time that a simulated run has reached."""

    now_s: float = 0.0


class VirtualPipeline:
    """A pipeline whose stages and links serve first come, first served, each its modelled time.

    `answer_tokens` tells how many tokens a request will have when it ends.
    """

    def __init__(
        self,
        times: Sequence[ModelledTimes],
        clock: VirtualClock,
        answer_tokens: Callable[[Admission], int] = lambda each: each.max_new_tokens,
    ) -> None:
        self.stages = len(times)
        self._times, self._clock = times, clock
        self._answer_tokens = answer_tokens
        self._stage_free_s = [0.0] * self.stages
        self._link_free_s = [0.0] * self.stages
        self._missing: dict[int, int] = {}  # tokens that each slot's request will still get

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> tuple[float, MicroBatch]:
        """Start a micro-batch; the handle has the second at which its tokens are back.

        The driver runs on the first stage, as in the product: it goes on when that has computed.
        """
        self._missing |= {
            each.slot: self._answer_tokens(each) - len(each.generated) for each in batch.admitted
        }
        unique = {id(each): each for each in self._times}
        beside_s = self.beside_s(batch)
        seconds = {
            key: each.pass_s(batch.starts, batch.counts) + beside_s for key, each in unique.items()
        }
        tokens, answers = int(batch.counts.sum()), len(batch.sampled_rows)
        at_s = self._clock.now_s
        for stage, times in enumerate(self._times):
            at_s = max(at_s, self._stage_free_s[stage]) + seconds[id(times)]
            self._stage_free_s[stage] = at_s
            if not stage:
                self._clock.now_s = at_s
            at_s = max(at_s, self._link_free_s[stage]) + times.transfer_s(tokens, answers)
            self._link_free_s[stage] = at_s
        return at_s, batch

    def beside_s(self, batch: MicroBatch) -> float:
        """Seconds of every stage for what it does beside computing: none here."""
        return 0.0

    def result(self, handle: tuple[float, MicroBatch]) -> Sampled:
        """Turn the clock to when the micro-batch is back; its tokens are all 0."""
        back_s, batch = handle
        self._clock.now_s = max(self._clock.now_s, back_s)
        reasons: list[FinishReason | None] = []
        for slot in batch.slots[batch.sampled_rows].tolist():
            self._missing[slot] -= 1
            reasons.append(None if self._missing[slot] else "length")
        return Sampled(np.zeros(len(reasons), dtype=np.int64), tuple(reasons))


class TraceInbox(Inbox):
    """An inbox into which the requests of a trace come at their time."""

    def __init__(self, trace: Trace, clock: VirtualClock) -> None:
        super().__init__(0)
        self._coming = deque(enumerate(trace))
        self._clock = clock

    def take(self, wait: bool) -> Mail:
        """What has come by now; with `wait` the clock turns to the next arrival."""
        if wait and self._coming:
            self._clock.now_s = max(self._clock.now_s, self._coming[0][1].at_s)
        requests = []
        while self._coming and self._coming[0][1].at_s <= self._clock.now_s:
            number, arrival = self._coming.popleft()
            requests.append(request_of(number, arrival))
        return Mail(tuple(requests), (), closed=not self._coming, abandoned=False)


def request_of(number: int, arrival: Arrival) -> Request:
    """The request of this number in its trace; its tokens mean nothing."""
    lengths = arrival.lengths
    return Request(str(number), (1,) * lengths.prompt, lengths.new, _SAMPLING)


def outcomes(scheduler: Scheduler, times: Sequence[ModelledTimes], trace: Trace) -> list[Outcome]:
    """Run `trace` to its end on stages of these `times`; outcomes are in the order of arrival."""
    clock = VirtualClock()
    driver = PipelineDriver(scheduler, VirtualPipeline(times, clock))
    longest = max(arrival.lengths.total for arrival in trace)
    first_s, ended_s = {}, {}
    for told in LiveRun(driver, TraceInbox(trace, clock), longest).events():
        for each in told:
            if each.finish_reason == "error":
                raise RuntimeError(f"request {each.custom_id} failed: {each.error}")
            first_s.setdefault(int(each.custom_id), clock.now_s)
            if each.finish_reason is not None:
                ended_s[int(each.custom_id)] = clock.now_s
    return [
        Outcome(a.lengths, first_s[i] - a.at_s, ended_s[i] - a.at_s, ended_s[i])
        for i, a in enumerate(trace)
    ]

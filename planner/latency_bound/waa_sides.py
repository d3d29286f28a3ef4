"""The two sides of WAA in their steady state, stages that prefill and stages that decode, and the
way of keys and values between them (ExeGPT section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import compress
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from planner.costs.communication import HostCopies
from planner.latency_bound.timeline import (
    ManyTimes,
    StageSeconds,
    decodes_s,
    mean_prefill_s,
)
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.schedule.turns import WAITING, PrefillSizes, joining, newcomers
from planner.scheduling import RequestSchedule


class PromptBatch(NamedTuple):
    """A micro-batch of `tokens` each, which of them `go_on`, when it was submitted and is back."""

    tokens: Sequence[int]
    go_on: Sequence[bool]
    began_s: float
    back_s: float


class PrefillSide(ABC):
    """Stages that prefill: prompts that wait, and the micro-batches under way."""

    def __init__(self, schedule: RequestSchedule, longest: int, stages: int) -> None:
        self._sizes = PrefillSizes.of(schedule, longest)
        self.stages = stages
        self.requests = 0
        self.leaving = self.in_flight = 0  # as a turn begins
        self._waiting: deque[int] = deque()
        self._waiting_tokens = 0
        self._under_way: deque[PromptBatch] = deque()

    @abstractmethod
    def next_turn(self, wanted: int, room: int) -> Sequence[int]:
        """Tokens of the prompts of a turn of about so many requests, and at most `room`."""

    @abstractmethod
    def run(self, prompts: Sequence[int], now_s: float) -> tuple[float, Sequence[bool]]:
        """Submit a micro-batch; returns when it is back, and which of its requests go on."""

    @property
    def next_s(self) -> float:
        return self._under_way[0].back_s if self._under_way else inf

    def turn(self, wanted: int, room: int) -> int:
        """Have the requests of a turn wait; returns how many these are."""
        prompts = self.next_turn(wanted, room) if room > 0 else ()
        self._waiting.extend(prompts)
        self._waiting_tokens += sum(prompts)
        self.requests += len(prompts)
        return len(prompts)

    def submit(self, now_s: float) -> None:
        while self._waiting and len(self._under_way) < self.stages + WAITING:
            count = self._sizes.next_part(self._waiting, self._waiting_tokens)
            prompts = [self._waiting.popleft() for _ in range(count)]
            self._waiting_tokens -= sum(prompts)
            back_s, go_on = self.run(prompts, now_s)
            self._under_way.append(PromptBatch(prompts, go_on, now_s, back_s))

    def take_back(self) -> PromptBatch:
        batch = self._under_way.popleft()
        self.requests -= len(batch.tokens)
        return batch


class _Sized(Protocol):
    size: int


Group = TypeVar("Group", bound=_Sized)


class DecodeSide(ABC, Generic[Group]):
    """Groups, each with a step under way or resting; requests that `arrived` join between two
    steps.
    """

    def __init__(self, groups: Sequence[Group], most_in_group: int) -> None:
        self._count, self._most_in_group = len(groups), most_in_group
        self.resting = deque(groups)
        self.stepping: deque[tuple[float, Group]] = deque()
        self.arrived = 0
        self.in_groups = sum(group.size for group in groups)

    @abstractmethod
    def step(self, group: Group, joining: int, now_s: float) -> float:
        """Have so many requests join a group, and submit its step; returns when that is back."""

    def fitting(self, joining: int) -> int:
        """For how many of so many that join there is memory."""
        return joining

    @abstractmethod
    def end(self, group: Group, now_s: float) -> int:
        """Count a step that is back; returns how many have ended with it."""

    @property
    def next_s(self) -> float:
        return self.stepping[0][0] if self.stepping else inf

    def submit(self, now_s: float) -> None:
        """Have every resting group make a step that has requests, in the order of their coming."""
        for _ in range(len(self.resting)):
            group = self.resting.popleft()
            more = 0
            if self.arrived:
                all_requests = self.in_groups + self.arrived
                more = joining(group.size, all_requests, self._count, self._most_in_group)
                more = self.fitting(min(more, self.arrived))
                self.arrived -= more
                self.in_groups += more
            if group.size + more:
                self.stepping.append((self.step(group, more, now_s), group))
            else:
                self.resting.append(group)

    def take_back(self) -> int:
        now_s, group = self.stepping.popleft()
        ended = self.end(group, now_s)
        self.in_groups -= ended
        self.resting.append(group)
        return ended


class WaaRun(Generic[Group]):
    """Both sides under `schedule`; a message with so many prompts, of so many tokens together,
    takes `sent_s`.
    """

    def __init__(
        self,
        schedule: RequestSchedule,
        prefill: PrefillSide,
        decode: DecodeSide[Group],
        sent_s: Callable[[int, int], float],
    ) -> None:
        self._schedule, self._sent_s = schedule, sent_s
        self._prefill, self._decode = prefill, decode
        self._decoding = decode.in_groups
        # Those that end before a request which begins now is prefilled: as many as the last time.
        self._leaving = self._ended = 0
        self._ended_before: deque[int] = deque()  # when each began that prefills
        self._moving: deque[tuple[float, int]] = deque()
        self._moved_s = 0.0
        self._begin(0.0)

    def advance(self) -> None:
        """Take what is back first, and begin what may begin then."""
        decoded_s, prefilled_s = self._decode.next_s, self._prefill.next_s
        moved_s = self._moving[0][0] if self._moving else inf
        now_s = min(decoded_s, moved_s, prefilled_s)
        if decoded_s == now_s:
            ended = self._decode.take_back()
            self._decoding -= ended
            self._ended += ended
        elif moved_s == now_s:
            self._decode.arrived += self._moving.popleft()[1]
        else:
            self._hand_over(self._prefill.take_back())
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        prefill = self._prefill
        while True:
            prefill.in_flight = self._decoding + prefill.requests
            prefill.leaving = min(self._leaving, prefill.in_flight)
            present = self._decoding + max(0, prefill.requests - self._leaving)
            more = prefill.turn(
                *newcomers(self._schedule, prefill.stages, present, prefill.requests)
            )
            if not more:
                break
            self._ended_before.extend([self._ended] * more)
        prefill.submit(now_s)
        self._decode.submit(now_s)

    def _hand_over(self, batch: PromptBatch) -> None:
        for goes_on in batch.go_on:
            self._leaving = self._ended - self._ended_before.popleft()
            self._ended += not goes_on
        going = sum(batch.go_on)
        self._decoding += going
        if going:
            gone = list(compress(batch.tokens, batch.go_on))
            sent_s = self._sent_s(len(gone), sum(gone))
            self._moved_s = max(self._moved_s, batch.back_s) + sent_s
            self._moving.append((self._moved_s, going))


LEAST_STEPS = 1e-9
"""Decode steps of a request that are counted where all answers have one token."""


@dataclass(frozen=True, eq=False)
class StageCopies:
    """Seconds in which each stage copies keys and values to or from its host [N], a request and a
    token.
    """

    request_s: FloatArray
    token_s: FloatArray

    @classmethod
    def of(cls, copies: Sequence[HostCopies]) -> StageCopies:
        request_s = np.array([each.one_way_s(0) for each in copies])
        return cls(request_s, np.array([each.one_way_s(1) for each in copies]) - request_s)

    def seconds(self, requests: float, tokens: float) -> FloatArray:
        """Seconds of so many requests with so many tokens together [N]."""
        return requests * self.request_s + tokens * self.token_s


@dataclass(frozen=True, eq=False)
class Handover:
    """Stages that prefill copy keys and values to their hosts (`keep`), those that decode from
    theirs (`restore`), between their kernels. From host to host each message takes `message_s`,
    `token_s` a token, and `request_s` a request, of its constant states.
    """

    keep: StageCopies
    restore: StageCopies
    message_s: float
    token_s: float
    request_s: float = 0.0

    def sent_s(self, requests: float, tokens: float) -> float:
        """Seconds of a message with so many prompts, of so many tokens together."""
        return self.message_s + self.request_s * requests + self.token_s * tokens


def going_on(outputs: LengthDistribution) -> float:
    """The share of requests that make decode steps at all."""
    return 1 - outputs.probabilities[0] if outputs.lengths[0] == 1 else 1.0


class _CopyingTimes(ManyTimes):
    """The `times` of stages that copy so much of a prompt, and `step_s` [N] a request of a step."""

    def __init__(self, times: StageSeconds, prompts: StageCopies, step_s: FloatArray) -> None:
        self._times, self._prompts, self._step_s = times, prompts, step_s
        self.stages, self.attention_s = times.stages, times.attention_s
        self.prefill_hop_s, self.decode_hop_s = times.prefill_hop_s, times.decode_hop_s

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompt_tokens)
        return self._times.prefill_s(requests, prompt_tokens) + copied_s

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._times.decode_s(requests, context_tokens) + requests * self._step_s

    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompts.mean)
        return mean_prefill_s(self._times, requests, prompts) + copied_s

    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        compute_s, hop_s = decodes_s(self._times, requests, context_tokens)
        return compute_s + requests[:, None] * self._step_s, hop_s


@lru_cache(maxsize=256)
def mean_context(lengths: RequestLengths) -> float:
    """Mean tokens before the new one, over the requests that decode at a time."""
    outputs = lengths.outputs
    return lengths.prompts.mean + (outputs.variance + outputs.mean**2) / outputs.mean / 2


def mean_steps(outputs: LengthDistribution) -> float:
    """Mean decode steps of a request, of those that make any; 1 where none does."""
    going = going_on(outputs)
    return (outputs.mean - 1) / going if going else 1.0


_CLASSES = 16
"""Classes of micro-batches by how long they are under way."""

SETTLING = 0.25
"""Share of the passes that are run before any are counted."""


@dataclass(frozen=True, eq=False)
class PartTimes:
    """Seconds of micro-batches until they are back, in classes [n], and the shares of requests in
    these [n].
    """

    seconds: FloatArray
    shares: FloatArray

    @classmethod
    def of(cls, parts: Sequence[PromptBatch]) -> PartTimes:
        """The times of some, once stages are full."""
        kept = parts[int(SETTLING * len(parts)) :]
        seconds = np.array([part.back_s - part.began_s for part in kept])
        sizes = np.array([float(len(part.tokens)) for part in kept])
        classes = np.array_split(np.argsort(seconds), min(len(kept), _CLASSES))
        means = [np.average(seconds[each], weights=sizes[each]) for each in classes]
        shares = np.array([sizes[each].sum() for each in classes])
        return cls(np.array(means), shares / shares.sum())

    @property
    def mean_s(self) -> float:
        return float(self.shares @ self.seconds)


@dataclass(frozen=True, eq=False)
class BusyPrefills:
    """Stages on which prompts always wait: requests a second, variance over mean, micro-batches."""

    requests_per_s: float
    dispersion: float
    parts: PartTimes


@dataclass(frozen=True, eq=False)
class WaaSides:
    """Times of both sides without the copies of `handover`. What is known of busy stages is kept
    for any schedule, by its newcomers and prefill micro-batch.
    """

    prefill: StageSeconds
    decode: StageSeconds
    handover: Handover
    lengths: RequestLengths
    known_busy: dict[tuple[int, int], BusyPrefills] = field(default_factory=dict)

    @cached_property
    def prefill_and_keep(self) -> StageSeconds:
        """The times of stages that prefill, and keep what others decode with."""
        none = np.zeros(self.prefill.stages)
        goes_on = self.lengths.outputs.longest > 1  # which answers will end at once is not known
        kept = self.handover.keep if goes_on else StageCopies(none, none)
        return _CopyingTimes(self.prefill, kept, none)

    @cached_property
    def restore_and_decode(self) -> StageSeconds:
        """The times of stages that decode, in each of whose steps as many requests begin as end."""
        outputs, none = self.lengths.outputs, np.zeros(self.decode.stages)
        steps = max(outputs.mean - 1, LEAST_STEPS)
        restored_s = self.handover.restore.seconds(1.0, self.lengths.prompts.mean)
        step_s = going_on(outputs) / steps * restored_s
        return _CopyingTimes(self.decode, StageCopies(none, none), step_s)

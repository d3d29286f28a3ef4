"""The two sides of WAA in their steady state, stages that prefill and stages that decode, and the
way of keys and values between them (ExeGPT section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from planner.costs.communication import HostCopies
from planner.latency_bound.stage_times import ManyTimes, StageSeconds, decodes_s, mean_prefill_s
from planner.latency_bound.timeline import PassTimes, PromptTimes, Tandem, even_shares
from planner.latency_bound.waa_run import PrefillSide, PromptBatch
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.schedule.turns import SHORT_PROMPTS, WAITING, evened
from planner.scheduling import RequestSchedule

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
    theirs (`restore`), between their kernels. From host to host each message takes `message_s` and
    `token_s` a token.
    """

    keep: StageCopies
    restore: StageCopies
    message_s: float
    token_s: float

    def sent_s(self, tokens: float) -> float:
        """Seconds of a message with prompts of so many tokens together."""
        return self.message_s + self.token_s * tokens

    def prefilling(self, times: StageSeconds, outputs: LengthDistribution) -> StageSeconds:
        """The times of stages that prefill, and keep what others decode with."""
        going = going_on(outputs)
        kept = StageCopies(going * self.keep.request_s, going * self.keep.token_s)
        return _CopyingTimes(times, kept, np.zeros(times.stages))

    def decoding(self, times: StageSeconds, lengths: RequestLengths) -> StageSeconds:
        """The times of stages that decode, in each of whose steps as many requests begin as end."""
        steps = max(lengths.outputs.mean - 1, LEAST_STEPS)
        restored_s = self.restore.seconds(1.0, lengths.prompts.mean)
        none = StageCopies(np.zeros(times.stages), np.zeros(times.stages))
        return _CopyingTimes(times, none, going_on(lengths.outputs) / steps * restored_s)


def going_on(outputs: LengthDistribution) -> float:
    """The share of requests that make decode steps at all."""
    return 1 - outputs.probabilities[0] if outputs.lengths[0] == 1 else 1.0


class _CopyingTimes(ManyTimes):
    """The `times` of stages that copy so much of a prompt, and `step_s` [N] a request of a step."""

    def __init__(self, times: StageSeconds, prompts: StageCopies, step_s: FloatArray) -> None:
        self._times, self._prompts, self._step_s = times, prompts, step_s

    @property
    def stages(self) -> int:
        return self._times.stages

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompt_tokens)
        return self._times.prefill_s(requests, prompt_tokens) + copied_s

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._times.attention_s(requests, prompt_tokens)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._times.decode_s(requests, context_tokens) + requests * self._step_s

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._times.prefill_hop_s(requests, prompt_tokens)

    def decode_hop_s(self, requests: float) -> FloatArray:
        return self._times.decode_hop_s(requests)

    def mean_prefill_s(self, requests: float, prompts: LengthDistribution) -> FloatArray:
        copied_s = self._prompts.seconds(requests, requests * prompts.mean)
        return mean_prefill_s(self._times, requests, prompts) + copied_s

    def decodes_s(
        self, requests: FloatArray, context_tokens: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        compute_s, hop_s = decodes_s(self._times, requests, context_tokens)
        return compute_s + requests[:, None] * self._step_s, hop_s


class DecodeSteps:
    """Seconds of steps of up to about `size` requests, linear between; `restore` is for those that
    join.
    """

    def __init__(
        self, times: StageSeconds, restore: StageCopies, lengths: RequestLengths, size: float
    ) -> None:
        size, context = max(2.0, size), mean_context(lengths)
        one_s = times.decode_s(1.0, context)
        each_s = (times.decode_s(size, context) - one_s) / (size - 1)
        self._none_s = (one_s - each_s).tolist()
        self._each_s = each_s.tolist()
        self._joining_s = restore.seconds(1.0, lengths.prompts.mean).tolist()
        self._hop_s = times.decode_hop_s(size).tolist()

    def step(self, size: float, joining: float) -> PassTimes:
        stages = zip(self._none_s, self._each_s, self._joining_s, strict=True)
        return PassTimes([a + size * b + joining * c for a, b, c in stages], self._hop_s)

    def round_s(self, size: float, joining: float, groups: float) -> float:
        """Seconds in which so many groups make such a step each."""
        step = self.step(max(1.0, size), joining)
        return max(groups * step.busiest_s, step.alone_s)


@lru_cache(maxsize=256)
def mean_context(lengths: RequestLengths) -> float:
    """Mean tokens before the new one, over the requests that decode at a time."""
    outputs = lengths.outputs
    return lengths.prompts.mean + (outputs.variance + outputs.mean**2) / outputs.mean / 2


def mean_steps(outputs: LengthDistribution) -> float:
    """Mean decode steps of a request, of those that make any; 1 where none does."""
    going = going_on(outputs)
    return (outputs.mean - 1) / going if going else 1.0


_PROMPTS, _PARTS = 1024, 64
"""Prompts that stand for all, and the fewest micro-batches of them."""

_CLASSES = 16
"""Classes of micro-batches by how long they are under way."""

SETTLING = 0.25
"""Share of the passes that are run before any are counted."""


@lru_cache(maxsize=256)
def representative_prompts(prompts: LengthDistribution, size: int) -> tuple[int, ...]:
    """Prompts for some micro-batches of `size`, in their proportions and without any order."""
    shares = even_shares(max(_PROMPTS, _PARTS * size))
    return tuple(prompts.quantile(share) for share in shares.tolist())


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


class PromptPasses(PrefillSide):
    """Passes of representative prompts through the stages of `times`, which have copies in them."""

    def __init__(
        self, times: StageSeconds, prompts: LengthDistribution, schedule: RequestSchedule
    ) -> None:
        super().__init__(schedule, prompts.longest, times.stages)
        self._schedule = schedule
        self._times, self._tandem = PromptTimes(times, prompts), Tandem(times.stages)
        self.prompts = representative_prompts(prompts, schedule.prefill_micro_batch)
        self._next = 0
        self.taken: list[PromptBatch] = []

    def next_turn(self, wanted: int, room: int) -> Sequence[int]:
        begin = self._next % len(self.prompts)
        ahead = self.prompts[begin : begin + room]
        ahead += self.prompts[: room - len(ahead)]
        count = evened(self._schedule, wanted, room, ahead)
        self._next += count
        return ahead[:count]

    def run(self, prompts: Sequence[int], now_s: float) -> tuple[float, Sequence[bool]]:
        """Submit a micro-batch, all of whose requests go on."""
        part = self._times.part(len(prompts), sum(prompts))
        return self._tandem.run(part, now_s), [True] * len(prompts)

    def take_back(self) -> PromptBatch:
        self.taken.append(super().take_back())
        return self.taken[-1]


def busy_prefills(
    times: StageSeconds, prompts: LengthDistribution, schedule: RequestSchedule
) -> BusyPrefills:
    """What stages do where as many prompts wait as may."""
    passes = PromptPasses(times, prompts, schedule)
    share, now_s, begun = schedule.prefill_requests, 0.0, 0
    most, at_once = (times.stages + WAITING) * share, SHORT_PROMPTS * share
    while begun < (1 + SETTLING) * len(passes.prompts):
        while (room := min(most - passes.requests, at_once)) > 0:
            begun += passes.turn(min(share, room), room)
        passes.submit(now_s)
        now_s = passes.take_back().back_s
    parts = passes.taken
    kept = parts[int(SETTLING * len(parts)) :]
    back_s, sizes = np.array([(part.back_s, len(part.tokens)) for part in kept]).T
    rate = float(sizes[1:].sum() / (back_s[-1] - back_s[0]))
    return BusyPrefills(rate, _dispersion(back_s, sizes), PartTimes.of(parts))


def _dispersion(back_s: FloatArray, sizes: FloatArray) -> float:
    apart_s = np.diff(back_s)
    return float(sizes.mean() * np.var(apart_s) / np.mean(apart_s) ** 2)


@dataclass(frozen=True, eq=False)
class WaaSides:
    """Times of both sides without the copies of `handover`; what is known of them is kept, for any
    schedule.
    """

    prefill: StageSeconds
    decode: StageSeconds
    handover: Handover
    lengths: RequestLengths
    _busy: dict[tuple[int, int], BusyPrefills] = field(default_factory=dict)

    @cached_property
    def prefill_and_keep(self) -> StageSeconds:
        return self.handover.prefilling(self.prefill, self.lengths.outputs)

    @cached_property
    def restore_and_decode(self) -> StageSeconds:
        """The times of stages that decode, with a share of copies in every step."""
        return self.handover.decoding(self.decode, self.lengths)

    def busy(self, schedule: RequestSchedule) -> BusyPrefills:
        """What stages that prefill do where prompts wait all the time."""
        key = schedule.prefill_requests, schedule.prefill_micro_batch
        if key not in self._busy:
            prompts = self.lengths.prompts
            self._busy[key] = busy_prefills(self.prefill_and_keep, prompts, schedule)
        return self._busy[key]

    def steps(self, size: float) -> DecodeSteps:
        return DecodeSteps(self.decode, self.handover.restore, self.lengths, size)

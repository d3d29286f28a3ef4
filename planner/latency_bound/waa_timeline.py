"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6).

Both sides work for themselves, and the slower one decides how many requests are served. Prompts
come as fast as stages prefill them, as long as not more decode than the schedule says; the more
decode, the more end in a second. So their number goes up and down by chance, as in a chain of
births and deaths, whose steady state is in closed form. How unlike passes are, as several requests
end with one step and a step takes longer that requests join, shows in a short run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle

import numpy as np

from planner.latency_bound.placed_layers import LEAST_STEPS, WaaSides, going_on, mean_context
from planner.latency_bound.timeline import (
    PassTimes,
    Performance,
    PromptTimes,
    StageSeconds,
    Tandem,
    Timeline,
    even_shares,
    mixed_quantile,
    poisson_numbers,
)
from planner.lengths import FloatArray, LengthDistribution
from planner.schedule.exegpt_waa import DecodeSide, PrefillSide, PromptBatch, WaaRun
from planner.schedule.turns import SHORT_PROMPTS, WAITING, evened
from planner.scheduling import RequestSchedule


class DecodeSteps:
    """Seconds of steps of up to about `size` requests, linear between, with copies from the host
    for those that join.
    """

    def __init__(self, sides: WaaSides, size: float) -> None:
        times, lengths = sides.decode, sides.lengths
        restore = sides.handover.restore
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


_PROMPTS, _PARTS = 1024, 64
"""Prompts that stand for all, and the fewest micro-batches of them."""


@lru_cache(maxsize=256)
def representative_prompts(prompts: LengthDistribution, size: int) -> tuple[int, ...]:
    """Prompts for some micro-batches of `size`, in their proportions and without any order."""
    shares = even_shares(max(_PROMPTS, _PARTS * size))
    return tuple(prompts.quantile(share) for share in shares.tolist())


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


def busy_prefills(sides: WaaSides, schedule: RequestSchedule) -> BusyPrefills:
    """What stages that prefill do where as many prompts wait as may, whatever decodes."""
    return _busy_prefills(sides, replace(schedule, decode_requests=1, decode_micro_batches=1))


@lru_cache(maxsize=256)
def _busy_prefills(sides: WaaSides, schedule: RequestSchedule) -> BusyPrefills:
    times = sides.prefill_and_keep
    passes = PromptPasses(times, sides.lengths.prompts, schedule)
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
    apart_s = np.diff(back_s)
    dispersion = float(sizes.mean() * np.var(apart_s) / np.mean(apart_s) ** 2)
    return BusyPrefills(rate, dispersion, PartTimes.of(parts))


_STEPS, _MOST_STEPS, _PROMPT_BATCHES = 128, 1024, 64
"""Steps of groups that stand for all, and with which a run ends in any case; and micro-batches of
prompts that stand for all."""


@dataclass(slots=True, eq=False)
class _CountedGroup:
    """A group of so many requests, of which a share of one more has ended already."""

    size: int
    owed: float = 0.0


class _CountedDecodes(DecodeSide[_CountedGroup]):
    """Steps of groups of which some requests end, the more the larger a group is."""

    def __init__(
        self, sides: WaaSides, schedule: RequestSchedule, decoding: int, steps: DecodeSteps
    ) -> None:
        count = schedule.decode_micro_batches
        groups = [_CountedGroup((decoding + i) // count) for i in range(count)]
        super().__init__(groups, -(-schedule.most_in_flight // count))
        self._usual = max(1.0, decoding / count)
        mean = self._usual / mean_steps(sides.lengths.outputs)
        numbers = poisson_numbers(mean, _STEPS)
        self._ends = cycle(numbers if any(numbers) else [mean])
        self._steps, self._tandem = steps, Tandem(sides.decode.stages)
        # Of each step: seconds, requests, those that joined, and groups that were busy.
        self.spans: list[tuple[float, int, int, int]] = []

    def step(self, group: _CountedGroup, joining: int, now_s: float) -> float:
        group.size += joining
        back_s = self._tandem.run(self._steps.step(group.size, joining), now_s)
        self.spans.append((back_s - now_s, group.size, joining, len(self.stepping) + 1))
        return back_s

    def end(self, group: _CountedGroup, now_s: float) -> int:
        owed = group.owed + next(self._ends) * group.size / self._usual
        ended = min(group.size, int(owed))
        group.owed = owed - ended if ended < group.size else 0.0
        group.size -= ended
        return ended


def _short_run(
    sides: WaaSides, schedule: RequestSchedule, decoding: float
) -> tuple[float, PartTimes | None]:
    """Run from so many `decoding`; how many times longer rounds are than if steps were alike, and
    times of micro-batches (None: there was none).
    """
    steps = DecodeSteps(sides, decoding / schedule.decode_micro_batches)
    prefill = PromptPasses(sides.prefill_and_keep, sides.lengths.prompts, schedule)
    decode = _CountedDecodes(sides, schedule, max(1, round(decoding)), steps)
    run = WaaRun(schedule, prefill, decode, sides.handover.sent_s)
    while len(prefill.taken) < _PROMPT_BATCHES or len(decode.spans) < _STEPS:
        if len(decode.spans) >= _MOST_STEPS:
            break
        run.advance()
    spans_s, sizes, joining, busy = np.array(decode.spans[int(SETTLING * len(decode.spans)) :]).T
    round_s = float(np.average(spans_s, weights=sizes))
    even_s = steps.round_s(float(sizes.mean()), float(joining.mean()), float(busy.mean()))
    return round_s / even_s, PartTimes.of(prefill.taken) if prefill.taken else None


_TIMED = 24
"""Numbers of requests that are timed; between them time is linear."""
_RUNS, _NEAR = 2, 0.05
"""Runs at most, and by how much the number of requests may be off that one was made for."""


def _load(
    sides: WaaSides, schedule: RequestSchedule, busy: BusyPrefills
) -> tuple[float, float, float, PartTimes | None]:
    """Requests served a second where prompts come as from `busy` stages, a round's mean seconds and
    deviation, times of micro-batches; rounds are longer by what a run has around the number of
    requests found.
    """
    most = schedule.decode_requests + schedule.prefill_requests // 2
    # 0, 1, … requests that decode, up to somewhat more than the schedule's
    numbers = np.arange(min(schedule.most_in_flight, most) + 1, dtype=np.float64)
    steps = max(sides.lengths.outputs.mean - 1, LEAST_STEPS)
    even_rounds_s = _even_rounds_s(sides, schedule.decode_micro_batches, numbers)
    served = np.maximum.accumulate(numbers / steps / even_rounds_s)
    place = np.searchsorted(served, busy.requests_per_s)
    decoding = float(numbers[min(int(place), len(served) - 1)])
    for _ in range(_RUNS):
        longer, parts = _short_run(sides, schedule, decoding)
        rounds_s = longer * even_rounds_s
        served_per_s = numbers / steps / rounds_s
        chances = _chances(busy.requests_per_s, served_per_s, 2 / (1 + busy.dispersion))
        # where requests come by chance, fewer are served than where they come evenly
        by_chance = float(_chances(busy.requests_per_s, served_per_s, 1.0) @ served_per_s)
        rate = min(busy.requests_per_s, max(by_chance, float(chances @ served_per_s)))
        weights = numbers * chances
        weights /= weights.sum()
        round_s = float(weights @ rounds_s)
        before, decoding = decoding, rate * steps * round_s
        if abs(decoding / before - 1) < _NEAR:
            break
    deviation_s = float(np.sqrt(weights @ (rounds_s - round_s) ** 2))
    return rate, round_s, deviation_s, parts


def _even_rounds_s(sides: WaaSides, groups: int, numbers: FloatArray) -> FloatArray:
    """Seconds of a round of so many requests [n] in even groups whose steps are alike."""
    outputs = sides.lengths.outputs
    timed = np.unique(np.geomspace(1, numbers[-1], _TIMED).round())
    seconds = []
    for number in timed.tolist():
        busy_groups = min(groups, int(number))
        size = number / busy_groups
        joining = min(size, size / mean_steps(outputs)) if going_on(outputs) else 0.0
        seconds.append(DecodeSteps(sides, size).round_s(size, joining, busy_groups))
    return np.interp(numbers, timed, seconds)


def _chances(requests_per_s: float, served_per_s: FloatArray, narrower: float) -> FloatArray:
    """The chances of the numbers in the steady state; `narrower` where requests come more
    evenly.
    """
    more = np.log(requests_per_s / served_per_s[1:])
    logs = narrower * np.concatenate([[0.0], np.cumsum(more)])
    chances = np.exp(logs - logs.max())
    return np.asarray(chances / chances.sum())


_BUSY = 0.97
"""The share of the requests that stages can prefill from which on prompts wait all the time."""


def waa_timeline(sides: WaaSides, schedule: RequestSchedule, quantile: float) -> Timeline:
    """The timeline of `schedule` on these stages; `quantile` is that of the latency that counts."""
    outputs, requests = sides.lengths.outputs, schedule.prefill_requests
    busy = busy_prefills(sides, schedule)
    together = min(requests, schedule.prefill_micro_batch)
    sent_s = sides.handover.sent_s(together, together * sides.lengths.prompts.mean)
    if sent_s:
        busy = replace(busy, requests_per_s=min(busy.requests_per_s, together / sent_s))
    rate, round_s, deviation_s, parts = _load(sides, schedule, busy)
    steps = np.maximum(np.arange(outputs.longest + 1) - 1.0, 0.0)
    joined_s = sent_s + round_s / (2 * schedule.decode_micro_batches)
    decoded_s = np.where(steps > 0, joined_s + round_s * steps, 0.0)
    deviations_s = deviation_s * steps
    if parts is None or rate >= _BUSY * busy.requests_per_s:
        parts = busy.parts
    chosen, chances = list(outputs.lengths), np.array(outputs.probabilities)
    latency_s = mixed_quantile(
        np.add.outer(decoded_s[chosen], parts.seconds).ravel(),
        np.repeat(deviations_s[chosen], len(parts.seconds)),
        np.outer(chances, parts.shares).ravel(),
        quantile,
    )
    return Timeline(Performance(rate, latency_s), requests / rate, parts.mean_s + decoded_s)

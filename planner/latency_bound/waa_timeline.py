"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6).

Both sides work for themselves, and the slower one decides how many requests are served. Prompts
come as fast as stages prefill them, as long as not more decode than the schedule says; the more
decode, the more end in a second. So their number goes up and down by chance, as in a chain of
births and deaths, whose steady state is in closed form. How unlike passes are, as several requests
end with one step and a step takes longer that requests join, shows in a short run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from math import ceil, inf

import numpy as np

from planner.latency_bound.schedules import waa_decode_requests
from planner.latency_bound.timeline import (
    Performance,
    Tandem,
    Timeline,
    mixed_quantile,
    poisson_numbers,
)
from planner.latency_bound.waa_sides import (
    LEAST_STEPS,
    SETTLING,
    BusyPrefills,
    PartTimes,
    PromptBatch,
    PromptPasses,
    WaaSides,
    going_on,
    mean_steps,
)
from planner.length_distribution import FloatArray
from planner.scheduling import RequestSchedule

_STEPS, _MOST_STEPS, _PROMPT_BATCHES = 128, 1024, 64
"""Steps of groups that stand for all, and with which a run ends in any case; and micro-batches of
prompts that stand for all."""


@dataclass(frozen=True, eq=False)
class Passed:
    """What was seen: how many times as long rounds are as if all steps were alike, and the times of
    micro-batches of prompts (None: there was none).
    """

    longer: float
    parts: PartTimes | None


class _Groups:
    """Groups of requests, in numbers; `ends` are those that end with a step."""

    def __init__(self, schedule: RequestSchedule, decoding: int, steps: float) -> None:
        count = schedule.decode_micro_batches
        self.sizes = [(decoding + i) // count for i in range(count)]
        self._most = -(-schedule.most_in_flight // count)
        self._usual = max(1.0, decoding / count)
        mean = self._usual / steps
        numbers = poisson_numbers(mean, _STEPS)
        self._ends = cycle(numbers if any(numbers) else [mean])
        self._owed = [0.0] * count
        self.arrived = 0

    def join(self, group: int) -> int:
        """Have those that have arrived join a group that is to be even; returns how many do."""
        if not self.arrived:
            return 0
        even = ceil((sum(self.sizes) + self.arrived) / len(self.sizes))
        joining = max(
            0, min(even, self._most, self.sizes[group] + self.arrived) - self.sizes[group]
        )
        self.arrived -= joining
        self.sizes[group] += joining
        return joining

    def end(self, group: int) -> int:
        """Have some end, the more the larger a group is; returns how many do."""
        size = self.sizes[group]
        owed = self._owed[group] + next(self._ends) * size / self._usual
        ended = min(size, int(owed))
        self._owed[group] = owed - ended if ended < size else 0.0
        self.sizes[group] -= ended
        return ended


class ShortRun:
    """A run from when so many requests are `decoding`."""

    def __init__(self, sides: WaaSides, schedule: RequestSchedule, decoding: float) -> None:
        self._handover, self._schedule = sides.handover, schedule
        lengths = sides.lengths
        self._prompts = PromptPasses(sides.prefill_and_keep, lengths.prompts, schedule)
        self._decoding = max(1, round(decoding))
        steps = mean_steps(lengths.outputs)
        self._groups = _Groups(schedule, self._decoding, steps)
        groups = schedule.decode_micro_batches
        self._steps = sides.steps(decoding / groups)
        self._tandem = Tandem(sides.decode.stages)
        self._resting = deque(range(groups))
        self._stepping: deque[tuple[float, float, int]] = deque()
        self._moving: deque[tuple[float, int]] = deque()
        self._moved_s = 0.0
        self._leaving = self._ended = 0
        self._ended_before: deque[int] = deque()
        # Of steps: seconds, requests, those that joined, and groups that were busy.
        self._spans: list[tuple[float, int, int, int]] = []
        self._parts: list[PromptBatch] = []

    def passed(self) -> Passed:
        """Run, and return what was seen."""
        self._go_on(0.0)
        while len(self._parts) < _PROMPT_BATCHES or len(self._spans) < _STEPS:
            if len(self._spans) >= _MOST_STEPS:
                break
            step_s = self._stepping[0][0] if self._stepping else inf
            moved_s = self._moving[0][0] if self._moving else inf
            now_s = min(step_s, moved_s, self._prompts.next_s)
            if step_s == now_s:
                self._end_step()
            elif moved_s == now_s:
                self._groups.arrived += self._moving.popleft()[1]
            else:
                self._hand_over()
            self._go_on(now_s)
        return self._seen()

    def _go_on(self, now_s: float) -> None:
        """Begin what may begin."""
        while more := self._prompts.turn(self._room):
            self._ended_before.extend([self._ended] * more)
        self._prompts.submit(now_s)
        for _ in range(len(self._resting)):
            self._begin_step(self._resting.popleft(), now_s)

    @property
    def _room(self) -> float:
        """How many more may begin, as `planner.latency_bound.simulate_waa` has it."""
        present = self._decoding + max(0, self._prompts.requests - self._leaving)
        if present > self._schedule.decode_requests:
            return 0
        return self._schedule.most_in_flight - present

    def _hand_over(self) -> None:
        part = self._prompts.take_back()
        self._parts.append(part)
        for _ in range(part.requests):
            self._leaving = self._ended - self._ended_before.popleft()
        self._decoding += part.requests
        sent_s = self._handover.sent_s(part.tokens)
        self._moved_s = max(self._moved_s, part.back_s) + sent_s
        self._moving.append((self._moved_s, part.requests))

    def _begin_step(self, group: int, now_s: float) -> None:
        joining = self._groups.join(group)
        size = self._groups.sizes[group]
        if not size:
            self._resting.append(group)
            return
        back_s = self._tandem.run(self._steps.step(size, joining), now_s)
        self._stepping.append((back_s, now_s, group))
        self._spans.append((back_s - now_s, size, joining, len(self._stepping)))

    def _end_step(self) -> None:
        group = self._stepping.popleft()[2]
        ended = self._groups.end(group)
        self._decoding -= ended
        self._ended += ended
        self._resting.append(group)

    def _seen(self) -> Passed:
        spans_s, sizes, joining, busy = np.array(self._spans[int(SETTLING * len(self._spans)) :]).T
        size, newcomers = float(sizes.mean()), float(joining.mean())
        round_s = float(np.average(spans_s, weights=sizes))
        even_s = self._steps.round_s(size, newcomers, float(busy.mean()))
        return Passed(
            round_s / even_s,
            PartTimes.of(self._parts) if self._parts else None,
        )


_TIMED = 24
"""Numbers of requests that are timed; between them time is linear."""
_RUNS, _NEAR = 2, 0.05
"""Runs at most, and by how much the number of requests may be off that one was made for."""


@dataclass(frozen=True)
class DecodeLoad:
    """Requests that are served a second; mean seconds of a round as requests have it, with its
    deviation while they decode; and what was seen of single passes.
    """

    served_per_s: float
    round_s: float
    round_deviation_s: float
    passed: Passed


@dataclass(frozen=True, eq=False)
class LoadOfSides:
    """The load of `sides` under a schedule, to which prompts come as they do from stages that are
    `busy`.
    """

    sides: WaaSides
    schedule: RequestSchedule
    busy: BusyPrefills

    def load(self) -> DecodeLoad:
        """The load in the steady state. Rounds are longer than if all steps were alike by what a
        run has around the number of requests that is found.
        """
        decoding = self._even_number
        for _ in range(_RUNS):
            passed = ShortRun(self.sides, self.schedule, decoding).passed()
            rounds_s = passed.longer * self._even_rounds_s
            served_per_s = self._numbers / self._steps / rounds_s
            chances = self._chances(served_per_s, 2 / (1 + self.busy.dispersion))
            served = self._served(served_per_s, chances)
            weights = self._numbers * chances
            weights /= weights.sum()
            round_s = float(weights @ rounds_s)
            before, decoding = decoding, served * self._steps * round_s
            if abs(decoding / before - 1) < _NEAR:
                break
        deviation_s = float(np.sqrt(weights @ (rounds_s - round_s) ** 2))
        return DecodeLoad(served, round_s, deviation_s, passed)

    def _served(self, served_per_s: FloatArray, chances: FloatArray) -> float:
        """Requests that are served a second. The chances of few requests that come more evenly than
        by chance have another mean; where requests come by chance, less is served.
        """
        by_chance = float(self._chances(served_per_s, 1.0) @ served_per_s)
        return min(self.busy.requests_per_s, max(by_chance, float(chances @ served_per_s)))

    @cached_property
    def _numbers(self) -> FloatArray:
        """0, 1, … requests that decode, up to somewhat more than the schedule's: a turn begins
        where these are reached.
        """
        schedule = self.schedule
        most = schedule.decode_requests + schedule.prefill_requests // 2
        return np.arange(min(schedule.most_in_flight, most) + 1, dtype=np.float64)

    @cached_property
    def _steps(self) -> float:
        """Mean decode steps of all requests."""
        return max(self.sides.lengths.outputs.mean - 1, LEAST_STEPS)

    @cached_property
    def _even_rounds_s(self) -> FloatArray:
        """Seconds of a round of each of the numbers, if all steps were alike."""
        outputs, groups = self.sides.lengths.outputs, self.schedule.decode_micro_batches
        timed = np.unique(np.geomspace(1, self._numbers[-1], _TIMED).round())
        seconds = []
        for number in timed.tolist():
            busy_groups = min(groups, int(number))
            size = number / busy_groups
            joining = min(size, size / mean_steps(outputs)) if going_on(outputs) else 0.0
            seconds.append(self.sides.steps(size).round_s(size, joining, busy_groups))
        return np.interp(self._numbers, timed, seconds)

    @property
    def _even_number(self) -> float:
        """The least number of which as many end as come, if all steps were alike."""
        served = np.maximum.accumulate(self._numbers / self._steps / self._even_rounds_s)
        place = np.searchsorted(served, self.busy.requests_per_s)
        return float(self._numbers[min(int(place), len(served) - 1)])

    def _chances(self, served_per_s: FloatArray, narrower: float) -> FloatArray:
        """The chances of the numbers in the steady state, where so many requests are served with
        each; `narrower` where requests come more evenly than by chance.
        """
        more = np.log(self.busy.requests_per_s / served_per_s[1:])
        logs = narrower * np.concatenate([[0.0], np.cumsum(more)])
        chances = np.exp(logs - logs.max())
        return np.asarray(chances / chances.sum())


_BUSY = 0.97
"""The share of the requests that stages can prefill from which on prompts wait all the time."""


def waa_timeline(sides: WaaSides, schedule: RequestSchedule, quantile: float) -> Timeline:
    """The timeline of `schedule` on these stages; `quantile` is that of the latency that counts."""
    outputs, requests = sides.lengths.outputs, schedule.prefill_requests
    busy = sides.busy(schedule)
    together = min(requests, schedule.prefill_micro_batch)
    sent_s = sides.handover.sent_s(together * sides.lengths.prompts.mean)
    if sent_s:
        busy = replace(busy, requests_per_s=min(busy.requests_per_s, together / sent_s))
    load = LoadOfSides(sides, schedule, busy).load()
    rate = load.served_per_s
    steps = np.maximum(np.arange(outputs.longest + 1) - 1.0, 0.0)
    joined_s = sent_s + load.round_s / (2 * schedule.decode_micro_batches)
    decoded_s = np.where(steps > 0, joined_s + load.round_s * steps, 0.0)
    deviations_s = load.round_deviation_s * steps
    parts = load.passed.parts
    if parts is None or rate >= _BUSY * busy.requests_per_s:
        parts = busy.parts
    chosen, chances = list(outputs.lengths), np.array(outputs.probabilities)
    latency_s = mixed_quantile(
        np.add.outer(decoded_s[chosen], parts.seconds).ravel(),
        np.repeat(deviations_s[chosen], len(parts.seconds)),
        np.outer(chances, parts.shares).ravel(),
        quantile,
    )
    mean_s = parts.mean_s + decoded_s
    return Timeline(
        Performance(rate, latency_s),
        float(np.dot(mean_s[chosen], chances)),
        requests / rate,
        waa_decode_requests(outputs, requests),
        requests / rate,
        mean_s,
    )

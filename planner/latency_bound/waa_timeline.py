"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6).

Both sides work for themselves, and the slower one decides how many requests are served. Prompts
come as fast as stages prefill them, as long as not more decode than the schedule says; the more
decode, the more end in a second. So their number goes up and down by chance, as in a chain of
births and deaths, whose steady state is in closed form. How unlike passes are, as several requests
end with one step and a step takes longer that requests join, shows in a short run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle

import numpy as np

from planner.latency_bound.schedules import waa_decode_requests
from planner.latency_bound.timeline import (
    Performance,
    Tandem,
    Timeline,
    mixed_quantile,
    poisson_numbers,
)
from planner.latency_bound.waa_run import DecodeSide, WaaRun
from planner.latency_bound.waa_sides import (
    LEAST_STEPS,
    SETTLING,
    BusyPrefills,
    DecodeSteps,
    PartTimes,
    PromptPasses,
    WaaSides,
    going_on,
    mean_steps,
)
from planner.lengths import FloatArray
from planner.scheduling import RequestSchedule

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
    steps = sides.steps(decoding / schedule.decode_micro_batches)
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


@dataclass(frozen=True, eq=False)
class LoadOfSides:
    """The load of `sides` under a schedule, to which prompts come as from `busy` stages."""

    sides: WaaSides
    schedule: RequestSchedule
    busy: BusyPrefills

    def load(self) -> tuple[float, float, float, PartTimes | None]:
        """Requests served a second, a round's mean seconds and deviation, times of micro-batches;
        rounds are longer by what a run has around the number of requests found.
        """
        decoding = self._even_number
        for _ in range(_RUNS):
            longer, parts = _short_run(self.sides, self.schedule, decoding)
            rounds_s = longer * self._even_rounds_s
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
        return served, round_s, deviation_s, parts

    def _served(self, served_per_s: FloatArray, chances: FloatArray) -> float:
        """Requests served a second; where they come by chance, less than where they come evenly."""
        by_chance = float(self._chances(served_per_s, 1.0) @ served_per_s)
        return min(self.busy.requests_per_s, max(by_chance, float(chances @ served_per_s)))

    @cached_property
    def _numbers(self) -> FloatArray:
        """0, 1, … requests that decode, up to somewhat more than the schedule's."""
        schedule = self.schedule
        most = schedule.decode_requests + schedule.prefill_requests // 2
        return np.arange(min(schedule.most_in_flight, most) + 1, dtype=np.float64)

    @cached_property
    def _steps(self) -> float:
        return max(self.sides.lengths.outputs.mean - 1, LEAST_STEPS)

    @cached_property
    def _even_rounds_s(self) -> FloatArray:
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
        served = np.maximum.accumulate(self._numbers / self._steps / self._even_rounds_s)
        place = np.searchsorted(served, self.busy.requests_per_s)
        return float(self._numbers[min(int(place), len(served) - 1)])

    def _chances(self, served_per_s: FloatArray, narrower: float) -> FloatArray:
        """The chances of the numbers in the steady state; `narrower` where requests come more
        evenly.
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
    rate, round_s, deviation_s, parts = LoadOfSides(sides, schedule, busy).load()
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
    mean_s = parts.mean_s + decoded_s
    return Timeline(
        Performance(rate, latency_s),
        float(np.dot(mean_s[chosen], chances)),
        requests / rate,
        waa_decode_requests(outputs, requests),
        requests / rate,
        mean_s,
    )

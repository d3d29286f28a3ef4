"""How many requests decode at a time where some stages prefill and others decode (WAA).

Prompts come as fast as stages prefill them, as long as not more decode than the schedule says; the
more decode, the more end in a second. So their number goes up and down by chance, around where as
many end as come, or just below the schedule's number. It is a chain of births and deaths, whose
steady state is in closed form; where the sides are nearly as fast as each other, that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.latency_bound.steady_state.waa.decode_steps import mean_steps
from planner.latency_bound.steady_state.waa.handover import LEAST_STEPS, going_on
from planner.latency_bound.steady_state.waa.prompt_passes import BusyPrefills
from planner.latency_bound.steady_state.waa.short_run import Passed, ShortRun
from planner.latency_bound.steady_state.waa.sides import WaaSides
from planner.length_distribution import FloatArray
from planner.scheduling import RequestSchedule

_TIMED = 24
"""Numbers of requests that are timed; between them time is linear."""
_RUNS, _NEAR = 2, 0.05
"""Runs at most, and by how much the number of requests may be off that one was made for."""


@dataclass(frozen=True)
class Load:
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

    def load(self) -> Load:
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
        return Load(served, round_s, deviation_s, passed)

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

"""A short run of WAA around its steady state, in numbers of requests: how long rounds take, and for
how long prompts are under way.

Passes are unlike, as prompts are, as several requests end with one step, and as a step takes longer
that requests join. So some passes are run that stand for all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import cycle
from math import ceil, inf

import numpy as np

from planner.latency_bound.steady_state.draws import poisson_numbers
from planner.latency_bound.steady_state.tandem import Tandem
from planner.latency_bound.steady_state.waa.decode_steps import mean_steps
from planner.latency_bound.steady_state.waa.prompt_passes import (
    SETTLING,
    Part,
    PartTimes,
    PromptPasses,
)
from planner.latency_bound.steady_state.waa.sides import WaaSides
from planner.scheduling import RequestSchedule

_STEPS, _MOST_STEPS, _PARTS = 128, 1024, 64
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
        self._parts: list[Part] = []

    def passed(self) -> Passed:
        """Run, and return what was seen."""
        self._go_on(0.0)
        while len(self._parts) < _PARTS or len(self._spans) < _STEPS:
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
        """How many more may begin, as `planner.latency_bound.events.waa` has it."""
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

"""The steady-state timeline of RRA: every stage has both phases in turns (ExeGPT section 6).

Passes of both phases meet around turns, so they are run one after the other through the stages, of
a few cycles in whose turns everything has its proportion. Rounds further from all turns are alike.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import sqrt

import numpy as np

from planner.latency_bound.rra_groups import GroupSizes, Phases
from planner.latency_bound.timeline import (
    PassTimes,
    Performance,
    PromptTimes,
    StageSeconds,
    Tandem,
    Timeline,
    decodes_s,
    mixed_quantile,
    rounds_s,
)
from planner.lengths import FloatArray, RequestLengths
from planner.schedule.passes import TurnSizes
from planner.schedule.turns import Turns, even_parts
from planner.scheduling import RequestSchedule

_SURE = 1e-12
"""A chance of less is none."""
_TIMED_ROUNDS = 16
"""Rounds of a phase that are timed, beside the first ones; requests end one after the other, so
that time changes little and steadily between them."""
FIRST_ROUNDS = 3


class DecodeRounds:
    """The rounds of a phase, of `groups` groups with prompts of `prompt_tokens` in the mean."""

    def __init__(
        self, times: StageSeconds, phases: Phases, groups: int, prompt_tokens: float
    ) -> None:
        self.stages, self.phases, self.groups = times.stages, phases, groups
        last = max(0, int(np.count_nonzero(phases.reached > _SURE)) - 1)
        spread = np.linspace(0, last, min(last + 1, _TIMED_ROUNDS)).round().astype(int)
        first = np.arange(min(last + 1, FIRST_ROUNDS))
        self._timed = np.union1d(first, spread)
        contexts = prompt_tokens + phases.answer_tokens[self._timed]
        self._seconds = decodes_s(times, phases.requests[self._timed], contexts)
        self._steps: dict[int, PassTimes] = {}

    def step(self, place: int) -> PassTimes:
        if place not in self._steps:
            row = min(int(np.searchsorted(self._timed, place)), len(self._timed) - 1)
            self._steps[place] = PassTimes.of(*(each[row] for each in self._seconds))
        return self._steps[place]

    def seconds(self) -> FloatArray:
        """Mean seconds of each round beside no turn [decode_steps]."""
        each_s = rounds_s(*self._seconds, self.groups)
        return np.asarray(np.interp(np.arange(len(self.phases.reached)), self._timed, each_s))


GOLDEN, SILVER = (sqrt(5) - 1) / 2, sqrt(2) - 1
"""Their multiples leave remainders that are spread evenly over 0 to 1, however many are taken, so
that a few turns stand for all: what chance would give by its proportions and not at random."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class TurnPasses:
    sizes: list[int]
    parts: list[PassTimes]

    @property
    def newcomers(self) -> int:
        return sum(self.sizes)


class NewcomersTurns:
    def __init__(self, times: PromptTimes, schedule: RequestSchedule, sizes: GroupSizes) -> None:
        self._times, self._most = times, schedule.prefill_micro_batch
        self._below = [np.cumsum(each)[:-1].tolist() for each in sizes.newcomers]
        self._totals = sizes.newcomers.sum(axis=1).tolist()
        self._turns, self._parts = [0, 0], 0
        prompts = times.prompts
        self._even = schedule.tolerance * prompts.mean / max(sqrt(prompts.variance), _ROUNDING)

    def next(self, is_empty: bool) -> TurnPasses:
        """The next turn of a group. Micro-batches are as long as a share of all do not exceed,
        turns as unlike as the tolerance allows (`planner.schedule.turns.evened`).
        """
        self._turns[is_empty] += 1
        share = self._turns[is_empty] * SILVER % 1 * self._totals[is_empty]
        count = bisect_right(self._below[is_empty], share)
        if not count:
            return TurnPasses([], [])
        sizes = even_parts(count, self._most)
        more = [sqrt(size) * self._longer() for size in sizes]
        kept = min(1.0, self._even * sqrt(count)) if count > 1 else 1.0
        each = self._times.prompts.mean - (1 - kept) * sum(more) / count
        tokens = [size * each + longer for size, longer in zip(sizes, more, strict=True)]
        return TurnPasses(sizes, list(map(self._times.part, sizes, tokens)))

    def _longer(self) -> float:
        self._parts += 1
        prompts = self._times.prompts
        return prompts.quantile(self._parts * GOLDEN % 1) - prompts.mean


_TURNS, _PREFILLS = 24, 64
"""Turns with newcomers, or micro-batches in them, that stand for all."""
_CYCLES, _MOST_ROUNDS = 2, 100
"""The fewest cycles, and the most rounds, where newcomers are rare."""


@dataclass(frozen=True, eq=False)
class Cycle:
    """Mean seconds of a cycle, and those of a request: from its turn to its first token
    (`first_s`) and to when the turn is back (`turn_s`); of a turn of its group later in its life
    (`later_turn_s`); and of each decode step [decode_steps]. `variance` is that of a cycle.
    """

    cycle_s: float
    first_s: float
    turn_s: float
    later_turn_s: float
    step_s: FloatArray
    variance: float


@dataclass(slots=True, eq=False)
class _Group:
    """A group `steps` after its turn, `steps_left` before the next, empty after `empty_after`; its
    last pass is back at `back_s`.
    """

    steps: int = 0
    steps_left: int = 0
    empty_after: int = 0
    back_s: float = 0.0

    @property
    def rounds_to_go(self) -> int:
        """Rounds until it is at its turn, or empty."""
        return min(self.steps_left, self.empty_after - self.steps)


class _Run:
    """Groups that make passes in one order for ever, and what was seen of them: `turns` that had
    newcomers, with the mean seconds until one of these is back and those until all are; the seconds
    between the passes of a group around them (`spans_s`), also where it had requests before
    (`later_s`); and those of steps, by their numbers after a turn (`steps_s`).
    """

    def __init__(self, rounds: DecodeRounds, turns: NewcomersTurns, limits: Turns) -> None:
        self._rounds, self._newcomers, self._limits = rounds, turns, limits
        self._last = len(rounds.phases.reached) - 1
        self._tandem = Tandem(rounds.stages)
        self._groups = [_Group() for _ in range(rounds.groups)]
        self._begun = 0
        self._observe()

    def _observe(self) -> None:
        self.turns: list[tuple[TurnPasses, float, float]] = []
        self._parts = 0
        self.spans_s: list[float] = []
        self.later_s: list[float] = []
        self.steps_s: dict[int, list[float]] = {}
        self._from_s = self._mean_back_s

    @property
    def seconds(self) -> float:
        """The time that was seen."""
        return self._mean_back_s - self._from_s

    @property
    def _mean_back_s(self) -> float:
        return sum(each.back_s for each in self._groups) / len(self._groups)

    def run(self) -> None:
        """Run a first cycle, which does not count, and so many that stand for all."""
        groups, rounds, counts_from = self._groups, 0, 0
        while True:
            skipped = min(group.rounds_to_go for group in groups) - 1
            if skipped < 0 and not counts_from and self._begun >= len(groups):
                counts_from = self._begun
                self._observe()
            elif skipped < 0 and counts_from:
                cycles = (self._begun - counts_from) / len(groups)
                if self._stand_for_all(cycles) or (rounds >= _MOST_ROUNDS and self.turns):
                    return
            if skipped > 0 and min(group.steps for group in groups) >= FIRST_ROUNDS:
                self._skip(skipped)
            for group in groups:
                self._advance(group)
            rounds += 1

    def _stand_for_all(self, cycles: float) -> bool:
        return cycles >= _CYCLES and (len(self.turns) >= _TURNS or self._parts >= _PREFILLS)

    def _skip(self, rounds: int) -> None:
        for group in self._groups:
            group.steps += rounds
            group.steps_left -= rounds

    def _advance(self, group: _Group) -> None:
        is_empty = group.steps >= group.empty_after
        if is_empty or not (group.steps_left or self._waits()):
            turn = self._newcomers.next(is_empty)
            self._begun += 1
            group.steps, group.steps_left = 0, self._last + 1
            group.empty_after = self._rounds.phases.empty_after(self._begun * GOLDEN % 1)
            if turn.parts:
                self._prefill(group, turn, is_empty)
                return
        self._step(group)

    def _waits(self) -> bool:
        return self._limits.is_near(each.steps_left for each in self._groups)

    def _prefill(self, group: _Group, turn: TurnPasses, was_empty: bool) -> None:
        since_s = group.back_s
        began_s = max(since_s, self._tandem.open_s)
        backs_s = [self._tandem.run(part, since_s) for part in turn.parts]
        weighed_s = sum(map(float.__mul__, backs_s, map(float, turn.sizes)))
        group.back_s = backs_s[-1]
        self.turns.append((turn, weighed_s / turn.newcomers - began_s, group.back_s - began_s))
        self._parts += len(backs_s)
        self.spans_s.append(group.back_s - since_s)
        if not was_empty:
            self.later_s.append(group.back_s - since_s)

    def _step(self, group: _Group) -> None:
        since_s, place = group.back_s, min(group.steps, self._last)
        group.back_s = self._tandem.run(self._rounds.step(place), since_s)
        self.steps_s.setdefault(place, []).append(group.back_s - since_s)
        group.steps += 1
        group.steps_left = max(0, group.steps_left - 1)


def steady_cycle(rounds: DecodeRounds, turns: NewcomersTurns, limits: Turns) -> Cycle:
    """The cycle with these decode rounds and turns: a turn takes what its steps do not."""
    phases, groups = rounds.phases, rounds.groups
    run = _Run(rounds, turns, limits)
    run.run()
    step_s = rounds.seconds()
    in_steps_s = sum(len(seen) * float(step_s[place]) for place, seen in run.steps_s.items())
    each_s = (run.seconds - in_steps_s / groups) / len(run.turns)
    come, none_come = 1 - phases.sizes.none_come, phases.sizes.none_come
    waits_s = phases.waits * float(step_s[-1])
    steps_s = float(np.dot(phases.reached, step_s))
    cycle_s = groups * come * each_s + none_come * waits_s + steps_s
    at_turns_s = come * float(np.mean(run.spans_s)) + none_come * waits_s
    step_s = _beside_turns(run, phases.reached, step_s, cycle_s - at_turns_s)
    weights = [turn.newcomers for turn, *_ in run.turns]
    first_s, turn_s = np.average([each[1:] for each in run.turns], axis=0, weights=weights)
    none_later = phases.none_come_later
    later_s = (1 - none_later) * float(np.mean(run.later_s or run.spans_s))
    busiest_s = [part.busiest_s for turn, *_ in run.turns for part in turn.parts]
    return Cycle(
        cycle_s,
        float(first_s),
        float(turn_s),
        later_s + none_later * waits_s,
        step_s,
        groups * come * len(busiest_s) / len(run.turns) * float(np.var(busiest_s)),
    )


def _beside_turns(run: _Run, reached: FloatArray, step_s: FloatArray, all_s: float) -> FloatArray:
    """The seconds of steps with the turns of other groups beside them, where a group has `all_s` in
    a phase: of the first steps as they were seen, and all others as much longer.
    """
    found = step_s.copy()
    for place in range(min(len(found), FIRST_ROUNDS)):
        if place in run.steps_s:
            found[place] = np.mean(run.steps_s[place])
    others = float(reached[FIRST_ROUNDS:].sum())
    if others > 0:
        found[FIRST_ROUNDS:] += (all_s - float(np.dot(reached, found))) / others
    return found


def rra_timeline(
    times: StageSeconds, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Timeline:
    """The timeline of `schedule` at the `quantile` of the latency which counts."""
    outputs, slots = lengths.outputs, TurnSizes.of(schedule, n_slots=0).slots
    groups = min(schedule.decode_micro_batches, slots)
    phases = Phases.of(schedule, lengths)
    prompt_times = PromptTimes(times, lengths.prompts)
    rounds = DecodeRounds(times, phases, groups, lengths.prompts.mean)
    newcomers = NewcomersTurns(prompt_times, schedule, phases.sizes)
    cycle = steady_cycle(rounds, newcomers, Turns.of(schedule))
    waits = phases.waits * phases.none_come_later
    mean_s, cycles = _latencies(cycle, waits, outputs.longest)
    chosen = np.array(outputs.lengths)
    chances = np.array(outputs.probabilities)
    deviations_s = np.sqrt(cycle.variance * cycles[chosen])
    latency_s = mixed_quantile(mean_s[chosen], deviations_s, chances, quantile)
    return Timeline(
        Performance(groups * phases.sizes.mean_newcomers / cycle.cycle_s, latency_s),
        cycle.cycle_s,
        mean_s,
    )


def _latencies(cycle: Cycle, waits: float, longest: int) -> tuple[FloatArray, FloatArray]:
    """Mean seconds by tokens of an answer, and in how many cycles they come [longest + 1]; in later
    phases a request makes so many steps more as its group `waits`.
    """
    in_first = len(cycle.step_s)
    steps = np.arange(longest + 1) - 1.0
    ends_s = np.concatenate([[0.0], np.cumsum(cycle.step_s)])
    per_phase = in_first + waits
    beyond = np.maximum(steps - in_first, 0.0)
    later = np.maximum(np.ceil(beyond / per_phase - 1e-9), 0.0)
    last = np.where(later > 0, beyond - (later - 1) * per_phase, steps)
    within_s = np.interp(last, np.arange(in_first + 1), ends_s)
    phase_s = cycle.later_turn_s + float(cycle.step_s.sum())
    earlier_s = np.where(
        later > 0, cycle.turn_s + ends_s[-1] + (later - 1) * phase_s + cycle.later_turn_s, 0.0
    )
    mean_s = np.where(later > 0, earlier_s + within_s, cycle.turn_s + within_s)
    return np.where(steps > 0, mean_s, cycle.first_s), 1 + later

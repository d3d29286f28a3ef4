"""A cycle of RRA in its steady state: what turns, and the decode steps next to them, take.

Passes of both phases meet there, so they are run one after the other through the stages, of a few
cycles in whose turns everything has its proportion. Groups come to their turns as those of
`planner.schedule.exegpt` do: together, but where one is empty earlier. Rounds of steps further from
all turns are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.latency_bound.steady_state.rra.rounds import FIRST_ROUNDS, DecodeRounds
from planner.latency_bound.steady_state.rra.turns import GOLDEN, NewcomersTurns, Turn
from planner.latency_bound.steady_state.tandem import PassTimes, Tandem
from planner.length_distribution import FloatArray
from planner.schedule.turns import Turns

_TURNS, _PARTS = 24, 64
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
    """A group that has made `steps` since its turn, comes to the next one in `steps_left` and is
    empty after `empty_after`; its last pass is back at `back_s`.
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
        self._step_times: dict[int, PassTimes] = {}
        self._tandem = Tandem(rounds.stages)
        self._groups = [_Group() for _ in range(rounds.groups)]
        self._begun = 0
        self._observe()

    def _observe(self) -> None:
        """Forget what was seen until now."""
        self.turns: list[tuple[Turn, float, float]] = []
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
        return cycles >= _CYCLES and (len(self.turns) >= _TURNS or self._parts >= _PARTS)

    def _skip(self, rounds: int) -> None:
        """Have all groups make steps that are alike."""
        for group in self._groups:
            group.steps += rounds
            group.steps_left -= rounds

    def _advance(self, group: _Group) -> None:
        """Have a group make its next passes."""
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

    def _prefill(self, group: _Group, turn: Turn, was_empty: bool) -> None:
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
        if place not in self._step_times:
            self._step_times[place] = self._rounds.step(place)
        group.back_s = self._tandem.run(self._step_times[place], since_s)
        self.steps_s.setdefault(place, []).append(group.back_s - since_s)
        group.steps += 1
        group.steps_left = max(0, group.steps_left - 1)


def cycle_of(rounds: DecodeRounds, turns: NewcomersTurns, limits: Turns) -> Cycle:
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

"""A cycle of RRA in its steady state: what turns, and the decode rounds next to them, take.

Passes of both phases meet there, so they are run one after the other through the stages, of a few
cycles in whose turns everything has its proportion. Rounds further from the turns are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from planner.latency_bound.steady_state.rra.rounds import DecodeRounds
from planner.latency_bound.steady_state.rra.turns import GOLDEN, Turn
from planner.latency_bound.steady_state.tandem import PassTimes, Tandem
from planner.length_distribution import FloatArray

_TURNS, _PARTS = 24, 64
"""Turns, and micro-batches in them, that stand for all."""
_FIRST_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Cycle:
    """Mean seconds of a cycle, and those of a request: from its turn to its first token
    (`first_s`) and to when the turn is back (`turn_s`); of a turn of its group, or a step beside
    others' turns, later in its life (`later_turn_s`); and of each decode round [decode_steps].
    `variance` is that of a cycle.
    """

    cycle_s: float
    first_s: float
    turn_s: float
    later_turn_s: float
    round_s: FloatArray
    variance: float


class _Run:
    """Groups that make passes in one order for ever."""

    def __init__(self, stages: int, groups: int) -> None:
        self._tandem = Tandem(stages)
        self.ready_s = [0.0] * groups
        self._last_s = 0.0

    def step(self, group: int, times: PassTimes) -> float:
        """Have a group make a step; returns the seconds since its last pass was back."""
        return self._back(group, self._tandem.run(times, self.ready_s[group]))

    def turn(self, group: int, turn: Turn) -> tuple[float, float, float]:
        """Have the newcomers of a group prefilled; returns the mean seconds until one is back, and
        those until all are, since the turn began, and the latter since the group's last pass.
        """
        ready_s = self.ready_s[group]
        began_s = max(ready_s, self._tandem.open_s)
        backs_s = [self._tandem.run(part, ready_s) for part in turn.parts]
        weighed_s = sum(map(float.__mul__, backs_s, map(float, turn.sizes)))
        mean_s = weighed_s / turn.newcomers - began_s
        return mean_s, backs_s[-1] - began_s, self._back(group, backs_s[-1])

    def rest(self, group: int) -> None:
        """Have a group wait until the one before it is back."""
        self._back(group, self._last_s)

    def _back(self, group: int, back_s: float) -> float:
        since_s = self.ready_s[group]
        self.ready_s[group] = self._last_s = max(back_s, since_s)
        return self._last_s - since_s


def cycle_of(rounds: DecodeRounds, turns: Iterator[Turn]) -> Cycle:
    """The cycle with these decode rounds and turns."""
    groups, reached = rounds.groups, rounds.phases.reached
    first = list(range(min(len(reached), _FIRST_ROUNDS)))
    places = first if len(first) == len(reached) else [*first, len(reached) - 1]
    steps = [rounds.step(place) for place in places]
    at_turns = rounds.step_at_turns()
    run = _Run(rounds.times.stages, groups)
    made: list[Turn] = []
    newcomers_s: list[tuple[float, float, float]] = []
    later_s: list[float] = []
    spans_s: list[list[float]] = [[] for _ in places]
    cycles = _cycles(groups, islice(turns, groups), made)
    start_s = 0.0
    for number in range(cycles + 1):
        if number == 1:
            start_s = float(np.mean(run.ready_s))
        for group in range(groups):
            turn = made[group] if not number else next(turns)
            if number:
                made.append(turn)
            if turn.parts:
                seen = run.turn(group, turn)
                if number:
                    newcomers_s.append(seen)
                    later_s.append(seen[2])
            else:
                span_s = run.step(group, at_turns)
                if number:
                    later_s.append(span_s)
        for at, (place, times) in enumerate(zip(places, steps, strict=True)):
            for group in range(groups):
                if (1 + number * groups + group) * GOLDEN % 1 < reached[place]:
                    span_s = run.step(group, times)
                    if number:
                        spans_s[at].append(span_s)
                else:
                    run.rest(group)
    explicit_s = (float(np.mean(run.ready_s)) - start_s) / cycles
    any_s, own_s = rounds.seconds()
    skipped_s = float(any_s.sum() - any_s[places].sum())
    for at, place in enumerate(places):
        if spans_s[at]:
            own_s[place] = np.mean(spans_s[at])
    weights = [turn.newcomers for turn in made[groups:] if turn.parts]
    first_s, turn_s, _ = np.average(newcomers_s, axis=0, weights=weights)
    busiest_s = [part.busiest_s for turn in made for part in turn.parts]
    parts = len(busiest_s) / len(made)
    return Cycle(
        explicit_s + skipped_s,
        float(first_s),
        float(turn_s),
        float(np.mean(later_s)),
        own_s,
        groups * parts * float(np.var(busiest_s)),
    )


def _cycles(groups: int, first: Iterator[Turn], made: list[Turn]) -> int:
    """How many cycles stand for all; `made` gets the turns of the first one."""
    made.extend(first)
    parts = max(1, sum(len(turn.parts) for turn in made))
    return max(2, min(-(-_TURNS // groups), -(-_PARTS // parts)))

"""The steady-state timeline of RRA: every stage has both phases in turns (ExeGPT section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, floor, log

import numpy as np

from planner.latency_bound.completions import Completions
from planner.latency_bound.group_sizes import GroupSizes
from planner.latency_bound.performance import Performance
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.tandem import PassTimes, Tandem
from planner.latency_bound.timeline import Timeline
from planner.latency_bound.turn_times import Turn, TurnTimes
from planner.length_distribution import FloatArray, RequestLengths
from planner.scheduling import RequestSchedule

_TURNS = 24
_ROUNDS = 4
_CLASSES = 12
_IRREGULAR = 1e-3


@dataclass(frozen=True, eq=False)
class Phase:
    turn_s: float
    span_s: float
    step_s: FloatArray
    turn_var: float
    step_var: float


class Rounds:
    def __init__(self, stages: int, groups: int) -> None:
        self._tandem = Tandem(stages)
        self._ready_s = [0.0] * groups
        self._next = 0

    def _done(self, back_s: float) -> float:
        span_s = back_s - self._ready_s[self._next]
        self._ready_s[self._next] = back_s
        self._next = (self._next + 1) % len(self._ready_s)
        return span_s

    def step(self, times: PassTimes) -> float:
        return self._done(self._tandem.run(times, self._ready_s[self._next]))

    def turn(self, turn: Turn) -> tuple[float, float]:
        ready_s = self._ready_s[self._next]
        began_s = max(ready_s, self._tandem.open_s)
        for part in turn.parts:
            back_s = self._tandem.run(part, ready_s)
        return back_s - began_s, self._done(back_s)


def round_s(groups: int, step: PassTimes) -> float:
    return max(groups * step.busiest_s, step.alone_s)


def rra_timeline(
    times: StageTimes, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Timeline:
    """The timeline of `schedule` for requests of these lengths; `quantile` is that of the latency
    which counts.
    """
    groups, n_d = schedule.decode_micro_batches, schedule.decode_steps
    completions = Completions(lengths.outputs, n_d)
    sizes = GroupSizes.of(schedule, completions.phases)
    turns = TurnTimes(times, lengths.prompts, schedule.prefill_micro_batch).turns(sizes)
    left = completions.decoding / completions.phases
    reached = 1 - sizes.all_ended(1 - left)
    alive = sizes.mean * left / np.maximum(reached, 1e-12)

    def step(u: int) -> PassTimes:
        size = max(1.0, float(alive[u]))
        context = lengths.prompts.mean + float(completions.answer_tokens[u])
        return PassTimes.of(times.decode_s(size, context), times.decode_hop_s(size))

    used = int(np.count_nonzero(reached > 1e-9))
    nodes = np.unique(np.round(np.linspace(0, max(0, used - 1), _CLASSES)).astype(int))
    steps = {int(u): step(u) for u in nodes}
    rounds_s = np.interp(np.arange(n_d), nodes, [round_s(groups, steps[int(u)]) for u in nodes])
    none = sum(chance for count, chance in sizes.newcomers if not count)
    irregular = none + (1 - reached[-1])
    if irregular < _IRREGULAR or groups == 1:
        phase = in_step(times.stages, groups, turns, step, rounds_s, reached)
    else:
        phase = scattered(times.stages, groups, turns, step, rounds_s, reached, 1 - none)
    full_s = (1 - none) * phase.span_s + float(np.dot(reached, phase.step_s))
    survived_s = (1 - none) * phase.span_s + float(phase.step_s.sum())
    per_turn = sum(count * chance for count, chance in sizes.newcomers)
    latency_s = _latencies(phase.turn_s, phase.step_s, survived_s, lengths.outputs.longest)
    d = np.array(lengths.outputs.lengths) - 1
    k = np.maximum(1, -(-d // n_d))
    el = reached.sum(); el2 = float(np.dot(reached, 2 * np.arange(n_d) + 1))
    cvl = max(0, el2 / el**2 - 1) if el > 0 else 0
    spread = k * phase.turn_var
    if phase.step_var:
        lam = el + 1 - none
        fr = d / lam % 1
        count = (groups - 1) * (fr * (1 - fr) + d / lam * cvl)
        spread = spread + count * phase.step_var
    at = mixture_quantile(latency_s[d + 1], np.sqrt(spread), np.array(lengths.outputs.probabilities), quantile)
    mean = float(np.dot(latency_s[list(lengths.outputs.lengths)], lengths.outputs.probabilities))
    return Timeline(
        Performance(groups * per_turn / full_s, float(at)),
        mean,
        full_s,
        groups * sizes.mean,
        full_s,
        latency_s,
    )


def in_step(stages, groups, turns: Iterator[Turn], step, rounds_s, reached) -> Phase:
    run = Rounds(stages, groups)
    explicit = min(len(rounds_s), _ROUNDS)
    first = [step(u) for u in range(explicit)]
    cycles = ceil(_TURNS / groups) + 1
    turn_s, span_s, newcomers, step_s = [], [], [], []
    used = []
    for cycle in range(cycles):
        made = list(islice(turns, groups))
        used += made
        seen = [run.turn(turn) for turn in made]
        spans = [[run.step(times) for _ in range(groups)] for times in first]
        if cycle:
            turn_s += [each for each, _ in seen]
            span_s += [each for _, each in seen]
            newcomers += [turn.newcomers for turn in made]
            step_s.append(spans)
    means = rounds_s.copy()
    means[:explicit] = np.mean(step_s, axis=(0, 2))
    return Phase(
        float(np.average(turn_s, weights=newcomers)), float(np.mean(span_s)), means, groups*turn_var(used), 0.0
    )


def scattered(stages, groups, turns: Iterator[Turn], step, rounds_s, reached, chance) -> Phase:
    run = Rounds(stages, groups)
    likely = reached / reached.sum()
    at = int(np.searchsorted(np.cumsum(likely), 0.5))
    mean_step = step(at)
    base_s = round_s(groups, mean_step)
    density = chance / (chance + float(reached.sum()))
    turn_s, span_s, newcomers, used = [], [], [], []
    steps, steps_s = 0, 0.0
    for i in range(_TURNS + 4):
        share = (0.5 + i * (5**0.5 - 1) / 2) % 1
        gap = floor(log(1 - share) / log(1 - density)) if density < 1 else 0
        skipped = max(0, (gap - 3 * groups) // groups) * groups
        turn = next(turns)
        used.append(turn)
        latency, span = run.turn(turn)
        own = [run.step(mean_step) for _ in range(gap - skipped)]
        if i >= 4:
            turn_s.append(latency)
            span_s.append(span)
            newcomers.append(turn.newcomers)
            steps += gap
            steps_s += sum(own) + skipped * base_s
    extra_s = steps_s / steps - base_s if steps else 0.0
    return Phase(
        float(np.average(turn_s, weights=newcomers)),
        float(np.mean(span_s)),
        rounds_s + extra_s,
        turn_var(used),
        (extra_s / ((groups - 1) * density)) ** 2 if groups > 1 else 0.0,
    )


def _latencies(turn_s: float, step_s: FloatArray, phase_s: float, longest: int) -> FloatArray:
    """Seconds by the tokens of an answer [longest + 1]."""
    steps = np.arange(longest + 1) - 1
    ends_s = np.cumsum(step_s)
    phases = np.maximum(steps - 1, 0) // len(step_s)
    place = np.maximum(steps - 1, 0) % len(step_s)
    return np.where(steps > 0, turn_s + phases * phase_s + ends_s[place], turn_s)


def turn_var(turns) -> float:
    parts = np.mean([len(turn.parts) for turn in turns])
    return float(parts * np.var([part.busiest_s for turn in turns for part in turn.parts]))


def mixture_quantile(means, deviations, chances, share) -> float:
    from scipy.special import ndtr

    dev = np.maximum(deviations, 1e-12 * means.max())
    low, high = float((means - 6 * dev).min()), float((means + 6 * dev).max())
    for _ in range(40):
        middle = (low + high) / 2
        if float(np.dot(chances, ndtr((middle - means) / dev))) < share:
            low = middle
        else:
            high = middle
    return high

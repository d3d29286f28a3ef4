"""The steady-state timeline of RRA: every stage has both phases in turns (ExeGPT section 6)."""

from __future__ import annotations

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.performance import Performance
from planner.latency_bound.steady_state.prompt_times import PromptTimes
from planner.latency_bound.steady_state.rra.cycle import Cycle, cycle_of
from planner.latency_bound.steady_state.rra.phases import Phases
from planner.latency_bound.steady_state.rra.rounds import DecodeRounds
from planner.latency_bound.steady_state.rra.turns import NewcomersTurns
from planner.latency_bound.steady_state.timeline import Timeline, mixed_quantile
from planner.length_distribution import FloatArray, RequestLengths
from planner.schedule.policy_sizes import TurnSizes
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule


def rra_timeline(
    times: StageTimes, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Timeline:
    """The timeline of `schedule` for requests of these lengths; `quantile` is that of the latency
    which counts.
    """
    outputs, slots = lengths.outputs, TurnSizes.of(schedule, n_slots=0).slots
    groups = min(schedule.decode_micro_batches, slots)
    phases = Phases.of(schedule, lengths)
    prompt_times = PromptTimes(times, lengths.prompts)
    rounds = DecodeRounds(times, phases, groups, lengths.prompts.mean)
    newcomers = NewcomersTurns(prompt_times, schedule, phases.sizes)
    cycle = cycle_of(rounds, newcomers, Turns.of(schedule))
    waits = phases.waits * phases.none_come_later
    mean_s, cycles = _latencies(cycle, waits, outputs.longest)
    chosen = np.array(outputs.lengths)
    chances = np.array(outputs.probabilities)
    deviations_s = np.sqrt(cycle.variance * cycles[chosen])
    latency_s = mixed_quantile(mean_s[chosen], deviations_s, chances, quantile)
    return Timeline(
        Performance(groups * phases.sizes.mean_newcomers / cycle.cycle_s, latency_s),
        float(np.dot(mean_s[chosen], chances)),
        cycle.cycle_s,
        groups * phases.sizes.mean,
        cycle.cycle_s,
        mean_s,
    )


def _latencies(cycle: Cycle, waits: float, longest: int) -> tuple[FloatArray, FloatArray]:
    """Mean seconds by the tokens of an answer, and in how many cycles they come [longest + 1].

    In phases after that of its turn a request makes so many steps more in the mean, as its group
    `waits` for others.
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

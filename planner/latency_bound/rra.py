"""The steady-state timeline of RRA: every stage has both phases in turns (ExeGPT section 6)."""

from __future__ import annotations

import numpy as np

from planner.latency_bound.completions import Completions
from planner.latency_bound.performance import Performance
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.timeline import Timeline, mean_prefill_s
from planner.length_distribution import FloatArray, RequestLengths
from planner.scheduling import RequestSchedule

TIMED_STEPS = 24
"""Decode steps of a phase that are timed; requests end one after the other, so that the others lie
on a curve between them."""


def rra_timeline(
    times: StageTimes, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Timeline:
    """The timeline of `schedule` for requests of these lengths; `quantile` is that of the latency
    which counts.
    """
    groups = schedule.decode_micro_batches
    completions = Completions(lengths.outputs, schedule.decode_steps)
    newcomers = schedule.prefill_requests / groups
    prefill_s = _turn_s(times, lengths, schedule, newcomers)
    rounds_s = _rounds_s(times, lengths, completions, groups, newcomers)
    cycle_s = prefill_s + float(rounds_s.sum())
    latency_s = _latencies(prefill_s, rounds_s, cycle_s, lengths.outputs.longest)
    at = latency_s[lengths.outputs.quantile(quantile)]
    mean = float(np.dot(latency_s[list(lengths.outputs.lengths)], lengths.outputs.probabilities))
    return Timeline(
        Performance(schedule.prefill_requests / cycle_s, float(at)),
        mean,
        cycle_s,
        completions.decode_requests(schedule.prefill_requests),
        cycle_s,
        latency_s,
    )


def _turn_s(
    times: StageTimes, lengths: RequestLengths, schedule: RequestSchedule, newcomers: float
) -> float:
    """Seconds in which all groups prefill their newcomers, one micro-batch behind the other."""
    size = min(schedule.prefill_micro_batch, max(1.0, newcomers))
    compute_s = mean_prefill_s(times, size, lengths.prompts)
    hop_s = times.prefill_hop_s(size, lengths.prompts.mean)
    more = schedule.prefill_requests / size - 1
    slowest_s = max(compute_s.max(), hop_s.max())
    return float(compute_s.sum() + hop_s.sum() + max(0.0, more) * slowest_s)


def _rounds_s(
    times: StageTimes,
    lengths: RequestLengths,
    completions: Completions,
    groups: int,
    newcomers: float,
) -> FloatArray:
    """Seconds of each decode step of a phase, by all groups [decode_steps]: of `TIMED_STEPS` of
    them, and between these linear.
    """
    count = completions.decode_steps
    timed = np.unique(np.linspace(0, count - 1, min(count, TIMED_STEPS)).round().astype(np.int64))
    alive, before = completions.alive[timed], completions.tokens_before[timed]
    contexts = lengths.prompts.mean + 1 + before
    seconds = [
        _round_s(times, groups, newcomers * share, context)
        for share, context in zip(alive.tolist(), contexts.tolist(), strict=True)
    ]
    return np.asarray(np.interp(np.arange(count), timed, seconds))


def _round_s(times: StageTimes, groups: int, requests: float, context: float) -> float:
    """Seconds of a decode step of all groups of so many requests."""
    compute_s = times.decode_s(max(1.0, requests), context)
    hop_s = times.decode_hop_s(max(1.0, requests))
    busiest_s = max(compute_s.max(), hop_s.max())
    return float(max(groups * busiest_s, compute_s.sum() + hop_s.sum()))


def _latencies(prefill_s: float, rounds_s: FloatArray, cycle_s: float, longest: int) -> FloatArray:
    """Seconds by the tokens of an answer [longest + 1]."""
    steps = np.arange(longest + 1) - 1
    ends_s = np.cumsum(rounds_s)
    phases = np.maximum(steps - 1, 0) // len(rounds_s)
    place = np.maximum(steps - 1, 0) % len(rounds_s)
    return np.where(steps > 0, prefill_s + phases * cycle_s + ends_s[place], prefill_s)

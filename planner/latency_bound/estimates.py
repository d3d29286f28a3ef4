"""Estimates of a schedule's performance that take a fraction of its timeline's time.

They count as the planner's objective of a job does (`planner.optimiser.problem`): a turn fills
the pipeline once, and a round of decode steps takes what the busiest stage or the way through all
stages takes. Turns and groups are all of mean size, and none waits for another. A search ranks
placements by them; the timelines decide.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.latency_bound.schedules import Completions, prefill_sizes
from planner.latency_bound.stage_times import StageSeconds, decodes_s, mean_prefill_s
from planner.latency_bound.timeline import Performance
from planner.latency_bound.waa_sides import LEAST_STEPS, WaaSides, mean_context
from planner.lengths import FloatArray, LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule

TIMED_STEPS = 8
"""Decode steps of a phase that are timed; between them time is linear."""


def estimated_rra(
    times: StageSeconds, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Performance:
    groups, size = schedule.decode_micro_batches, schedule.prefill_micro_batch
    newcomers = schedule.prefill_requests / groups
    prefill_s = turn_s(times, lengths.prompts, newcomers, groups, size)
    rounds_s = _rounds_s(times, lengths, schedule)
    cycle_s = prefill_s + float(rounds_s.sum())
    rate = schedule.prefill_requests / cycle_s
    steps = lengths.outputs.quantile(quantile) - 1
    if not steps:
        return Performance(rate, prefill_s)
    phases, last = divmod(steps - 1, schedule.decode_steps)
    return Performance(rate, prefill_s + phases * cycle_s + float(rounds_s[: last + 1].sum()))


def estimated_waa(sides: WaaSides, schedule: RequestSchedule, quantile: float) -> Performance:
    prefill, decode, lengths = sides.prefill_and_keep, sides.restore_and_decode, sides.lengths
    size, newcomers = schedule.prefill_micro_batch, schedule.prefill_requests
    once_s = turn_s(prefill, lengths.prompts, newcomers, 1, size)
    steps, context = lengths.outputs.mean - 1, mean_context(lengths)
    groups, decoding = schedule.decode_micro_batches, schedule.decode_requests
    together_s = round_s(decode, groups, decoding / groups, context)
    rate = min(
        prefill_rate(prefill, lengths.prompts, size),
        decoding / max(steps, LEAST_STEPS) / together_s,
    )
    sent_s = sides.handover.sent_s(lengths.prompts.mean * size)
    decoded_s = together_s * (lengths.outputs.quantile(quantile) - 0.5)
    return Performance(rate, once_s + sent_s + decoded_s)


def prefill_rate(times: StageSeconds, prompts: LengthDistribution, size: int) -> float:
    """Requests per second in micro-batches of `size` that follow each other."""
    seconds = _prefill_s(times, prompts, size)
    return size / float(seconds.max())


def turn_s(
    times: StageSeconds, prompts: LengthDistribution, newcomers: float, groups: int, size: int
) -> float:
    """Seconds in which groups of so many newcomers are prefilled, one after the other."""
    seconds = _prefill_s(times, prompts, min(size, max(1.0, newcomers)))
    more = max(0.0, groups * newcomers / size - 1)
    return float(seconds.sum() + more * seconds.max())


def shortest_turns(
    times: StageSeconds, prompts: LengthDistribution, newcomers: int, groups: int
) -> tuple[int, ...]:
    """Prefill micro-batches for groups of so many newcomers, that of the shortest turn first."""
    sizes = prefill_sizes(newcomers, prompts.mean)
    return tuple(sorted(sizes, key=lambda size: turn_s(times, prompts, newcomers, groups, size)))


def shortest_round(times: StageSeconds, requests: int, context: float, most_groups: int) -> int:
    """The number of groups, at most so many, of which a decode step of all takes the least time."""
    groups = np.arange(1.0, most_groups + 1)
    sizes = np.maximum(1.0, requests / groups)
    compute_s, hop_s = decodes_s(times, sizes, np.full(most_groups, context))
    busiest_s = groups * np.maximum(compute_s, hop_s).max(axis=1)
    return 1 + int(np.maximum(busiest_s, (compute_s + hop_s).sum(axis=1)).argmin())


def round_s(times: StageSeconds, groups: int, requests: float, context: float) -> float:
    requests = max(1.0, requests)
    compute_s, hop_s = times.decode_s(requests, context), times.decode_hop_s(requests)
    busiest_s = max(compute_s.max(), hop_s.max())
    return float(max(groups * busiest_s, compute_s.sum() + hop_s.sum()))


def _rounds_s(
    times: StageSeconds, lengths: RequestLengths, schedule: RequestSchedule
) -> FloatArray:
    """Seconds of each decode step of a phase, by all groups [decode_steps]."""
    count, groups = schedule.decode_steps, schedule.decode_micro_batches
    newcomers = schedule.prefill_requests / groups
    timed, alive, before = _timed_steps(lengths.outputs, count)
    contexts = lengths.prompts.mean + 1 + before
    compute_s, hop_s = decodes_s(times, np.maximum(1.0, newcomers * alive), contexts)
    busiest_s = groups * np.maximum(compute_s, hop_s).max(axis=1)
    seconds = np.maximum(busiest_s, (compute_s + hop_s).sum(axis=1))
    return np.asarray(np.interp(np.arange(count), timed, seconds))


@lru_cache(maxsize=4096)
def _timed_steps(
    outputs: LengthDistribution, decode_steps: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps that are timed [n], the requests that make them for each that comes, and tokens
    generated before.
    """
    completions = Completions(outputs, decode_steps)
    places = np.linspace(0, decode_steps - 1, min(decode_steps, TIMED_STEPS))
    timed = np.unique(places.round().astype(np.int64))
    decoding, before = completions.decoding[timed], completions.answer_tokens[timed]
    return timed.astype(np.float64), decoding, before


def _prefill_s(times: StageSeconds, prompts: LengthDistribution, size: float) -> FloatArray:
    """Seconds of a prefill micro-batch and its transfer on each stage [N]."""
    return mean_prefill_s(times, size, prompts) + times.prefill_hop_s(size, prompts.mean)

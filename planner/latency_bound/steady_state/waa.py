"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6).

Both sides work for themselves, and the slower one decides how many requests are served. Where that
is the side that prefills, as many micro-batches as may be are under way there all the time, and
fewer requests decode than the schedule says; else turns of newcomers come as requests end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.steady_state.completions import waa_decode_requests
from planner.latency_bound.steady_state.group_sizes import GroupSizes, whole_numbers
from planner.latency_bound.steady_state.performance import Performance
from planner.latency_bound.steady_state.tandem import PassTimes, Tandem
from planner.latency_bound.steady_state.timeline import Timeline, mixed_quantile
from planner.latency_bound.steady_state.turn_times import Turn, TurnTimes
from planner.length_distribution import RequestLengths
from planner.schedule.turns import even_parts
from planner.scheduling import RequestSchedule

_PARTS = 64
"""Prefill micro-batches that stand for all."""

_HALVINGS = 16

WAITING = 1
"""Prefill micro-batches under way beside one for each stage (`actors.schedule.exegpt_prefill`)."""


@dataclass(frozen=True)
class _Prefills:
    """Requests per second that stages can prefill, and of a micro-batch at the rate at hand the
    mean seconds from its submission until it is back, and their standard deviation.
    """

    most_per_s: float
    mean_s: float
    deviation_s: float


def waa_timeline(
    prefill: StageTimes,
    decode: StageTimes,
    handover_s_per_token: float,
    lengths: RequestLengths,
    schedule: RequestSchedule,
    quantile: float,
) -> Timeline:
    """The timeline of `schedule` with these stages for either phase; the keys and values of a
    prompt take `handover_s_per_token` for each of its tokens from one to the other.
    """
    outputs, groups = lengths.outputs, schedule.decode_micro_batches
    requests, steps = schedule.prefill_requests, max(outputs.mean - 1, 1e-9)
    turns = _turns(prefill, lengths, schedule)
    most_per_s = _prefilled_per_s(prefill.stages, turns)
    size_s = handover_s_per_token * lengths.prompts.mean
    most_per_s = min(most_per_s, 1 / size_s if size_s > 0 else most_per_s)
    low, decoding = 1.0, float(schedule.decode_requests)
    round_s = _round_s(decode, groups, decoding, lengths)
    rate = min(most_per_s, decoding / steps / round_s)
    for _ in range(_HALVINGS if rate == most_per_s else 0):  # so many decode that as many come
        middle = (low + decoding) / 2
        round_s = _round_s(decode, groups, middle, lengths)
        if middle / steps / round_s < rate:
            low = middle
        else:
            decoding = middle
    found = _prefills(prefill.stages, turns, most_per_s, rate)
    joined_s = size_s * min(schedule.prefill_micro_batch, requests) + round_s / (2 * groups)
    tokens = np.arange(outputs.longest + 1)
    steps_s = np.where(tokens > 1, joined_s + round_s * (tokens - 1), 0.0)
    latency_s = found.mean_s + steps_s
    chosen, chances = list(outputs.lengths), np.array(outputs.probabilities)
    return Timeline(
        Performance(
            rate,
            mixed_quantile(
                latency_s[chosen], np.full(len(chosen), found.deviation_s), chances, quantile
            ),
        ),
        float(np.dot(latency_s[chosen], chances)),
        requests / rate,
        waa_decode_requests(outputs, requests),
        requests / rate,
        latency_s,
    )


def _turns(times: StageTimes, lengths: RequestLengths, schedule: RequestSchedule) -> list[Turn]:
    """Turns whose micro-batches stand for all."""
    newcomers = whole_numbers(float(schedule.prefill_requests))
    sizes = GroupSizes(np.ones(1), np.ones(1), newcomers)
    parts = len(even_parts(schedule.prefill_requests, schedule.prefill_micro_batch))
    turns = TurnTimes(times, lengths.prompts, schedule.prefill_micro_batch).turns(sizes)
    return list(islice(turns, max(2, -(-_PARTS // parts))))


def _prefilled_per_s(stages: int, turns: list[Turn]) -> float:
    """Requests per second of turns that follow each other at once."""
    backs_s, requests = _backs_s(stages, turns, 0.0), [turn.newcomers for turn in turns]
    middle = len(turns) // 2
    return sum(requests[middle:]) / (backs_s[-1][-1][1] - backs_s[middle - 1][-1][1])


def _prefills(stages: int, turns: list[Turn], most_per_s: float, rate: float) -> _Prefills:
    """Micro-batches of turns that come at this rate."""
    apart_s = turns[0].newcomers / rate if rate < 0.999 * most_per_s else 0.0
    found = _backs_s(stages, turns, apart_s)[len(turns) // 4 :]
    seconds = np.array([back_s - began_s for turn in found for began_s, back_s in turn])
    sizes = np.array([size for turn in turns[len(turns) // 4 :] for size in turn.sizes])
    mean_s = float(np.average(seconds, weights=sizes))
    variance = float(np.average((seconds - mean_s) ** 2, weights=sizes))
    return _Prefills(most_per_s, mean_s, variance**0.5)


def _backs_s(stages: int, turns: list[Turn], apart_s: float) -> list[list[tuple[float, float]]]:
    """When each micro-batch is submitted and when it is back, of turns that begin so far apart."""
    tandem, ends_s = Tandem(stages), [0.0] * (stages + WAITING)
    found = []
    for number, turn in enumerate(turns):
        of_turn = []
        for part in turn.parts:
            began_s = max(number * apart_s, ends_s[-stages - WAITING])
            ends_s.append(tandem.run(part, began_s))
            of_turn.append((began_s, ends_s[-1]))
        found.append(of_turn)
    return found


def _round_s(decode: StageTimes, groups: int, requests: float, lengths: RequestLengths) -> float:
    """Seconds in which every group makes a decode step."""
    outputs = lengths.outputs
    squares = outputs.variance + outputs.mean**2
    context = lengths.prompts.mean + squares / outputs.mean / 2
    size = max(1.0, requests / groups)
    step = PassTimes.of(decode.decode_s(size, context), decode.decode_hop_s(size))
    return max(groups * step.busiest_s, step.alone_s)

"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6).

Both sides work for themselves, and the slower one decides how many requests are served. Where that
is the side that prefills, as many micro-batches as may be are under way there all the time, and
fewer requests decode than the schedule says; else turns of newcomers come as requests end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.latency_bound.steady_state.completions import waa_decode_requests
from planner.latency_bound.steady_state.performance import Performance
from planner.latency_bound.steady_state.timeline import Timeline, mixed_quantile
from planner.latency_bound.steady_state.waa.load import LoadOfSides
from planner.latency_bound.steady_state.waa.sides import WaaSides
from planner.scheduling import RequestSchedule

_BUSY = 0.97
"""The share of the requests that stages can prefill from which on prompts wait all the time."""


def waa_timeline(sides: WaaSides, schedule: RequestSchedule, quantile: float) -> Timeline:
    """The timeline of `schedule` on these stages; `quantile` is that of the latency that counts."""
    outputs, requests = sides.lengths.outputs, schedule.prefill_requests
    busy = sides.busy(schedule)
    together = min(requests, schedule.prefill_micro_batch)
    sent_s = sides.handover.sent_s(together * sides.lengths.prompts.mean)
    if sent_s:
        busy = replace(busy, requests_per_s=min(busy.requests_per_s, together / sent_s))
    load = LoadOfSides(sides, schedule, busy).load()
    rate = load.served_per_s
    steps = np.maximum(np.arange(outputs.longest + 1) - 1.0, 0.0)
    joined_s = sent_s + load.round_s / (2 * schedule.decode_micro_batches)
    decoded_s = np.where(steps > 0, joined_s + load.round_s * steps, 0.0)
    deviations_s = load.round_deviation_s * steps
    parts = load.passed.parts
    if parts is None or rate >= _BUSY * busy.requests_per_s:
        parts = busy.parts
    chosen, chances = list(outputs.lengths), np.array(outputs.probabilities)
    latency_s = mixed_quantile(
        np.add.outer(decoded_s[chosen], parts.seconds).ravel(),
        np.repeat(deviations_s[chosen], len(parts.seconds)),
        np.outer(chances, parts.shares).ravel(),
        quantile,
    )
    mean_s = parts.mean_s + decoded_s
    return Timeline(
        Performance(rate, latency_s),
        float(np.dot(mean_s[chosen], chances)),
        requests / rate,
        waa_decode_requests(outputs, requests),
        requests / rate,
        mean_s,
    )

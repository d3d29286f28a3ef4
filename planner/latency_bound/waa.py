"""The steady-state timeline of WAA: some stages prefill, others decode (ExeGPT section 6)."""

from __future__ import annotations

import numpy as np

from planner.latency_bound.completions import waa_decode_requests
from planner.latency_bound.performance import Performance
from planner.latency_bound.stage_times import StageTimes
from planner.latency_bound.timeline import Timeline, mean_prefill_s
from planner.length_distribution import RequestLengths
from planner.scheduling import RequestSchedule

_ROUNDS_TO_SETTLE = 20


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
    requests, steps = schedule.prefill_requests, lengths.outputs.mean - 1
    size = min(schedule.prefill_micro_batch, requests)
    compute_s = mean_prefill_s(prefill, size, lengths.prompts)
    hop_s = prefill.prefill_hop_s(size, lengths.prompts.mean)
    turn_s = max(compute_s.max(), hop_s.max()) * requests / size
    pass_s = compute_s.sum() + hop_s.sum() + turn_s * (1 - size / requests)
    handover_s = handover_s_per_token * lengths.prompts.mean * requests
    decoding = float(schedule.decode_requests)
    for _ in range(_ROUNDS_TO_SETTLE):
        round_s = _round_s(decode, schedule.decode_micro_batches, decoding, lengths)
        rate = min(requests / turn_s, schedule.decode_requests / max(steps, 1e-9) / round_s)
        decoding = (decoding + rate * steps * round_s) / 2
    first_s = float(pass_s + handover_s)
    tokens = np.arange(lengths.outputs.longest + 1)
    latency_s = np.where(tokens > 1, first_s + round_s * (tokens - 0.5), first_s - handover_s)
    mean = float(np.dot(latency_s[list(lengths.outputs.lengths)], lengths.outputs.probabilities))
    return Timeline(
        Performance(rate, float(latency_s[lengths.outputs.quantile(quantile)])),
        mean,
        requests / rate,
        waa_decode_requests(lengths.outputs, requests),
        requests / rate,
        latency_s,
    )


def _round_s(decode: StageTimes, groups: int, requests: float, lengths: RequestLengths) -> float:
    """Seconds in which every group makes a decode step."""
    outputs = lengths.outputs
    squares = outputs.variance + outputs.mean**2
    context = lengths.prompts.mean + squares / outputs.mean / 2
    size = max(1.0, requests / groups)
    compute_s, hop_s = decode.decode_s(size, context), decode.decode_hop_s(size)
    return float(max(groups * max(compute_s.max(), hop_s.max()), compute_s.sum() + hop_s.sum()))

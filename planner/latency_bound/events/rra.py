"""Discrete-event simulation of RRA with lengths drawn at random, by the runtime's own decisions."""

from __future__ import annotations

from math import ceil

import numpy as np

from planner.latency_bound.events.drawn_requests import drawn_requests
from planner.latency_bound.events.passes import PipelineOfRequests
from planner.latency_bound.events.watch import Observed, Watch
from planner.latency_bound.stage_times import StageTimes
from planner.length_distribution import RequestLengths
from planner.schedule.exegpt import RraSchedule
from planner.schedule.policy_sizes import TurnSizes
from planner.schedule.static import JobRows
from planner.scheduling import RequestSchedule

_QUEUE = 2.0
"""Times the requests that begin, in the mean, while the last ones that count end: as many are in
the queue beyond these."""


def simulate_rra(
    times: StageTimes,
    lengths: RequestLengths,
    schedule: RequestSchedule,
    watch: Watch,
    generator: np.random.Generator,
    n_slots: int | None = None,
) -> Observed:
    """Simulate the passes of `planner.schedule.exegpt` from when all groups are empty. Requests
    reserve token slots for the longest answer; there are `n_slots` (None: enough for all).
    """
    requests = drawn_requests(lengths, watch.requests + _queued(lengths, schedule), generator)
    rows = JobRows(
        [each.prompt for each in requests],
        [each.output for each in requests],
        [each.prompt + lengths.outputs.longest for each in requests],
    )
    sizes = TurnSizes.of(schedule, sum(rows.reserved or ()) if n_slots is None else n_slots)
    run, pipeline = RraSchedule(rows, sizes, times.stages), PipelineOfRequests(times)
    backs_s, begun, ended = [0.0], 0, 0
    for each in run.passes():
        at_s = backs_s[each.results_before]
        for request, results in run.ended[ended:]:
            watch.end([requests[request]], backs_s[results])
        ended = len(run.ended)
        if watch.done:
            break
        if each.phase == "decode":
            tokens = each.requests * each.context_length
            backs_s.append(pipeline.decode(each.requests, tokens, at_s))
            continue
        newcomers = requests[begun : begun + each.requests]
        watch.begin(newcomers, at_s, run.turn == (0, begun))
        begun += each.requests
        backs_s.append(pipeline.prefill([each.prompt for each in newcomers], at_s))
    return watch.observed()


def _queued(lengths: RequestLengths, schedule: RequestSchedule) -> int:
    """Requests that keep the stages busy until the last of those that count have ended."""
    turns = ceil(lengths.outputs.longest / schedule.decode_steps) + 2
    begin = turns * (schedule.prefill_requests + schedule.decode_micro_batches)
    return ceil(_QUEUE * begin) + 2 * schedule.decode_requests

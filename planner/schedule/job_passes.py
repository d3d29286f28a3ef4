"""Counting the passes of a whole job by its schedule, which depends on lengths but not on time. It
is run for a smaller job that is alike (same share of slots in each micro-batch, as many prefills
for each token of an answer); more prompts add more of what came between the first fill and the last
prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, log2

import numpy as np

from planner.lengths import Lengths
from planner.optimiser.problem import JobPasses
from planner.schedule.passes import JobRows
from planner.schedule.static import JobSchedule
from planner.workload import Job, MicroBatches

SLOTS = (24, 96)
"""Slots of small jobs: above the first, the nearest number stands for others."""

FEW_FILLS, MOST_SLOTS = 2, 512
"""Jobs that fill their slots no more often keep up to so many: their last answers last longest."""

MOST_FILLS, STEADY_FROM = 6, 2
"""How often slots are filled at most, and after how many fills this has become steady."""

LEAST_STEPS, MOST_STEPS = 20, 40
"""Mean decode steps of a request, where it has so many."""

LEAST_IN_GROUP = 8
"""Slots of a group, where it has so many: whether few of them are free differs too much."""

MOST_PREFILLS = 16
"""Prefills that fill all slots, where more take too little of an answer's time to matter."""

FAST_PREFILLS = 8
"""So often all slots could be filled in the time of an answer where more would not matter."""


DRAWN_BURSTS, MOST_DRAWN = 128, 64
"""Bursts that are drawn for the longest of their prefills, and prefills of one; of more the longest
hardly grows."""


def job_passes(job: Job, slots: int, sizes: MicroBatches, stages: int) -> JobPasses:
    """The passes of `job` over `slots` KV slots, within a few percent. Where outputs are alike,
    each fill of all slots is one burst; where prompts are unlike, a burst counts as often as its
    longest prefill, which stages wait for, is longer than the mean.
    """
    slots = min(slots, job.prompts)
    sizes = MicroBatches(min(sizes.prefill, slots), min(sizes.decode, slots))
    if not job.lengths.outputs_vary:
        return _alike_passes(job, slots, sizes, stages)
    fewer, small_sizes, steps_share = _small_job(job, slots, sizes)
    small_rows = max(1, round(min(job.prompts / slots, MOST_FILLS) * fewer))
    small = job.lengths, small_rows, fewer, small_sizes, stages, steps_share
    whole, each_prompt, mean_steps = _counted(*small)
    fills, groups = job.prompts / slots, -(-slots // sizes.decode)
    rows = fewer * fills
    counted_prefills, bursts, counted_steps = (
        count + (rows - small_rows) * more for count, more in zip(whole, each_prompt, strict=True)
    )
    # the last prefill of a burst may not be full
    least = job.prompts / sizes.prefill
    prefills = max(least, least + counted_prefills - rows / small_sizes.prefill)
    steps = job.prompts * (job.lengths.mean_output - 1)
    if not steps:
        bursts = _bursts_of_prefills(prefills, ceil(slots / sizes.prefill), stages)
        return JobPasses(prefills, bursts, 0.0, 0.0, job.prompts / prefills, sizes.decode)
    share = rows * mean_steps / (counted_steps * fewer)
    decode_steps = steps / (share * slots)
    slowest = _slowest_share(job, sizes.prefill, max(1, round(prefills / bursts)))
    return JobPasses(
        prefills=prefills,
        bursts=min(bursts * slowest, prefills),
        decode_steps=decode_steps,
        rounds=decode_steps / groups,
        prefill_requests=job.prompts / prefills,
        decode_requests=steps / decode_steps,
    )


def _alike_passes(job: Job, slots: int, sizes: MicroBatches, stages: int) -> JobPasses:
    fills, rest = divmod(job.prompts, slots)
    steps = round(job.lengths.mean_output) - 1
    prefills = fills * -(-slots // sizes.prefill) + -(-rest // sizes.prefill)
    turns = fills * -(-slots // sizes.decode) + -(-rest // sizes.decode)
    filled = fills + (rest > 0)
    bursts = float(filled)
    if not steps:
        bursts = _bursts_of_prefills(prefills, ceil(slots / sizes.prefill), stages)
    slowest = _slowest_share(job, sizes.prefill, max(1, round(prefills / bursts)))
    return JobPasses(
        prefills=float(prefills),
        bursts=min(bursts * slowest, float(prefills)),
        decode_steps=float(turns * steps),
        rounds=float(filled * steps),
        prefill_requests=job.prompts / prefills,
        decode_requests=job.prompts / turns,
    )


def _bursts_of_prefills(prefills: float, at_once: int, stages: int) -> float:
    """Bursts of prefills alone: `at_once` below `stages`, a round lasts `stages` stages."""
    if at_once >= stages:
        return 1.0
    idle_share = (stages - at_once) / (stages - 1)
    return max(1.0, prefills / at_once * idle_share)


def _small_job(job: Job, slots: int, sizes: MicroBatches) -> tuple[int, MicroBatches, float]:
    """Slots and sizes of the job to run in place of `job`, and its share of the decode steps."""
    fills = min(job.prompts / slots, MOST_FILLS)
    small, small_sizes = _uneven(slots, sizes, fills, job.lengths)
    groups = -(-slots // sizes.decode)
    steps = max(1.0, job.lengths.mean_output - 1)
    prefills, small_prefills = slots / sizes.prefill, small / small_sizes.prefill
    fast = FAST_PREFILLS * small_prefills / groups
    few_steps = max(min(steps, MOST_STEPS), fast)
    small_steps = min(steps * small_prefills / prefills, few_steps)
    share = min(1.0, small_steps / steps)
    # powers of 2 ** (1/8), so that jobs nearly alike share one run
    return small, small_sizes, float(2 ** (round(8 * log2(share)) / 8))


def _uneven(
    slots: int, sizes: MicroBatches, fills: float, lengths: Lengths
) -> tuple[int, MicroBatches]:
    groups, prefills = -(-slots // sizes.decode), slots / sizes.prefill
    steps = max(1.0, lengths.mean_output - 1)
    if fills <= FEW_FILLS:
        small = min(slots, MOST_SLOTS)
    else:
        least = max(groups * LEAST_IN_GROUP, ceil(prefills * min(1.0, LEAST_STEPS / steps)))
        grid = SLOTS if slots > SLOTS[0] else (slots,)
        nearest = min(grid, key=lambda each: abs(log(each / slots)))
        small = max(nearest, min(slots, least))
    prefill = round(small / min(prefills, max(MOST_PREFILLS, prefills * MOST_STEPS / steps)))
    at_most = (small - 1) // (groups - 1) if groups > 1 else small
    decode = max(-(-small // groups), min(round(sizes.decode * small / slots), at_most))
    return small, MicroBatches(max(1, prefill), decode)


_Counts = tuple[float, float, float]
"""Prefills, bursts and decode steps of a job, or their mean for each prompt."""


@lru_cache(maxsize=4096)
def _counted(
    lengths: Lengths, rows: int, slots: int, sizes: MicroBatches, stages: int, steps_share: float
) -> tuple[_Counts, _Counts, float]:
    """Run the schedule of a small job whose requests decode `steps_share` of the steps: its counts,
    what each more prompt adds, and decode steps of its mean request.
    """
    _, outputs = lengths.rows(rows)
    steps = np.maximum(np.round((outputs - 1) * steps_share), np.minimum(outputs - 1, 1))
    alike = JobRows([1] * rows, [1 + int(each) for each in steps])
    schedule = JobSchedule(alike, slots, sizes, stages)
    prefills = bursts = decode_steps = 0
    begins: tuple[int, _Counts] | None = None
    ends: tuple[int, _Counts] = 0, (0.0, 0.0, 0.0)
    in_burst = False
    for phase in schedule.phases():
        if phase == "decode":
            decode_steps += 1
            in_burst &= schedule.policy.refills
            continue
        prefills += 1
        bursts += not in_burst
        in_burst = True
        ends = schedule.prefilled, (prefills, bursts, decode_steps)
        if begins is None and schedule.prefilled >= STEADY_FROM * slots:
            begins = ends
    each_prompt: _Counts = (0.0, 0.0, 0.0)
    if begins is not None and ends[0] > begins[0]:
        share = 1 / (ends[0] - begins[0])
        first, middle, last = (
            share * end - share * begin for end, begin in zip(ends[1], begins[1], strict=True)
        )
        each_prompt = first, middle, last
    return (prefills, bursts, decode_steps), each_prompt, float(steps.mean())


@lru_cache(maxsize=1024)
def _slowest_share(job: Job, requests: int, prefills: int) -> float:
    prompts = job.lengths.prompt_tokens
    if len(set(prompts)) == 1:
        return 1.0
    computed = np.maximum(1, np.array(prompts) - job.heads.shared_tokens)
    drawn = np.random.default_rng(0).choice(
        computed, (DRAWN_BURSTS, min(prefills, MOST_DRAWN), requests)
    )
    return float(drawn.sum(axis=2).max(axis=1).mean() / drawn.sum(axis=2).mean())


LATENCY_SHARE = 0.1
"""Share of the turns for which the way through all stages counts where they only prefill."""


@dataclass(frozen=True)
class SteadyCycle:
    """A cycle of `prefill_requests` (B_E) newcomers and `decode_steps` (N_D) steps of every group
    (B_m; None: by size), again until all `prompts` are done. Stages that only prefill have no
    steps; those that only decode have newcomers that others prefill: `prefills` is false.
    """

    prefill_requests: int
    decode_steps: int
    in_flight: int
    prompts: int
    mean_steps: float
    groups: int | None = None
    prefills: bool = True

    def passes(self, sizes: MicroBatches) -> JobPasses:
        """The passes of the job; groups take turns, so that the pipeline fills once a cycle."""
        cycles = self.prompts / self.prefill_requests
        groups = self.groups or ceil(self.in_flight / sizes.decode)
        turns = min(groups, self.prefill_requests) if self.decode_steps else 1
        newcomers = self.prefill_requests / turns
        prefills = turns * ceil(newcomers / sizes.prefill)
        steps = self.decode_steps * groups
        decoding = self.prefill_requests * self.mean_steps / steps if steps else 0.0
        return JobPasses(
            prefills=cycles * prefills * self.prefills,
            bursts=cycles * self.prefills * (1.0 if self.decode_steps else LATENCY_SHARE),
            decode_steps=cycles * steps,
            rounds=cycles * self.decode_steps,
            prefill_requests=self.prefill_requests / prefills,
            decode_requests=max(1.0, decoding),
        )

"""Discrete-event simulation of a whole job, whose requests take the slots of those that ended, and
the figures of a batch or job that a plan states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.latency_model import near_length
from planner.costs.pass_times import PassSeconds, PassTable
from planner.optimiser.problem import FloatArray
from planner.schedule.job_passes import job_passes
from planner.schedule.orca import MixedPass
from planner.schedule.passes import JobRows, Pass, Sizes, TurnSizes
from planner.schedule.s3 import most_waiting
from planner.simulation.simulation import (
    PipelineClock,
    Simulated,
    job_schedule,
    simulate_assignment,
    sizes_of_policy,
)
from planner.workload import Job, MicroBatches

MOST_PASSES = 20_000
"""Longer jobs are simulated in part: these take about 0.2 s."""

LEAST_FILLS, MOST_FILLS, FEW_ROWS = 3, 12, 512
"""How often slots are filled in the part of a job that is simulated; few slots more often."""


@dataclass(frozen=True, eq=False)
class SimulatedJob:
    """A job in seconds from the first prefill; stages compute `prefill_busy_s` and `decode_busy_s`
    [N], and each simulated prompt had ended at `ended_s`, ascending.
    """

    prompts: int
    generated_tokens: float
    seconds: float
    prefill_busy_s: FloatArray
    decode_busy_s: FloatArray
    ended_s: FloatArray

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def busy_share(self) -> tuple[float, ...]:
        shares = (self.prefill_busy_s + self.decode_busy_s) / self.seconds
        return tuple(float(share) for share in shares)


@dataclass(frozen=True, eq=False)
class _Mark:
    """What was done when a prefill was back: passes, requests prefilled, tokens decoded."""

    passes: int
    prefilled: int
    decoded: int
    seconds: float


class _Busy:
    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._taken: list[PassSeconds] = []
        self._decodes: list[bool] = []

    def add(self, taken: PassSeconds, is_decode: bool) -> None:
        self._taken.append(taken)
        self._decodes.append(is_decode)

    def seconds(self, passes: int) -> FloatArray:
        """Seconds of each stage in prefill and in decode [2, N] after so many passes."""
        known = {id(taken): taken for taken in self._taken[:passes]}
        pairs = zip(map(id, self._taken[:passes]), self._decodes[:passes], strict=True)
        counts, none = Counter(pairs), (0.0,) * self._stages
        if not counts:
            return np.zeros((2, self._stages))
        both = [(known[key], is_decode) for key, is_decode in counts]
        compute_s = np.array([taken.compute for taken, _ in both])
        decode_s = np.array(
            [taken.decode or (taken.compute if is_decode else none) for taken, is_decode in both]
        )
        times = np.array([*counts.values()])[:, np.newaxis, np.newaxis]
        # one after the other, so that the last digit is that of the order of passes
        sums = np.add.accumulate(times * np.stack([compute_s - decode_s, decode_s], axis=1))
        return np.asarray(sums[-1])


def forecast_job(
    job: Job,
    slots: int,
    sizes: Sizes,
    stages: int,
    seconds_of: Callable[[Pass], PassSeconds],
    most_passes: int = MOST_PASSES,
) -> SimulatedJob:
    """Run `job`, or about `most_passes` of it: the rest goes on as between the first fill of the
    slots and the last prefill (with a pool: between the first pool's end and the last full pool),
    per decoded token.
    """
    if isinstance(sizes, TurnSizes):
        slots = sizes.schedule.decode_requests
    slots, waiting = min(slots, job.prompts), most_waiting(sizes, stages)
    passes = _passes(job, slots, sizes, stages)
    count = _simulated_rows(job, slots, passes, most_passes, waiting)
    rows = JobRows.of(job, count)
    part, marks, busy = simulate_job(rows, slots, sizes, stages, seconds_of)
    if count == job.prompts:  # the sample may not come a whole number of times
        return replace(part, generated_tokens=job.output_tokens)
    ends = marks[_nearest(marks, count - waiting)] if waiting else marks[-1]
    # whole fills, in which equal rows come again
    fills = max(1, (count - 2 * waiting) // slots - 2)
    begins = marks[_nearest(marks, ends.prefilled - fills * slots)]
    prompts, decoded = ends.prefilled - begins.prefilled, ends.decoded - begins.decoded
    prefill_s, decode_s = busy.seconds(ends.passes) - busy.seconds(begins.passes)
    more = (job.lengths.mean_output - 1) * prompts / decoded if decoded else 1.0
    busiest = (prefill_s + decode_s).argmax()
    slower = (prefill_s + more * decode_s)[busiest] / (prefill_s + decode_s)[busiest]
    times = (job.prompts - count) / prompts
    return replace(
        part,
        prompts=job.prompts,
        generated_tokens=job.output_tokens,
        seconds=part.seconds + times * slower * (ends.seconds - begins.seconds),
        prefill_busy_s=part.prefill_busy_s + times * prefill_s,
        decode_busy_s=part.decode_busy_s + times * more * decode_s,
    )


def simulate_job_assignment(
    table: PassTable, sizes: MicroBatches, most_passes: int = MOST_PASSES
) -> SimulatedJob:
    """Forecast the job of `table.costs`, or its batch as one, with as many requests in flight as
    its workload has; lengths within one percent share a time.
    """
    costs, job = table.costs, table.costs.job
    if job is None:
        batch = costs.workload
        job = Job.of_batch(batch)
    decode: dict[tuple[int, int], PassSeconds] = {}

    def seconds(each: Pass) -> PassSeconds:
        if each.phase == "prefill" or isinstance(each, MixedPass):
            return table.seconds(each)
        key = each.requests, near_length(each.context_length)
        if key not in decode:
            decode[key] = table.seconds(replace(each, context_length=key[1]))
        return decode[key]

    slots, policy = costs.workload.global_batch, sizes_of_policy(costs, sizes)
    return forecast_job(job, slots, policy, table.stages, seconds, most_passes)


def simulate_job(
    rows: JobRows,
    slots: int,
    sizes: Sizes,
    stages: int,
    seconds_of: Callable[[Pass], PassSeconds],
) -> tuple[SimulatedJob, list[_Mark], _Busy]:
    """Run all requests of `rows`; `seconds_of` a pass gives `stages` entries each."""
    schedule = job_schedule(rows, slots, sizes, stages)
    clock, busy = PipelineClock(stages), _Busy(stages)
    marks: list[_Mark] = []
    passes = decoded = 0
    for passes, each in enumerate(schedule.passes(), start=1):
        taken = seconds_of(each)
        clock.finish(each, taken)
        is_decode = each.phase == "decode"
        busy.add(taken, is_decode)
        decoded += each.decodes if isinstance(each, MixedPass) else is_decode * each.requests
        if not is_decode:
            marks.append(_Mark(passes, schedule.prefilled, decoded, clock.returned_s[-1]))
    returned_s = np.array(clock.returned_s)
    prefill_busy_s, decode_busy_s = busy.seconds(passes)
    simulated = SimulatedJob(
        prompts=len(rows.prompts),
        generated_tokens=float(sum(rows.outputs)),
        seconds=float(returned_s[-1]),
        prefill_busy_s=prefill_busy_s,
        decode_busy_s=decode_busy_s,
        ended_s=returned_s[list(schedule.ended_after)],
    )
    return simulated, marks, busy


def _passes(job: Job, slots: int, sizes: Sizes, stages: int) -> float:
    if isinstance(sizes, MicroBatches):
        counted = job_passes(job, slots, sizes, stages)
        return counted.prefills + counted.decode_steps
    if isinstance(sizes, TurnSizes):
        schedule = sizes.schedule
        turns = job.prompts / schedule.prefill_requests * schedule.decode_micro_batches
        prefills = max(turns, job.prompts / sizes.prefill_micro_batch)
        return prefills + turns * schedule.decode_steps
    iterations, chunk = job.lengths.mean_output, sizes.prefill_chunk_tokens
    if chunk:
        iterations += job.computed_tokens / chunk
    return job.prompts * iterations / max(1.0, min(sizes.max_batch_size, slots / stages))


def _simulated_rows(job: Job, slots: int, passes: float, most_passes: int, waiting: int) -> int:
    """How many prompts to simulate: all, or fewer by whole fills. With `waiting` in a pool two
    pools more, and more rows, as their order says less: on 4 stages 512 rows erred by 4 % (root
    mean square), 1,024 by 2 %.
    """
    most = most_passes * job.prompts / passes
    least, enough = LEAST_FILLS * slots, max(MOST_FILLS * slots, FEW_ROWS)
    if waiting:
        least, enough = max(least, FEW_ROWS), 2 * enough
    wanted = 2 * waiting + max(least, min(most, enough))
    left_out = max(0, job.prompts - round(wanted)) // slots
    return job.prompts - left_out * slots


def _nearest(marks: Sequence[_Mark], prefilled: int) -> int:
    """The number of the mark nearest to so many prefilled requests, but the last one."""
    above = bisect_left(marks, prefilled, key=lambda each: each.prefilled)
    near = [i for i in (above - 1, above) if 0 <= i < len(marks) - 1]
    return min(near, key=lambda i: abs(marks[i].prefilled - prefilled))


@dataclass(frozen=True, eq=False)
class Forecast:
    """Figures of a batch or job. `prefill_s`: until every request of a batch has its first token;
    of a job the busiest stage's share of prefill. `busy_s` [N] in prefill and in decode;
    `busy_share` [N] is of `seconds`.
    """

    seconds: float
    prefill_s: float
    tokens_per_s: float
    busy_s: tuple[FloatArray, FloatArray]
    busy_share: tuple[float, ...]

    @classmethod
    def of_batch(cls, batch: Simulated) -> Forecast:
        busy_s = batch.busy_s("prefill"), batch.busy_s("decode")
        rate = batch.tokens_per_s
        return cls(batch.latency_s, batch.prefill_s, rate, busy_s, batch.busy_share)

    @classmethod
    def of_job(cls, job: SimulatedJob) -> Forecast:
        prefill_s, decode_s = job.prefill_busy_s, job.decode_busy_s
        busiest = int((prefill_s + decode_s).argmax())
        share = float(prefill_s[busiest] / (prefill_s[busiest] + decode_s[busiest]))
        rate, both = job.tokens_per_s, (prefill_s, decode_s)
        return cls(job.seconds, share * job.seconds, rate, both, job.busy_share)


def forecast_assignment(
    table: PassTable, sizes: MicroBatches, most_passes: int = MOST_PASSES
) -> Forecast:
    """Simulate the batch or the job of `table.costs` as the two functions named here do."""
    if table.costs.job is None and table.costs.options.policy == "static":
        return Forecast.of_batch(simulate_assignment(table, sizes))
    return Forecast.of_job(simulate_job_assignment(table, sizes, most_passes))

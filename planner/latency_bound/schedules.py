"""The controls of each kind of schedule, and which requests end when under it (ExeGPT section 6).

Each control is turned so that a larger value raises both throughput and latency; measured on the
timelines of this package (`benchmarks.reproduction.latency_bounds`) they do so. What is not
monotone is no control:

- `rra`: newcomers of a group in a turn (B_E / B_m), how often they come (1 / N_D: fewer decode
  steps between turns), and the number of groups (B_m). Of the whole B_E, more groups would make
  both better as far as there are stages for them, and both worse beyond.
- `waa-c`, `waa-m`: the requests that decode (B_D). A turn has as many newcomers as end in a round
  (B_E = B_D / S_D as published, but at least one, which then come less often). Of B_m groups the
  number that makes a round shortest is best for both.
- The prefill micro-batch is the one whose turn is shortest, for the same reason.
- Tensor-parallel groups are devices to the planner, which tries sets of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.costs.model import CostModel
from planner.latency_bound.placed_layers import LEAST_STEPS, WaaSides, mean_context
from planner.latency_bound.timeline import (
    Performance,
    StageSeconds,
    decodes_s,
    mean_prefill_s,
    rounds_s,
)
from planner.lengths import (
    MOST_SAMPLED,
    FloatArray,
    IntArray,
    LengthDistribution,
    Lengths,
    RequestLengths,
)
from planner.options import QUANTILE
from planner.schedule.job_passes import SteadyCycle
from planner.schedule.turns import Turns
from planner.scheduling import SCHEDULE_KINDS, RequestSchedule, ScheduleKind
from planner.workload import MOST_PREFILL_TOKENS, MOST_PROMPTS, Job
from quant.common.errors import SpecError


def rra_schedule(
    lengths: RequestLengths,
    prefill_requests: int,
    decode_steps: int,
    groups: int,
    prefill_micro_batch: int,
) -> RequestSchedule:
    return RequestSchedule(
        "rra",
        prefill_requests,
        max(1, round(prefill_requests * completions(lengths.outputs, decode_steps).phases)),
        decode_steps,
        groups,
        prefill_micro_batch,
        lengths.prompts.mean,
    )


def waa_schedule(
    kind: ScheduleKind,
    lengths: RequestLengths,
    decode_requests: int,
    groups: int,
    prefill_micro_batch: int,
) -> RequestSchedule:
    newcomers = max(1, round(decode_requests / max(1.0, lengths.outputs.mean - 1)))
    return RequestSchedule(
        kind,
        newcomers,
        decode_requests,
        1,
        min(groups, decode_requests),
        min(prefill_micro_batch, newcomers),
        lengths.prompts.mean,
    )


def most_in_group(schedule: RequestSchedule) -> int:
    if not schedule.divides:
        return Turns.of(schedule).most
    return -(-schedule.most_in_flight // schedule.decode_micro_batches)


def cycle_of(schedule: RequestSchedule, job: Job, free: bool = False) -> SteadyCycle:
    """The cycle of a schedule; `free`: its groups may be others, as many as stages."""
    return SteadyCycle(
        schedule.prefill_requests,
        schedule.decode_steps,
        schedule.most_in_flight,
        job.prompts,
        job.lengths.mean_output - 1,
        None if free else schedule.decode_micro_batches,
        prefills=not schedule.divides,
    )


def prefill_sizes(newcomers: int, mean_prompt: float) -> tuple[int, ...]:
    """Prefill micro-batches that may be best: even shares in about powers of two, within
    `MOST_PREFILL_TOKENS`.
    """
    most = min(newcomers, max(1, int(MOST_PREFILL_TOKENS // mean_prompt)))
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    return tuple(sorted({-(-newcomers // -(-newcomers // size)) for size in sizes}))


@dataclass(frozen=True)
class Completions:
    """Requests with these `outputs` under phases of `decode_steps` steps (N_D): how many make which
    step. Prefill gives the first token, so S is one less than the tokens of an answer.
    """

    outputs: LengthDistribution
    decode_steps: int

    @cached_property
    def phases(self) -> float:
        """Mean number of phases for which a request stays, E[ceil(S / N_D)]. So B_E newcomers of a
        turn make B_D = B_E E[ceil(S / N_D)] requests after it.

        It is B_E / sum P_D(U) where P_D(U|S) is weighed by the lengths of those in flight, among
        which long ones are more frequent as they stay longer (Little's law). The paper leaves open
        of which requests; by the lengths of those that come there would never be more, and fewer
        wherever some stay for more phases than others.
        """
        steps = np.array(self.outputs.lengths, dtype=np.float64) - 1
        stays = np.maximum(1.0, np.ceil(steps / self.decode_steps))
        return float(np.dot(stays, self.outputs.probabilities))

    @cached_property
    def decoding(self) -> FloatArray:
        """Requests that make step 1, 2, … of a phase for each that comes, [decode_steps]."""
        return np.asarray(self._by_phase(self._reached).sum(axis=0))

    @cached_property
    def answer_tokens(self) -> FloatArray:
        """Mean tokens of the answers before step 1, 2, … of a phase [decode_steps]; 0 where none
        are.
        """
        earlier = np.arange(len(self._reached))
        sums, decoding = self._by_phase(self._reached * earlier).sum(axis=0), self.decoding
        means = np.divide(sums, decoding, out=np.zeros_like(sums), where=decoding > 0)
        return np.asarray(means)

    @cached_property
    def _reached(self) -> FloatArray:
        """The chance [steps] that a request makes its decode step 1, 2, …; one entry at least."""
        steps = max(1, self.outputs.longest - 1)
        ended = np.zeros(steps + 1)
        ended[np.array(self.outputs.lengths) - 1] = self.outputs.probabilities
        return np.asarray(np.clip(1 - np.cumsum(ended)[:steps], 0.0, None))

    def _by_phase(self, by_step: FloatArray) -> FloatArray:
        """Values of steps 1, 2, … laid out as [phases, decode_steps]."""
        phases = max(1, -(-len(by_step) // self.decode_steps))
        padded = np.zeros(phases * self.decode_steps)
        padded[: len(by_step)] = by_step
        return padded.reshape(phases, self.decode_steps)


completions = lru_cache(maxsize=4096)(Completions)


BOUND = "max_request_latency_s"
"""The option's name."""


@dataclass(frozen=True)
class BoundRequest:
    """The most throughput is wanted for these `lengths`, a share `quantile` of which takes at most
    `bound_s` (None: any) from when prefill begins to the last token. `prompts`: of the job, if any.
    `margin`: the share of the bound that plans leave for what times do not tell. SpecError for
    numbers out of range and unknown kinds.
    """

    lengths: RequestLengths
    bound_s: float | None
    quantile: float = QUANTILE
    kinds: tuple[ScheduleKind, ...] = SCHEDULE_KINDS
    prompts: int | None = None
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.bound_s is not None and not 0 < self.bound_s < math.inf:
            raise SpecError(f"{BOUND} is {self.bound_s}; give more than 0 seconds")
        if not 0 < self.quantile < 1:
            raise SpecError(f"quantile is {self.quantile}; it must be a share between 0 and 1")
        unknown = [kind for kind in self.kinds if kind not in SCHEDULE_KINDS]
        if unknown or not self.kinds:
            raise SpecError(
                f"schedule is {', '.join(unknown) or 'none'}; give one or more of "
                f"{', '.join(SCHEDULE_KINDS)}"
            )
        if self.prompts is not None and not 1 <= self.prompts <= MOST_PROMPTS:
            raise SpecError(f"prompts is {self.prompts}; it must be 1 to {MOST_PROMPTS}")

    @property
    def limit_s(self) -> float:
        """The latency that plans may have."""
        return math.inf if self.bound_s is None else self.aimed_s(self.bound_s)

    def aimed_s(self, bound_s: float) -> float:
        """What of a bound is left beside the margin."""
        return (1 - self.margin) * bound_s


CPU_MARGIN = 0.1
"""By how much runs of CPU stages exceeded the 99th percentile that was planned, at most (docs of
measurements, latency_bounds.md): the driver and Ray have no core of their own there."""

MOST_MARGIN = 0.5


def margin_of(costs: CostModel) -> float:
    """The share of a bound that is left where CPUs run stages: what `CPU_MARGIN` says, and by how
    much the measured times of passes vary.
    """
    cpus = [each for each in costs.cluster.devices if each.accelerator.is_cpu and not each.emulated]
    if not cpus:
        return 0.0
    latency, bits = costs.latency, costs.options.bits
    spread = max(latency.spread(each, costs.dtype(each), bits) for each in cpus)
    return min(MOST_MARGIN, CPU_MARGIN + spread)


PROMPTS = 10_000
"""Prompts of the job where nobody says how many come: enough for a steady state."""


def job_of(request: BoundRequest) -> Job:
    lengths = request.lengths
    return Job(request.prompts or PROMPTS, sampled_lengths(lengths), heads=lengths.heads)


def sampled_lengths(lengths: RequestLengths) -> Lengths:
    """A sample of evenly spaced lengths of prompts, with outputs in random order."""
    prompts = _evenly_spaced(lengths.prompts)
    outputs = np.random.default_rng(0).permutation(_evenly_spaced(lengths.outputs))
    rows = zip(prompts.tolist(), outputs.tolist(), strict=True)
    longest = lengths.outputs.longest
    return Lengths.of(rows, "distribution of lengths", output_limit=longest)


def _evenly_spaced(lengths: LengthDistribution) -> IntArray:
    shares = (np.arange(MOST_SAMPLED) + 0.5) / MOST_SAMPLED
    places = np.searchsorted(np.cumsum(lengths.probabilities), shares)
    chosen = np.array(lengths.lengths)[np.minimum(places, len(lengths.lengths) - 1)]
    chosen[-1] = lengths.longest
    return np.asarray(chosen, dtype=np.int64)


TIMED_STEPS = 8
"""Decode steps of a phase that are timed; between them time is linear."""


def estimated_rra(
    times: StageSeconds, lengths: RequestLengths, schedule: RequestSchedule, quantile: float
) -> Performance:
    groups, size = schedule.decode_micro_batches, schedule.prefill_micro_batch
    newcomers = schedule.prefill_requests / groups
    prefill_s = turn_s(times, lengths.prompts, newcomers, groups, size)
    steps_s = _steps_s(times, lengths, schedule)
    cycle_s = prefill_s + float(steps_s.sum())
    rate = schedule.prefill_requests / cycle_s
    steps = lengths.outputs.quantile(quantile) - 1
    if not steps:
        return Performance(rate, prefill_s)
    phases, last = divmod(steps - 1, schedule.decode_steps)
    return Performance(rate, prefill_s + phases * cycle_s + float(steps_s[: last + 1].sum()))


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
    sent_s = sides.handover.sent_s(size, lengths.prompts.mean * size)
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
    times: StageSeconds, lengths: RequestLengths, newcomers: int, groups: int
) -> tuple[int, ...]:
    """Prefill micro-batches for groups of so many newcomers, that of the shortest turn first."""
    prompts = lengths.prompts
    sizes = prefill_sizes(newcomers, lengths.computed_tokens)
    return tuple(sorted(sizes, key=lambda size: turn_s(times, prompts, newcomers, groups, size)))


def shortest_round(times: StageSeconds, requests: int, context: float, most_groups: int) -> int:
    """The number of groups, at most so many, of which a decode step of all takes the least time."""
    groups = np.arange(1.0, most_groups + 1)
    sizes = np.maximum(1.0, requests / groups)
    compute_s, hop_s = decodes_s(times, sizes, np.full(most_groups, context))
    return 1 + int(rounds_s(compute_s, hop_s, groups).argmin())


def round_s(times: StageSeconds, groups: int, requests: float, context: float) -> float:
    requests = max(1.0, requests)
    compute_s, hop_s = times.decode_s(requests, context), times.decode_hop_s(requests)
    busiest_s = max(compute_s.max(), hop_s.max())
    return float(max(groups * busiest_s, compute_s.sum() + hop_s.sum()))


def _steps_s(times: StageSeconds, lengths: RequestLengths, schedule: RequestSchedule) -> FloatArray:
    """Seconds of each decode step of a phase, by all groups [decode_steps]."""
    count, groups = schedule.decode_steps, schedule.decode_micro_batches
    newcomers = schedule.prefill_requests / groups
    timed, alive, before = _timed_steps(lengths.outputs, count)
    contexts = lengths.prompts.mean + 1 + before
    compute_s, hop_s = decodes_s(times, np.maximum(1.0, newcomers * alive), contexts)
    seconds = rounds_s(compute_s, hop_s, groups)
    return np.asarray(np.interp(np.arange(count), timed, seconds))


@lru_cache(maxsize=4096)
def _timed_steps(
    outputs: LengthDistribution, decode_steps: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps that are timed [n], the requests that make them for each that comes, and tokens
    generated before.
    """
    found = completions(outputs, decode_steps)
    places = np.linspace(0, decode_steps - 1, min(decode_steps, TIMED_STEPS))
    timed = np.unique(places.round().astype(np.int64))
    decoding, before = found.decoding[timed], found.answer_tokens[timed]
    return timed.astype(np.float64), decoding, before


def _prefill_s(times: StageSeconds, prompts: LengthDistribution, size: float) -> FloatArray:
    """Seconds of a prefill micro-batch and its transfer on each stage [N]."""
    return mean_prefill_s(times, size, prompts) + times.prefill_hop_s(size, prompts.mean)

"""What is asked: lengths, a bound on latency, kinds of schedule; and the job that stands for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.lengths import MOST_SAMPLED, IntArray, LengthDistribution, Lengths, RequestLengths
from planner.scheduling import SCHEDULE_KINDS, ScheduleKind
from planner.workload import MOST_PROMPTS, Job
from quant.common.errors import SpecError

QUANTILE = 0.99

BOUND = "max_request_latency_s"
"""The option's name."""


@dataclass(frozen=True)
class BoundRequest:
    """The most throughput is wanted for these `lengths`, a share `quantile` of which takes at most
    `bound_s` (None: any) from when prefill begins to the last token. `prompts`: of the job, if any.
    SpecError for numbers out of range and unknown kinds.
    """

    lengths: RequestLengths
    bound_s: float | None
    quantile: float = QUANTILE
    kinds: tuple[ScheduleKind, ...] = SCHEDULE_KINDS
    prompts: int | None = None

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
        return math.inf if self.bound_s is None else self.bound_s


PROMPTS = 10_000
"""Prompts of the job where nobody says how many come: enough for a steady state."""


def job_of(request: BoundRequest) -> Job:
    return Job(request.prompts or PROMPTS, sampled_lengths(request.lengths))


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

"""The job that stands for requests of given lengths, by which stages and memory are planned."""

from __future__ import annotations

import numpy as np

from planner.latency_bound.request import BoundRequest
from planner.length_distribution import LengthDistribution, RequestLengths
from planner.lengths import MOST_SAMPLED, IntArray, Lengths
from planner.schedule.steady_cycle import SteadyCycle
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule
from planner.workload import Job

PROMPTS = 10_000
"""Prompts of the job where nobody says how many come: enough for a steady state."""


def job_of(request: BoundRequest) -> Job:
    """The job of the request's prompts."""
    return Job(request.prompts or PROMPTS, sampled_lengths(request.lengths))


def sampled_lengths(lengths: RequestLengths) -> Lengths:
    """A sample of evenly spaced lengths of prompts, with outputs in random order."""
    prompts = _evenly_spaced(lengths.prompts)
    outputs = np.random.default_rng(0).permutation(_evenly_spaced(lengths.outputs))
    rows = zip(prompts.tolist(), outputs.tolist(), strict=True)
    longest = lengths.outputs.longest
    return Lengths.of(rows, "distribution of lengths", output_limit=longest)


def _evenly_spaced(lengths: LengthDistribution) -> IntArray:
    """So many lengths of equal shares, the longest among them."""
    shares = (np.arange(MOST_SAMPLED) + 0.5) / MOST_SAMPLED
    places = np.searchsorted(np.cumsum(lengths.probabilities), shares)
    chosen = np.array(lengths.lengths)[np.minimum(places, len(lengths.lengths) - 1)]
    chosen[-1] = lengths.longest
    return np.asarray(chosen, dtype=np.int64)


def most_in_group(schedule: RequestSchedule) -> int:
    """The most requests that make a decode step together."""
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

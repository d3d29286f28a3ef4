"""Lengths of requests whose latency is bounded: of a file, of an input, normal, or all alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmpq.workload.input_job import InputJob
from llmpq.workload.measured_lengths import COLUMNS, read_measured
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.latency_bound.schedules import BoundRequest
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.request import with_heads
from planner.workload import MAX_TOKENS, Job, Workload
from quant.common.errors import SpecError


@dataclass(frozen=True)
class Requests:
    """Requests whose latency is bounded: their `lengths`, and `prompts`, how many there are (None
    where that is not known).

    `default_new_tokens`: the most that those without a limit of their own may generate; None for
    the longest output. `notes`: sentences on rows that are not planned for.
    """

    lengths: RequestLengths
    prompts: int | None = None
    default_new_tokens: int | None = None
    notes: tuple[str, ...] = ()


def request_lengths(path: str | Path, new_tokens: int | None = None) -> RequestLengths:
    """The distributions of all rows of the CSV `path`, with the columns
    `prompt_tokens,output_tokens`; outputs are cut to `new_tokens`, where these are given.

    Raises SpecError or `InputError` naming file and line.
    """
    found = read_measured(path).requests
    if found is None:
        raise SpecError(
            f"lengths {path}: results do not have their prompts' lengths; give the input too "
            f"(--input, or job_of_input), or a CSV with the columns {','.join(COLUMNS)}"
        )
    if new_tokens is None:
        return found
    return replace(found, outputs=found.outputs.at_most(new_tokens))


def normal_lengths(name: str, given: Sequence[float]) -> LengthDistribution:
    """The normal distribution of mean, standard deviation and longest length in tokens, cut to 1 to
    the longest; `name` is that of the option in messages.
    """
    mean, deviation, longest = given
    if not (1 <= longest <= MAX_TOKENS and longest == int(longest)):
        raise SpecError(
            f"{name}: the longest is {longest:g}; give a whole number of 1 to {MAX_TOKENS} tokens"
        )
    try:
        return LengthDistribution.truncated_normal(mean, deviation, int(longest))
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error


def same_lengths(tokens: int) -> LengthDistribution:
    return LengthDistribution((tokens,), (1.0,))


def bound_request(requests: Requests, options: PlanOptions) -> BoundRequest:
    bound_s = options.request_bound_s
    return BoundRequest(
        with_heads(requests.lengths, options),
        None if bound_s == math.inf else bound_s,
        options.quantile,
        options.schedule_kinds,
        requests.prompts,
    )


def requests_of(workload: Workload | Job | InputJob | Requests | RequestLengths) -> Requests:
    """The requests of what a plan is asked for; SpecError for a batch, which is done as a whole."""
    if isinstance(workload, Requests):
        return workload
    if isinstance(workload, RequestLengths):
        return Requests(workload)
    if isinstance(workload, Workload):
        raise SpecError(
            "max_request_latency_s is about requests that come and go, not about a batch; give "
            "request_lengths(FILE), job_of_input(FILE, MODEL) or a Job"
        )
    if isinstance(workload, Job):
        sample = workload.lengths
        lengths = RequestLengths.of_pairs(sample.prompt_tokens, sample.output_tokens)
        lengths = replace(lengths, heads=workload.heads)
        return Requests(lengths, workload.prompts, workload.default_new_tokens)
    lengths = workload.requests or requests_of(workload.ordinary).lengths
    limit = workload.ordinary.default_new_tokens
    return Requests(lengths, workload.prompts, limit, replace(workload, long_rows=None).notes)


def bounded_plan(
    cluster: ClusterSpec, shape: ModelShape, source: str, requests: Requests, options: PlanOptions
) -> PlanSpec:
    """The plan under the options' bound on latency; raises what `find_bounded_plan` raises."""
    found = find_bounded_plan(cluster, shape, source, bound_request(requests, options), options)
    forecast, job = found.latency, found.job
    if forecast is not None:
        forecast = replace(forecast, prompts=requests.prompts)
    if job is not None:
        job = replace(job, job=replace(job.job, default_new_tokens=requests.default_new_tokens))
    return replace(found, latency=forecast, job=job)

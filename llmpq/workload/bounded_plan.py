"""The plan for requests whose latency is bounded."""

from __future__ import annotations

from dataclasses import replace

from llmpq.workload.request_lengths import Requests, bound_request
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_plan import find_bounded_plan
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec


def bounded_plan(
    cluster: ClusterSpec, shape: ModelShape, source: str, requests: Requests, options: PlanOptions
) -> PlanSpec:
    """The plan under the bound on the latency of requests that the options have; raises what
    `find_bounded_plan` raises.
    """
    found = find_bounded_plan(cluster, shape, source, bound_request(requests, options), options)
    forecast, job = found.latency, found.job
    if forecast is not None:
        forecast = replace(forecast, prompts=requests.prompts)
    if job is not None:
        job = replace(job, job=replace(job.job, default_new_tokens=requests.default_new_tokens))
    return replace(found, latency=forecast, job=job)

"""The parts of a plan about a whole job, and about a bound on latency: what is expected of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.length_distribution import RequestLengths
from planner.optimiser.problem import JobPasses
from planner.plan.field_types import STRICT, Positive, Seconds
from planner.workload import Job


@dataclass(frozen=True, config=STRICT)
class JobForecast:
    """The forecast of a job under a plan whose `workload.global_batch` prompts are in flight.

    `seconds` from the first prefill to the last token, without loading, by simulation; `passes` as
    the objective counts them. `price_per_hour` is that of all nodes of the cluster, in the
    currency of the cluster file.
    """

    job: Job
    seconds: Positive
    tokens_per_s: Positive
    passes: JobPasses
    price_per_hour: Annotated[float, Field(ge=0)] | None = None

    @property
    def cost(self) -> float | None:
        """What the job costs; None where a node has no price."""
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600

    @property
    def cost_per_million_tokens(self) -> float | None:
        """What a million generated tokens cost; None where a node has no price."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 / self.tokens_per_s * 1e6


@dataclass(frozen=True, config=STRICT)
class LatencyForecast:
    """The forecast of requests of these `lengths` under a plan's schedule, by simulation.

    A request's latency is from when its prefill begins to its last token: a share `quantile` of
    all has at most `latency_s`. `bound_s` is what was asked for (None: nothing).
    `admission_wait_s`: the longest that a request waits for the next turn, which is not counted,
    where fewer come than `requests_per_s`. `prompts`: how many requests there are in all, where
    that is known.
    """

    lengths: RequestLengths
    quantile: Annotated[float, Field(gt=0, lt=1)]
    bound_s: Positive | None
    requests_per_s: Positive
    tokens_per_s: Positive
    latency_s: Positive
    mean_latency_s: Positive
    admission_wait_s: Seconds
    evaluations: Annotated[int, Field(ge=0)]
    prompts: Annotated[int, Field(ge=1)] | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds that all requests take, where their number is known: at the steady rate, and a
        mean latency in which requests in flight become as many, and fewer at the end.
        """
        if self.prompts is None:
            return None
        return self.prompts / self.requests_per_s + self.mean_latency_s

"""The part of a plan about a bound on latency: the lengths it is for, and what it should reach."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.length_distribution import RequestLengths
from planner.plan.field_types import STRICT, Positive, Seconds


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

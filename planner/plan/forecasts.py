"""The parts of a plan about a whole job, and about a bound on latency: what is expected of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.lengths import RequestLengths
from planner.optimiser.problem import JobPasses
from planner.plan.field_types import STRICT, Positive, Seconds
from planner.workload import Job


@dataclass(frozen=True, config=STRICT)
class JobForecast:
    """The forecast of a job with `workload.global_batch` prompts in flight: simulated `seconds`
    from the first prefill to the last token, without loading. Prices are in the cluster file's
    currency.
    """

    job: Job
    seconds: Positive
    tokens_per_s: Positive
    passes: JobPasses
    price_per_hour: Annotated[float, Field(ge=0)] | None = None

    @property
    def cost(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600

    @property
    def cost_per_million_tokens(self) -> float | None:
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 / self.tokens_per_s * 1e6


@dataclass(frozen=True, config=STRICT)
class LatencyForecast:
    """Simulated requests of `lengths`: from its prefill's start a share `quantile` ends within
    `latency_s`; `bound_s` was asked for. `admission_wait_s`, the longest wait for the next turn
    where fewer than `requests_per_s` come, is not counted.
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
        if self.prompts is None:
            return None
        return self.prompts / self.requests_per_s + self.mean_latency_s


@dataclass(frozen=True, config=STRICT)
class Prediction:
    """The simulated time of a global batch or a job. `prefill_s`: until every request has its first
    token (of a job, by work of the busiest stage); `busy_share` is what each stage computes of the
    latency; `objective_latency_s`, the closed form, ranked plans.
    """

    latency_s: Positive
    prefill_s: Seconds
    decode_s: Seconds
    tokens_per_s: Positive
    prefill_bottleneck: int
    decode_bottleneck: int
    busy_share: tuple[float, ...]
    objective_latency_s: float


@dataclass(frozen=True, config=STRICT)
class PerplexityForecast:
    """The expected `increase` over `baseline` (16 bit), with its interval; `max_omega` is what
    `max_increase` came to.
    """

    baseline: float
    increase: float
    low: float
    high: float
    points: int
    max_increase: float | None = None
    max_omega: float | None = None

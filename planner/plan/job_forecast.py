"""The part of a plan about a whole job: its prompts, and how long they take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.optimiser.problem import JobPasses
from planner.plan.field_types import STRICT, Positive
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

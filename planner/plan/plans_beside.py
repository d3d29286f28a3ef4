"""The figures of other plans for the same cluster and prompts, kept beside a plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.options import Quality
from planner.plan.field_types import STRICT, Positive
from planner.workload import MAX_REQUESTS

Count = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class PlanChoice:
    """A plan: prompts in flight, generated tokens per second of the batch or the whole job, summed
    sensitivity, and the mean bitwidth of a layer.
    """

    in_flight: Count
    tokens_per_s: Positive
    sensitivity: Amount
    mean_bits: Positive

    def beats(self, other: PlanChoice) -> bool:
        """Whether it has both more tokens per second and less sensitivity."""
        return self.tokens_per_s > other.tokens_per_s and self.sensitivity < other.sensitivity


@dataclass(frozen=True, config=STRICT)
class QualityChoice:
    """The best plan of one quality; `theta` gives it again."""

    quality: Quality
    theta: Amount
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class MoreDevices:
    """The best plan with `count` more devices like those called `accelerator` on `node`."""

    accelerator: str
    node: str
    count: Count
    plan: PlanChoice


@dataclass(frozen=True, config=STRICT)
class PlansBeside:
    """Plans beside the one that was taken.

    `quality`: which of `qualities` the plan is; None where theta, a bound or a method decided.
    `full_precision`: the fastest plan with all layers in the most bits allowed, None where that
    does not fit or was not looked for. `curve`: the best plans found for other numbers in flight,
    at the plan's theta, ascending. `more_devices`: what one more device of each kind would bring.
    `beaten_by`: a plan with fewer prompts in flight that has more tokens per second and less
    sensitivity, where a batch was given for which there is one.
    """

    quality: Quality | None = None
    qualities: tuple[QualityChoice, ...] = ()
    full_precision: PlanChoice | None = None
    curve: tuple[PlanChoice, ...] = ()
    more_devices: tuple[MoreDevices, ...] = ()
    beaten_by: PlanChoice | None = None

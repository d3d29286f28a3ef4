"""Latency of requests in words: what was asked, how a plan keeps it, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from actors.stage_figures import LatencyCounts
from llmpq.report.formatting import (
    SPACE,
    count,
    duration,
    per_second,
    plural,
    seconds,
    whole_percent,
)

if TYPE_CHECKING:
    from planner.latency_bound.schedules import BoundRequest
    from planner.plan.parts import LatencyForecast
    from planner.plan.spec import PlanSpec
    from planner.scheduling import ScheduleKind

DIVIDED_BY: dict[ScheduleKind, str] = {"waa-c": "computing", "waa-m": "memory"}
"""By what the devices are divided among stages that prefill and stages that decode."""


def requests_per_second(value: float) -> str:
    return f"{per_second(value)} requests/s"


def latency_answers(plan: PlanSpec, forecast: LatencyForecast) -> list[tuple[str, str]]:
    """How many requests a second, how soon they are done, by which schedule, which wait is not
    counted, how long all of them take, and for which lengths.
    """
    found = (
        ("How many?", f"throughput: {rates(forecast)}"),
        ("How soon?", f"latency: {latencies(forecast)}"),
        ("How?", schedule_sentence(plan)),
        ("What is not counted?", f"latency is {waiting(forecast)}"),
        ("How long for all?", _all(forecast)),
        ("For which lengths?", f"lengths: {lengths(forecast)}"),
    )
    return [(question, text) for question, text in found if text]


def _all(forecast: LatencyForecast) -> str:
    if forecast.prompts is None or forecast.seconds is None:
        return ""
    took = duration(forecast.seconds)
    return f"{plural(forecast.prompts, 'request')}: about {took} in all (without loading)"


def what_is_bounded(asked: LatencyForecast | BoundRequest) -> str:
    return f"{whole_percent(asked.quantile)} of requests within {bound(asked.bound_s)}"


LEAST_ERROR = 5e-4
"""Share of a latency from which on its error is told."""


def bound(bound_s: float | None) -> str:
    return "any time" if bound_s is None else f"{bound_s:.6g}{SPACE}s"


def rates(forecast: LatencyForecast) -> str:
    tokens = per_second(forecast.tokens_per_s)
    return f"{requests_per_second(forecast.requests_per_s)}, {tokens} tokens/s"


def latencies(forecast: LatencyForecast) -> str:
    """The latency at the quantile with its error, against the bound, and the mean."""
    error = forecast.latency_error_s / forecast.latency_s
    within = seconds(forecast.latency_s)
    if error >= LEAST_ERROR:
        within += f" ± {100 * error:.1f}{SPACE}%"
    return (
        f"{whole_percent(forecast.quantile)} of requests within {within} "
        f"({allowed(forecast)}), {seconds(forecast.mean_latency_s)} in the mean"
    )


def allowed(forecast: LatencyForecast) -> str:
    """The bound, and the share of it that is left where CPUs run stages."""
    left = ""
    if forecast.bound_s is not None and forecast.margin:
        left = f", of which {whole_percent(forecast.margin)} are left as CPUs' times vary"
    return f"{bound(forecast.bound_s)} allowed{left}"


def waiting(forecast: LatencyForecast) -> str:
    """The wait that the latency does not count."""
    return (
        "counted from when the prefill of a request begins; before it, a request waits at most "
        f"{seconds(forecast.admission_wait_s)} for its turn where no more come than are served"
    )


def lengths(asked: LatencyForecast | BoundRequest) -> str:
    prompts, outputs = asked.lengths.prompts, asked.lengths.outputs
    at = outputs.quantile(asked.quantile)
    order = ""
    if asked.lengths.are_correlated:
        order = (
            f"; they are correlated ({asked.lengths.correlation:.2f}), so that a run takes rows "
            "in random order"
        )
    return (
        f"prompts of {prompts.mean:,.0f} tokens in the mean, {count(prompts.longest)} at most; "
        f"answers of {outputs.mean:,.0f} in the mean, {whole_percent(asked.quantile)} of at most "
        f"{count(at)}, {count(outputs.longest)} at most{order}"
    )


def kind_name(kind: ScheduleKind) -> str:
    return kind.upper()


def schedule_sentence(plan: PlanSpec) -> str:
    """What the stages do in turns, or beside each other; nothing of a plan without a schedule."""
    schedule = plan.policy.schedule
    if schedule is None:
        return ""
    newcomers = plural(schedule.prefill_requests, "request")
    if schedule.prefill_micro_batch < schedule.prefill_requests:
        newcomers += f" in micro-batches of up to {count(schedule.prefill_micro_batch)}"
    decoding = plural(schedule.decode_requests, "request")
    groups = ""
    if schedule.decode_micro_batches > 1:
        groups = f" in {count(schedule.decode_micro_batches)} groups"
    name = kind_name(schedule.kind)
    if plan.prefill_plan is None:
        steps = plural(schedule.decode_steps, "decode step")
        return (
            f"{name}: every stage prefills and decodes in turns. A turn prefills {newcomers}, then "
            f"about {decoding} make {steps}{groups}, and the next turn comes"
        )
    prefilling = plural(len(plan.prefill_plan.stages), "stage prefills", "stages prefill")
    others = plural(len(plan.stages), "other one decodes", "others decode")
    return (
        f"{name}: {prefilling} turns of {newcomers}, one after another, and {others} about "
        f"{decoding}{groups} all the time; devices are divided by {DIVIDED_BY[schedule.kind]}"
    )


MEDIAN = 0.5


@dataclass(frozen=True)
class PlannedLatency:
    """The latency that a share `quantile` of all requests should have at most, as forecast, and the
    bound that was asked for, if any; both in seconds of the run.
    """

    quantile: float
    planned_s: float
    bound_s: float | None


@dataclass(frozen=True)
class LatencyFigures(PlannedLatency):
    """Latencies of so many requests, from the submission of their prefill to their last token: the
    median, and what a share `quantile` has at most, beside what was planned of it.
    """

    requests: int
    median_s: float
    quantile_s: float

    @classmethod
    def of(cls, counts: Sequence[LatencyCounts], planned: PlannedLatency) -> LatencyFigures | None:
        """The figures of all these counts together; None where no request has ended."""
        together = reduce(LatencyCounts.plus, counts)
        median_s, quantile_s = map(together.quantile_s, (MEDIAN, planned.quantile))
        if median_s is None or quantile_s is None:
            return None
        return cls(
            **vars(planned), requests=together.requests, median_s=median_s, quantile_s=quantile_s
        )

    def __str__(self) -> str:
        beside = f"planned {seconds(self.planned_s)}"
        if self.bound_s is not None:
            kept = "within" if self.quantile_s <= self.bound_s else "above"
            beside += f", {kept} the bound of {seconds(self.bound_s)}"
        return (
            f"{whole_percent(self.quantile)} within {seconds(self.quantile_s)} ({beside}), "
            f"half within {seconds(self.median_s)}"
        )

"""What a run will do and what it has done, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.stage_figures import StageStats
from llmpq.report.latency import LatencyFigures, PlannedLatency
from planner.plan.simulate import time_scale
from planner.plan.spec import PlanSpec


@dataclass(frozen=True)
class RunSize:
    """Size of a run, where it is known: rows, the tokens they may generate at most, and the
    rows that an earlier run had done (`resumed`), which `prompts` does not count.
    """

    prompts: int
    max_tokens: int
    resumed: int = 0


@dataclass(frozen=True, repr=False)
class RunSummary:
    """Figures of a run that has ended: `load_s` seconds until its stages were loaded, `seconds` of
    generating. `resumed` as in `RunSize`. `stages` has the figures of the stages in pipeline order,
    and where several plans were run, those of `plan`, which generated most, in its `stages_s`.
    `planned_tokens_per_s`: by the plans that were run; None where they are not followed.
    `latency`: that of the requests beside what was planned, where a bound was.
    """

    prompts: int
    errors: int
    generated_tokens: int
    load_s: float
    seconds: float
    stages: tuple[StageStats, ...]
    resumed: int = 0
    plan: PlanSpec | None = None
    stages_s: float | None = None
    planned_tokens_per_s: float | None = None
    latency: LatencyFigures | None = None

    def __str__(self) -> str:
        """The figures in one line."""
        return (
            f"{self.prompts} rows, {self.errors} with errors: {self.generated_tokens} tokens in "
            f"{self.seconds:.1f} s ({self.tokens_per_s:.1f} tokens/s) after {self.load_s:.1f} s of "
            "loading"
        )

    def __repr__(self) -> str:
        return f"<RunSummary: {self}>"

    def _repr_html_(self) -> str:
        from llmpq.report.notebook import summary_html

        return summary_html(self.figures, self._busy)

    @property
    def figures(self) -> dict[str, str]:
        """The figures by name, as they are shown."""
        planned = self.planned_tokens_per_s
        return {
            "rows": str(self.prompts),
            "with errors": str(self.errors),
            "tokens": str(self.generated_tokens),
            "seconds": f"{self.seconds:.2f}",
            "loading": f"{self.load_s:.2f}",
            "tokens/s": f"{self.tokens_per_s:.1f}",
            **({} if planned is None else {"planned": f"{planned:.1f}"}),
            **({} if self.latency is None else {"latency": str(self.latency)}),
        }

    @property
    def _busy(self) -> dict[str, str]:
        """The share of the time in which each device computed."""
        seconds = self.seconds if self.stages_s is None else self.stages_s
        if self.plan is None or not seconds:
            return {}
        names = [f"stage {each.index} ({each.device})" for each in self.plan.stages]
        shares = [f"{stats.busy_s / seconds:.0%}" for stats in self.stages]
        return dict(zip(names, shares, strict=False))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, without loading."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RunPart:
    """The part of a run that one plan made: its stages' figures, its seconds and its tokens."""

    plan: PlanSpec
    stages: tuple[StageStats, ...]
    seconds: float
    tokens: int


def planned_s(plan: PlanSpec, prompts: int, max_tokens: int) -> float | None:
    """Seconds that `plan` forecasts for so many of its prompts, or for a batch's tokens; None where
    it is not followed.
    """
    rate = planned_tokens_per_s(plan)
    if rate is None:
        return None
    if plan.job is None:
        return max_tokens / rate
    return plan.job.seconds * plan.job.tokens_per_s / rate * prompts / plan.job.job.prompts


def planned_rate(parts: Sequence[RunPart]) -> float | None:
    """Planned tokens per second of all `parts`, by the seconds of each plan for its tokens."""
    planned = [(part.tokens, planned_tokens_per_s(part.plan)) for part in parts if part.tokens]
    seconds = sum(tokens / rate for tokens, rate in planned if rate is not None)
    if not seconds or any(rate is None for _, rate in planned):
        return None
    return sum(tokens for tokens, _ in planned) / seconds


def planned_tokens_per_s(plan: PlanSpec) -> float | None:
    """Generated tokens per second of `plan` when it is run; None where some emulated device has no
    time scale and so follows no plan.
    """
    if any(stage.emulated for stage in plan.stages) and not plan.time_scale:
        return None
    planned = plan.predicted.tokens_per_s
    if plan.job is not None:
        planned = plan.job.tokens_per_s
    elif plan.latency is not None:
        planned = plan.latency.tokens_per_s
    return planned / time_scale(plan)


def settled_tokens_per_s(plan: PlanSpec) -> float | None:
    """Planned tokens per second while all slots are in use, where the plan says that, else of the
    whole job; None as `planned_tokens_per_s`.
    """
    rate = planned_tokens_per_s(plan)
    if rate is None or plan.latency is None:
        return rate
    return plan.latency.tokens_per_s / time_scale(plan)


def planned_latency(plan: PlanSpec) -> PlannedLatency | None:
    """The latency that `plan` forecasts when it is run, and its bound; None where it has none, or
    is not followed.
    """
    if plan.latency is None or planned_tokens_per_s(plan) is None:
        return None
    scale, bound_s = time_scale(plan), plan.latency.bound_s
    return PlannedLatency(
        plan.latency.quantile,
        scale * plan.latency.latency_s,
        None if bound_s is None else scale * bound_s,
    )

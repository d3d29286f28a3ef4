"""The figures of a run beside those of its plan: of all of it, and of stages that are slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.stage_figures import PhaseWork, StageStats
from llmpq.report.latency import LatencyFigures, PlannedLatency
from planner.plan.simulate import planned_s, time_scale
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import PHASES, Phase


@dataclass(frozen=True, repr=False)
class RunSummary:
    """Figures of a run that has ended: `load_s` seconds until its stages were loaded, `seconds` of
    generating. `prompts` does not count `resumed` ones, which an earlier run had done. `stages` has
    the figures of the stages in pipeline order, and where several plans were run, those of `plan`,
    which generated most, in its `stages_s`.
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


def forecast_s(plan: PlanSpec, prompts: int, max_tokens: int) -> float | None:
    """Seconds that `plan` forecasts for prompts, or a batch's tokens; None where not followed."""
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
    """Planned tokens/s; None where an emulated device has no time scale, so follows no plan."""
    if any(stage.emulated for stage in plan.stages) and not plan.time_scale:
        return None
    forecast = plan.job or plan.latency or plan.predicted
    return forecast.tokens_per_s / time_scale(plan)


def settled_tokens_per_s(plan: PlanSpec) -> float | None:
    """Planned tokens/s with all slots in use, if told, else of the job; None as above."""
    rate = planned_tokens_per_s(plan)
    if rate is None or plan.latency is None:
        return rate
    return plan.latency.tokens_per_s / time_scale(plan)


def planned_latency(plan: PlanSpec) -> PlannedLatency | None:
    """The latency that `plan` forecasts for its run, and its bound; None where it has none."""
    if plan.latency is None or planned_tokens_per_s(plan) is None:
        return None
    scale, bound_s = time_scale(plan), plan.latency.bound_s
    return PlannedLatency(
        plan.latency.quantile,
        scale * plan.latency.latency_s,
        None if bound_s is None else scale * bound_s,
    )


EXCESS = 0.2
"""The share by which a stage that counts as slow takes longer than planned, at least."""

LEAST_MICRO_BATCHES, LEAST_BUSY_S = 20, 5.0
"""Full micro-batches that show it, and the seconds that they take together, at least."""

LEAST_EXCESS_S = 1e-3
"""A micro-batch that is less slower is so by what models leave out: a hop, and some Python."""


@dataclass(frozen=True)
class SlowStage:
    """A stage with the seconds of a full micro-batch of one phase, by the plan and by the clock."""

    stage: int
    device: str
    phase: Phase
    planned_s: float
    measured_s: float
    micro_batches: int
    is_estimate: bool

    def __str__(self) -> str:
        """The problem, the numbers and the remedy in one sentence."""
        remedy = (
            "these times were estimated from a datasheet: measure the device with llmpq profile"
            if self.is_estimate
            else "another load, or a device unlike the profiled one: look, measure it again with "
            "llmpq profile"
        )
        return (
            f"stage {self.stage} on {self.device} is {self.measured_s / self.planned_s - 1:.0%} "
            f"slower than planned: a {self.phase} micro-batch takes {self.measured_s * 1e3:.4g} "
            f"ms, planned are {self.planned_s * 1e3:.4g} ms (mean of {self.micro_batches} full "
            f"ones); {remedy} and plan again with --profiles"
        )


def slow_stages(
    plan: PlanSpec, stats: Sequence[StageStats], excess: float = EXCESS
) -> tuple[SlowStage, ...]:
    """The slow stages for which there is enough evidence, in stage order; prefill before decode.

    Emulated devices without a time scale follow no plan and are never slow. Only full micro-batches
    count: a plan does not say what smaller ones should take.
    """
    found = [
        _slow(plan, stage, figures, phase, excess)
        for stage, figures in zip(plan.stages, stats, strict=False)
        for phase in PHASES
    ]
    return tuple(each for each in found if each is not None)


def work_of(stats: StageStats, phase: Phase) -> PhaseWork:
    return stats.prefill if phase == "prefill" else stats.decode


def mean_s(work: PhaseWork) -> tuple[float | None, bool]:
    """Mean seconds of a micro-batch, by the full ones if any (then True); None without any."""
    if work.full_sizes:
        return work.full_s / work.full_sizes, True
    return (work.seconds / work.micro_batches if work.micro_batches else None), False


def _slow(
    plan: PlanSpec, stage: StagePlan, figures: StageStats, phase: Phase, excess: float
) -> SlowStage | None:
    work, planned = work_of(figures, phase), planned_s(plan, stage, phase)
    measured, is_full = mean_s(work)
    if not planned or measured is None or not is_full:
        return None
    if work.full_micro_batches < LEAST_MICRO_BATCHES or work.full_s < LEAST_BUSY_S:
        return None
    if measured <= planned * (1 + excess) or measured - planned < LEAST_EXCESS_S:
        return None
    is_estimate = stage.provenance.removeprefix(stage.accelerator).strip().startswith("estimated")
    return SlowStage(
        stage.index, stage.label, phase, planned, measured, work.full_micro_batches, is_estimate
    )

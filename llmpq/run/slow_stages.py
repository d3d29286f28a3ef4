"""Finding stages that are slower than their plan says, by the times that they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.stage_figures import PhaseWork, StageStats
from planner.plan.simulate import planned_s
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import PHASES, Phase


@dataclass(frozen=True)
class Evidence:
    """The evidence by which a stage counts as slow: it takes the share `excess` longer than
    planned, over at least so many full micro-batches that take at least `busy_s` seconds together.

    A micro-batch that is less than `least_s` slower is so by what models leave out: a hop, and
    some Python.
    """

    excess: float = 0.2
    micro_batches: int = 20
    busy_s: float = 5.0
    least_s: float = 1e-3


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
    plan: PlanSpec, stats: Sequence[StageStats], evidence: Evidence | None = None
) -> tuple[SlowStage, ...]:
    """The slow stages for which there is enough evidence, in stage order; prefill before decode.

    Emulated devices without a time scale follow no plan and are never slow. Only full micro-batches
    count: a plan does not say what smaller ones should take.
    """
    evidence = evidence or Evidence()
    found = [
        _slow(plan, stage, phase, work_of(figures, phase), evidence)
        for stage, figures in zip(plan.stages, stats, strict=False)
        for phase in PHASES
    ]
    return tuple(each for each in found if each is not None)


def work_of(stats: StageStats, phase: Phase) -> PhaseWork:
    return stats.prefill if phase == "prefill" else stats.decode


def measured_s(work: PhaseWork) -> float | None:
    """Mean seconds of a planned micro-batch, by those that were full; None where none was."""
    return work.full_s / work.full_sizes if work.full_sizes else None


def _slow(
    plan: PlanSpec, stage: StagePlan, phase: Phase, work: PhaseWork, evidence: Evidence
) -> SlowStage | None:
    planned, measured = planned_s(plan, stage, phase), measured_s(work)
    if not planned or measured is None:
        return None
    if work.full_micro_batches < evidence.micro_batches or work.full_s < evidence.busy_s:
        return None
    if measured <= planned * (1 + evidence.excess) or measured - planned < evidence.least_s:
        return None
    is_estimate = stage.provenance.removeprefix(stage.accelerator).strip().startswith("estimated")
    return SlowStage(
        stage.index, stage.label, phase, planned, measured, work.full_micro_batches, is_estimate
    )

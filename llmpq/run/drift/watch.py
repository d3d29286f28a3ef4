"""Comparing a run with its plan: tokens per second, lengths, and the speeds of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.stage_figures import StageStats
from llmpq.run.drift.lengths import LengthRecord, OutputLengths
from llmpq.run.drift.rate import LEAST_ROWS, RateWindow, planned_tokens_per_s
from llmpq.run.monitoring.meter import RunState
from llmpq.run.monitoring.slow_stages import Evidence, SlowStage, slow_stages
from planner.plan.spec import PlanSpec

RATE, PROMPTS, OUTPUTS = "tokens/s", "tokens a prompt", "tokens an output"


@dataclass(frozen=True)
class Deviation:
    """A figure of the run that differs from the plan's."""

    what: str
    measured: float
    planned: float

    def __str__(self) -> str:
        """The figure, measured and planned, and the share between them."""
        share = self.measured / self.planned - 1
        return f"{self.measured:.4g} {self.what}, planned {self.planned:.4g} ({share:+.0%})"


@dataclass(frozen=True)
class Drift:
    """What differs between a run and its plan: figures and stages.

    `tokens_per_s` and `outputs` are measured; None where too little is known. Another plan can only
    be made from other lengths or speeds (`is_explained`).
    """

    deviations: tuple[Deviation, ...]
    slow: tuple[SlowStage, ...]
    tokens_per_s: float | None
    outputs: OutputLengths | None

    @property
    def is_explained(self) -> bool:
        """Whether lengths or speeds of stages differ, not only the tokens per second."""
        return bool(self.slow) or any(each.what != RATE for each in self.deviations)

    def without(self, said: Collection[str]) -> Drift:
        """The drift without the figures that were `said` before; slow stages are said elsewhere."""
        left = tuple(each for each in self.deviations if each.what not in said)
        return replace(self, deviations=left)

    def text(self, is_replanning: bool, may_replan: bool = True) -> str:
        """One line: the numbers, and what can be done; the plan of a fleet is not made again while
        it runs.
        """
        numbers = "; ".join(map(str, self.deviations))
        if not self.is_explained:
            remedy = (
                "lengths and stages are as planned: look whether prompts come, results are taken "
                "and hops go as fast as the stages need it"
            )
        elif is_replanning:
            remedy = "another plan is looked for"
        else:
            other = "run with --replan auto, or " if may_replan else ""
            remedy = f"{other}plan again with --lengths and --profiles of what was measured"
        return f"the run does not follow its plan: {numbers}; {remedy}"


class DriftWatch:
    """Compares a run of `plan` with it; a figure drifts where it is the share `drift` away.

    Only tokens per second that are lower than planned count: a plan's are of a whole job, whose
    ends are slower. Lengths count once a turn of all slots has ended.
    """

    def __init__(self, plan: PlanSpec, record: LengthRecord, drift: float) -> None:
        self._plan, self._record, self._drift = plan, record, drift
        self._planned_rate = planned_tokens_per_s(plan)
        self._window = RateWindow(plan.workload.global_batch)
        self._ended_before = record.ended
        self._stages: Sequence[StageStats] = ()

    def see(self, state: RunState, in_flight: int) -> None:
        """Take in the state of the run, and the number of requests in flight."""
        self._stages = state.stages
        self._window.add(state.elapsed_s, state.tokens, state.prompts, in_flight)

    def disturb(self) -> None:
        """Leave out what was measured so far, as a fault took time."""
        self._window.clear()

    def found(self, running: Sequence[int]) -> Drift | None:
        """What drifts, where rows in flight have `running` tokens; None where nothing does."""
        rate = self._window.tokens_per_s
        outputs = self._record.outputs(running) if self._is_enough() else None
        deviations = tuple(
            each
            for each in (*self._rate(rate), *self._lengths(outputs))
            if abs(each.measured / each.planned - 1) > self._drift
        )
        slow = slow_stages(self._plan, self._stages, Evidence(excess=self._drift))
        if not deviations and not slow:
            return None
        return Drift(deviations, slow, rate, outputs)

    def _is_enough(self) -> bool:
        ended = self._record.ended - self._ended_before
        return ended >= max(LEAST_ROWS, self._plan.workload.global_batch)

    def _rate(self, rate: float | None) -> Sequence[Deviation]:
        if rate is None or self._planned_rate is None or rate >= self._planned_rate:
            return ()
        return (Deviation(RATE, rate, self._planned_rate),)

    def _lengths(self, outputs: OutputLengths | None) -> Sequence[Deviation]:
        job = self._plan.job
        if job is None or outputs is None:
            return ()
        planned = job.job.lengths
        return (
            Deviation(PROMPTS, self._record.mean_prompt, planned.mean_prompt),
            Deviation(OUTPUTS, outputs.mean, planned.mean_output),
        )

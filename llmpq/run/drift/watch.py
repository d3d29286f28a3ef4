"""Comparing a run with its plan: tokens per second, lengths, and the speeds of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.latency_counts import NO_LATENCIES, LatencyCounts
from actors.stage_figures import StageStats
from llmpq.run.drift.lengths import MOST_KEPT, LengthRecord, OutputLengths
from llmpq.run.drift.rate import LEAST_ROWS, RateWindow, planned_latency, settled_tokens_per_s
from llmpq.run.monitoring.meter import RunState
from llmpq.run.monitoring.slow_stages import Evidence, SlowStage, slow_stages
from planner.length_distribution import LengthDistribution, RequestLengths
from planner.plan.spec import PlanSpec

LATEST_ROWS = 256
"""Rows whose lengths are compared with those of a schedule, which soon follows others: where they
deviate by as much as their mean, the mean of so many has an error of 6 %, far below a drift."""

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
        return bool(self.slow) or self.has_other_lengths

    @property
    def has_other_lengths(self) -> bool:
        """Whether lengths differ."""
        return any(each.what in (PROMPTS, OUTPUTS) for each in self.deviations)

    def without(self, said: Collection[str]) -> Drift:
        """The drift without the figures that were `said` before; slow stages are said elsewhere."""
        left = tuple(each for each in self.deviations if each.what not in said)
        return replace(self, deviations=left)

    def text(self, looks_for: str, may_replan: bool = True) -> str:
        """One line: the numbers, and what can be done, or what the run `looks_for` by itself (""
        for nothing); the plan of a fleet is not made again while it runs.
        """
        numbers = "; ".join(map(str, self.deviations))
        if not self.is_explained:
            remedy = (
                "lengths and stages are as planned: look whether prompts come, results are taken "
                "and hops go as fast as the stages need it"
            )
        elif looks_for:
            remedy = f"another {looks_for} is looked for"
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
        self._planned_rate = settled_tokens_per_s(plan)
        self._window = RateWindow(plan.workload.global_batch)
        self._latest = MOST_KEPT
        if plan.latency is not None:
            self._latest = max(LATEST_ROWS, 2 * plan.workload.global_batch)
        self._latencies_before: LatencyCounts | None = None
        self._latencies = NO_LATENCIES
        self._ended_before = record.ended
        self._stages: Sequence[StageStats] = ()

    def see(self, state: RunState, in_flight: int) -> None:
        """Take in the state of the run, and the number of requests in flight."""
        self._stages = state.stages
        if self._latencies_before is None:
            self._latencies_before = state.latencies
        self._latencies = state.latencies.since(self._latencies_before)
        self._window.add(state.elapsed_s, state.tokens, state.prompts, in_flight)

    def disturb(self) -> None:
        """Leave out what was measured so far, as a fault took time."""
        self._window.clear()

    def found(self, running: Sequence[int]) -> Drift | None:
        """What drifts, where rows in flight have `running` tokens; None where nothing does."""
        rate = self._window.tokens_per_s
        outputs = self._record.outputs(running, self._latest) if self._is_enough() else None
        deviations = (
            *(
                each
                for each in (*self._rate(rate), *self._lengths(outputs))
                if abs(each.measured / each.planned - 1) > self._drift
            ),
            *self._latency(),
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
        planned = self._planned_means()
        prompts = self._record.prompts(self._latest)
        if planned is None or outputs is None or not prompts:
            return ()
        return (
            Deviation(PROMPTS, sum(prompts) / len(prompts), planned[0]),
            Deviation(OUTPUTS, outputs.mean, planned[1]),
        )

    def _planned_means(self) -> tuple[float, float] | None:
        """Mean tokens of a prompt and of an output."""
        if self._plan.latency is not None:
            lengths = self._plan.latency.lengths
            return lengths.prompts.mean, lengths.outputs.mean
        if self._plan.job is not None:
            planned = self._plan.job.job.lengths
            return planned.mean_prompt, planned.mean_output
        return None

    def _latency(self) -> Sequence[Deviation]:
        """The latency that was bounded, where it is above the bound."""
        planned = planned_latency(self._plan)
        if planned is None or planned.bound_s is None:
            return ()
        if self._latencies.requests * (1 - planned.quantile) < 1:
            return ()
        measured_s = self._latencies.quantile_s(planned.quantile) or 0.0
        what = f"s for {100 * planned.quantile:g} % of requests"
        return (Deviation(what, measured_s, planned.bound_s),) * (measured_s > planned.bound_s)

    def measured(self, outputs: OutputLengths) -> RequestLengths:
        """The lengths of the latest rows."""
        prompts = LengthDistribution.of_sample(self._record.prompts(self._latest))
        return RequestLengths(prompts, outputs.distribution)

"""What a run will do and what it has done, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import StageStats
from llmpq.run.drift.rate import planned_tokens_per_s
from planner.plan.spec import PlanSpec


@dataclass(frozen=True)
class RunSize:
    """Size of a run, where it is known: rows, the tokens they may generate at most, and the
    rows that an earlier run had done (`resumed`), which `prompts` does not count.
    """

    prompts: int
    max_tokens: int
    resumed: int = 0


@dataclass(frozen=True)
class RunSummary:
    """Figures of a run that has ended: `load_s` seconds until its stages were loaded, `seconds` of
    generating. `resumed` as in `RunSize`. `stages` has the figures of the stages in pipeline order,
    and where several plans were run, those of `plan`, which generated most, in its `stages_s`.
    `planned_tokens_per_s`: by the plans that were run; None where they are not followed.
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

"""How long a run still takes, by the work that its stages have done and what is left of it.

Tokens per second alone foretell badly: while the first prompts are read hardly any token comes, and
afterwards nobody reads prompts. So each phase counts by the seconds that the slowest stage takes
for one prompt or one token of it, over the share of time for which that stage was busy. Pipelines
that share the prompts are as fast as each of them alone, added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.stage_figures import StageStats, joined_queue, pipelines_of

LEAST_S = 5.0
"""Seconds of generating before which nothing is foretold: the first micro-batches take longer."""

LEAST_STEPS = 8
"""Decode steps of each request in flight that are measured first, unless a whole fill has ended."""

EARLY_PROMPTS = 16  # must have ended before their lengths say anything of the others
_LEAST_WORK_S = 1e-9
ENDS_EARLY = 0.95  # share of their limits below which answers end by themselves


@dataclass(frozen=True)
class TimeLeft:
    """The estimated seconds until the run ends, and what they are estimated `by`.

    Estimates by tokens take every request to reach its limit; those by prompts take the others
    to be as long as the ones that have ended.
    """

    seconds: float
    by: Literal["tokens", "prompts"]


@dataclass(frozen=True)
class Counts:
    """Counts of a run: `prompts` and `max_tokens` in all, `tokens` generated so far, and how many
    requests `ended`, with `ended_tokens` of the `ended_limits` that they were allowed. `read` is
    how many prompts a stage has read in micro-batches of their own.
    """

    prompts: int
    max_tokens: int
    tokens: int
    ended: int
    ended_tokens: int
    ended_limits: int
    read: int

    def unread(self, firsts: Sequence[StageStats]) -> int:
        """Prompts still to be read, by the first stages: of those in slots some may be."""
        queue = joined_queue(firsts)
        in_flight = 0 if queue is None else queue.in_slots
        outside = max(0, self.prompts - self.ended - in_flight)
        is_mixed = any(first.mixed.micro_batches for first in firsts)
        if is_mixed or not any(first.prefill.requests for first in firsts):
            return outside
        return max(outside, self.prompts - self.read)  # after a fault some are read once more

    def left(self, slots: int) -> tuple[int, Literal["tokens", "prompts"]]:
        """New tokens still to come, and what that is known by.

        The first answers to end are the short ones, so that those of a whole fill of `slots` count.
        """
        ends_early = self.ended_tokens < ENDS_EARLY * self.ended_limits
        if self.ended >= max(EARLY_PROMPTS, slots) and ends_early:
            expected = self.prompts * self.ended_tokens / self.ended
            return max(self.prompts - self.ended, round(expected) - self.tokens), "prompts"
        unused = self.ended_limits - self.ended_tokens  # tokens that will not come
        return max(0, self.max_tokens - unused - self.tokens), "tokens"


def time_left(
    counts: Counts, stages: Sequence[StageStats], busy_share: Sequence[float], elapsed_s: float
) -> TimeLeft | None:
    """The time until the run ends; None as long as too little is measured.

    `busy_share` [stages] is that of the whole `elapsed_s` since the stages were loaded.
    """
    if not stages or elapsed_s < LEAST_S:
        return None
    pipelines, queue = pipelines_of(stages), joined_queue(stages)
    in_flight, slots = (0, 0) if queue is None else (queue.in_slots, queue.slots)
    steps_of = [min(_tokens(stage) for stage in each) for each in pipelines]
    steps = sum(steps_of)
    is_filled = counts.ended >= max(1, slots)
    if not is_filled and (steps < 1 or steps < LEAST_STEPS * in_flight):
        return None
    tokens, by = counts.left(slots)
    prompts = counts.unread([each[0] for each in pipelines])
    shares, all_per_s = iter(busy_share), 0.0
    for own_steps, pipeline in zip(steps_of, pipelines, strict=True):
        work = zip(pipeline, shares, strict=False)
        alone = [_work_s(stage, prompts, tokens) / share for stage, share in work if share > 0]
        if alone and (own_steps or not steps):  # else it has only begun, or is lost
            all_per_s += 1 / max(*alone, _LEAST_WORK_S)  # of all that is left, alone
    return TimeLeft(1 / all_per_s, by) if all_per_s else None


def _work_s(stage: StageStats, prompts: int, tokens: int) -> float:
    """Seconds that `stage` computes for `prompts` that are not read yet, and `tokens` in all."""
    reading, steps = stage.prefill, _tokens(stage)
    read_s = reading.seconds / reading.requests if reading.requests else 0.0
    if reading.requests:
        tokens = max(0, tokens - prompts)  # the first token of a prompt comes with reading it
    step_s = (stage.decode.seconds + stage.mixed.seconds) / steps if steps else 0.0
    return prompts * read_s + tokens * step_s


def _tokens(stage: StageStats) -> int:
    """Tokens of steps, and of micro-batches that hold both steps and prompts."""
    return stage.decode.sampled + stage.mixed.sampled

"""How long a run still takes, by the work that its stages have done and what is left of it.

Tokens per second alone foretell badly: while the first prompts are read hardly any token comes, and
afterwards nobody reads prompts. So each phase counts by the seconds that the slowest stage takes
for one prompt or one token of it, over the share of time for which that stage was busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.stage_figures import StageStats

LEAST_S = 5.0
"""Seconds of generating before which nothing is foretold: the first micro-batches take longer."""

LEAST_STEPS = 8
"""Decode steps of each request in flight that are measured first, unless a whole fill has ended."""

EARLY_PROMPTS = 16  # must have ended before their lengths say anything of the others
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

    def unread(self, first: StageStats) -> int:
        """Prompts still to be read: of those in slots some may be."""
        in_flight = 0 if first.queue is None else first.queue.in_slots
        outside = max(0, self.prompts - self.ended - in_flight)
        if first.mixed.micro_batches or not first.prefill.requests:
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
    queue = stages[0].queue
    in_flight, slots = (0, 0) if queue is None else (queue.in_slots, queue.slots)
    steps = min(_tokens(stage) for stage in stages)
    is_filled = counts.ended >= max(1, slots)
    if not is_filled and (steps < 1 or steps < LEAST_STEPS * in_flight):
        return None
    tokens, by = counts.left(slots)
    prompts = counts.unread(stages[0])
    each = [
        _work_s(stage, prompts, tokens) / share
        for stage, share in zip(stages, busy_share, strict=False)
        if share > 0
    ]
    return TimeLeft(max(each), by) if each else None


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

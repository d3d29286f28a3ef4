"""What schedules `waa-c` and `waa-m` decide: how many prompts begin where stages only prefill, in
which micro-batches, and who joins which group where stages only decode (ExeGPT, sections 4.1, 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from planner.scheduling import RequestSchedule

WAITING = 1
"""Micro-batches under way beside one on every stage, so that none waits for the next, and turns of
newcomers beside those. More would only wait longer, which counts as latency."""

SHORT_PROMPTS = 2
"""The requests of a micro-batch, or a turn, that short prompts may make of one that was planned: as
many tokens keep a stage as busy, and each request takes a slot and a row of logits."""


def newcomers(
    schedule: RequestSchedule, stages: int, present: int, prefilling: int
) -> tuple[int, int]:
    """How many requests should begin with the next turn, and how many may; `present` are those that
    decode or will.
    """
    if present > schedule.decode_requests:
        return 0, 0
    room = min(
        schedule.most_in_flight - present,
        (stages + WAITING) * schedule.prefill_requests - prefilling,
        SHORT_PROMPTS * schedule.prefill_requests,
    )
    return min(schedule.prefill_requests, room), room


@dataclass(frozen=True)
class PrefillSizes:
    """Limits of a micro-batch of prompts: one of up to `even_tokens` is as even as others of
    `usual_tokens`.
    """

    most: int
    usual_tokens: float
    even_tokens: float
    most_tokens: float

    @classmethod
    def of(cls, schedule: RequestSchedule, longest: int, size: int | None = None) -> PrefillSizes:
        """The sizes for prompts of at most `longest` tokens, in micro-batches of `size` mean ones
        (None: as planned).
        """
        size = size or schedule.prefill_micro_batch
        usual = size * schedule.mean_prompt_tokens
        even = (1 + schedule.tolerance) * usual
        return cls(SHORT_PROMPTS * size, usual, even, size * longest)

    def next_part(self, waiting: Iterable[int], waiting_tokens: float) -> int:
        """How many of those `waiting` make the next micro-batch: about the usual tokens, or halves
        of less than two.
        """
        wanted = self.usual_tokens
        if waiting_tokens < 2 * wanted:
            is_even = waiting_tokens <= self.even_tokens
            wanted = waiting_tokens if is_even else waiting_tokens / 2
        taken = total = 0
        for text in islice(waiting, self.most):
            if taken and (total + text / 2 > wanted or total + text > self.most_tokens):
                break
            total += text
            taken += 1
        return taken


def joining(size: int, requests: int, groups: int, most_in_group: int) -> int:
    """How many join a group of `size`, so that all `requests` are in even groups, as far as these
    may be so large.
    """
    return max(0, min(-(-requests // groups), most_in_group) - size)

"""How stages that only prefill divide prompts that wait into micro-batches (ExeGPT section 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from planner.length_distribution import LengthDistribution
from planner.scheduling import RequestSchedule

WAITING = 1
"""Micro-batches under way beside one for each stage that prefills, and turns of newcomers beside
those (`actors.schedule.exegpt_prefill`, `actors.handover.pace`)."""

SHORT_PROMPTS = 2
"""The requests of a micro-batch, or a turn, that short prompts may make of one that was planned."""


def most_requests(schedule: RequestSchedule) -> int:
    """The most requests in flight that the tolerance allows."""
    return max(schedule.decode_requests, int((1 + schedule.tolerance) * schedule.decode_requests))


@dataclass(frozen=True)
class PrefillSizes:
    """What a micro-batch may have: at most `most` prompts, about `usual_tokens`, and at most
    `most_tokens`; one of up to `even_tokens` is as even as others.
    """

    most: int
    usual_tokens: float
    even_tokens: float
    most_tokens: float

    @classmethod
    def of(cls, schedule: RequestSchedule, prompts: LengthDistribution) -> PrefillSizes:
        """The sizes under a schedule for prompts of these lengths."""
        size = schedule.prefill_micro_batch
        usual = size * prompts.mean
        even = usual * (1 + schedule.tolerance)
        return cls(SHORT_PROMPTS * size, usual, even, size * prompts.longest)

    def next_part(self, waiting: Iterable[int], waiting_tokens: float) -> int:
        """How many prompts of those `waiting`, which have so many tokens together, make the next
        micro-batch: about as many tokens as usual, and of what is less than two of these, halves.
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


class PrefillQueue:
    """Prompts of so many tokens that wait for stages which prefill."""

    def __init__(self, sizes: PrefillSizes) -> None:
        self._sizes = sizes
        self._waiting: deque[int] = deque()
        self._tokens = 0

    def __len__(self) -> int:
        """The number of prompts that wait."""
        return len(self._waiting)

    def add(self, prompts: Iterable[int]) -> None:
        """Put prompts at the end."""
        for prompt in prompts:
            self._waiting.append(prompt)
            self._tokens += prompt

    def take(self) -> tuple[int, ...]:
        """The prompts of the next micro-batch."""
        count = self._sizes.next_part(self._waiting, self._tokens)
        taken = tuple(self._waiting.popleft() for _ in range(count))
        self._tokens -= sum(taken)
        return taken

"""Prompts that wait for stages which only prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from planner.schedule.prefills import PrefillSizes


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

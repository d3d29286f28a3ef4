"""Requests of random lengths, in a queue that never ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.length_distribution import RequestLengths

_DRAWN_AT_ONCE = 4096


@dataclass(slots=True, eq=False)
class DrawnRequest:
    """A request of so many tokens that began with its turn; noted, or only to keep stages busy."""

    prompt: int
    output: int
    began_s: float = 0.0
    noted: bool = False


class RequestQueue:
    """An endless queue of requests of these lengths."""

    def __init__(self, lengths: RequestLengths, generator: np.random.Generator) -> None:
        self._lengths, self._generator = lengths, generator
        self._waiting: list[DrawnRequest] = []
        self._next = 0

    def take(
        self, wanted: int, fewest: int, most: int, tokens: tuple[float, float]
    ) -> list[DrawnRequest]:
        """Take `wanted` requests, or so many more or fewer that the sum of their prompts is within
        `tokens`, as far as `fewest` and `most` allow (ExeGPT section 5.2).
        """
        low, high = tokens
        count, total = wanted, sum(self._prompt(i) for i in range(wanted))
        while total > high and count > max(1, fewest):
            count -= 1
            total -= self._prompt(count)
        while total < low and count < most and total + self._prompt(count) <= high:
            total += self._prompt(count)
            count += 1
        taken = self._waiting[self._next : self._next + count]
        self._next += count
        return taken

    def _prompt(self, place: int) -> int:
        if self._next + place >= len(self._waiting):
            prompts = self._lengths.prompts.drawn(_DRAWN_AT_ONCE, self._generator).tolist()
            outputs = self._lengths.outputs.drawn(_DRAWN_AT_ONCE, self._generator).tolist()
            self._waiting = self._waiting[self._next :]
            self._waiting += map(DrawnRequest, prompts, outputs)
            self._next = 0
        return self._waiting[self._next + place].prompt

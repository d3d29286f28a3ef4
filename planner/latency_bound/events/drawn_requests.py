"""Requests of random lengths, in a queue that never ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.length_distribution import RequestLengths
from planner.schedule.turns import evened
from planner.scheduling import RequestSchedule

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

    def take(self, schedule: RequestSchedule, wanted: int, most: int) -> list[DrawnRequest]:
        """Take about `wanted` requests, at most `most`, with even prompts (ExeGPT section 5.2)."""
        prompts = [self._prompt(place) for place in range(most)]
        count = evened(schedule, wanted, most, prompts)
        taken = self._waiting[self._next : self._next + count]
        self._next += count
        return taken

    def _prompt(self, place: int) -> int:
        if self._next + place >= len(self._waiting):
            self._waiting = self._waiting[self._next :]
            self._waiting += drawn_requests(self._lengths, _DRAWN_AT_ONCE, self._generator)
            self._next = 0
        return self._waiting[self._next + place].prompt


def drawn_requests(
    lengths: RequestLengths, count: int, generator: np.random.Generator
) -> list[DrawnRequest]:
    """Draw so many requests."""
    prompts = lengths.prompts.drawn(count, generator).tolist()
    outputs = lengths.outputs.drawn(count, generator).tolist()
    return list(map(DrawnRequest, prompts, outputs))

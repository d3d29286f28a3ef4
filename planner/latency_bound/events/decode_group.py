"""Requests that make their decode steps together, in a simulation."""

from __future__ import annotations

from collections.abc import Iterable

from planner.latency_bound.events.drawn_requests import DrawnRequest


class DecodeGroup:
    """The requests of a group; `context_tokens` are those that all of them have before a step."""

    def __init__(self) -> None:
        self.size = self.context_tokens = 0
        self._step = 0
        self._ends: dict[int, list[DrawnRequest]] = {}

    def join(self, requests: Iterable[DrawnRequest]) -> None:
        """Take in requests whose first token is there and that want more."""
        for request in requests:
            self.size += 1
            self.context_tokens += request.prompt
            self._ends.setdefault(self._step + request.output - 1, []).append(request)

    def made_step(self) -> list[DrawnRequest]:
        """Count a step that is back; returns those that have ended with it."""
        self._step += 1
        self.context_tokens += self.size
        ended = self._ends.pop(self._step, [])
        self.size -= len(ended)
        self.context_tokens -= sum(each.prompt + each.output - 1 for each in ended)
        return ended

"""When the tokens of one answer came, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from llmpq.serve.engine import EngineBusyError, EngineStoppingError

CANCELLED = "cancelled"
"""How answers end whose client has gone, or does not read."""


class AnswerTimer:
    """Context manager around the generation of an answer, which `report` is told of at its end.

    `tokens` came from `first_s` to `last_s` by `clock`, and the request at `arrived_s` (None: it is
    no matter when). `outcome` is the finish reason, once it is known; else "cancelled", or
    "refused" or "error" by what was raised.
    """

    def __init__(
        self,
        report: Callable[[AnswerTimer], None] = lambda timer: None,
        clock: Callable[[], float] = time.monotonic,
        arrived_s: float | None = None,
    ) -> None:
        self._report = report
        self._clock = clock
        self.arrived_s = arrived_s
        self.tokens = 0
        self.first_s: float | None = None
        self.last_s = arrived_s or 0.0
        self.outcome = CANCELLED

    def __enter__(self) -> AnswerTimer:
        """Nothing is known of the answer yet."""
        return self

    def note_token(self) -> None:
        """Note that a token has come."""
        self.tokens += 1
        self.last_s = self._clock()
        if self.first_s is None:
            self.first_s = self.last_s

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Report."""
        if isinstance(error, EngineBusyError | EngineStoppingError):
            self.outcome = "refused"
        elif isinstance(error, Exception):
            self.outcome = "error"
        self._report(self)

"""The metrics of a server; nothing of any text is in them."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmpq.serve.engine import QueueState
from llmpq.serve.telemetry.answer_timer import AnswerTimer
from llmpq.serve.telemetry.instruments import Instruments

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ANSWER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

WHOLE = ("stop", "length")
"""Outcomes of answers whose times are those of a whole one."""


class ServeMetrics:
    """All metrics of one server. Called in one event loop.

    `model`: where it is given, they are Ray's metrics too, under this tag.
    """

    def __init__(
        self, model: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._made = made = Instruments(model)
        self._first_token = made.histogram(
            "first_token_seconds",
            "From the arrival of a request's body to the first token of an answer",
            FIRST_TOKEN_S,
        )
        self._token = made.histogram(
            "output_token_seconds", "Mean time of an answer's tokens after the first", TOKEN_S
        )
        self._answer = made.histogram(
            "answer_seconds",
            "From the arrival of a request's body to the last token of an answer",
            ANSWER_S,
        )
        self._requests = made.counter(
            "requests", "HTTP requests by address and status", "address", "status"
        )
        self._answers = made.counter("answers", "Answers that ended, by how", "outcome")
        self._tokens = made.counter("tokens", "Tokens of prompts and of answers", "of")
        self._under_way = made.gauge("answers_under_way", "Answers by state", "state")
        self._kv_tokens = made.gauge("kv_tokens", "Token slots of the KV cache", "state")
        self._new_tokens = 0

    def timer(self, arrived_s: float | None) -> AnswerTimer:
        """A timer of one answer to a request whose body arrived at `arrived_s` of the clock; None
        where the times from its arrival on are not wanted.
        """
        return AnswerTimer(self._note_answer, self.clock, arrived_s)

    def count_request(self, address: str, status: str) -> None:
        """Count a request that has ended."""
        self._requests.add(1, address=address, status=status)

    def count_prompts(self, tokens: int) -> None:
        """Count the tokens of a request's prompts."""
        self._tokens.add(tokens, of="prompts")

    def text(self, queue: QueueState) -> bytes:
        """All of them in Prometheus' text format, with the present load."""
        self.observe(queue)
        return self._made.text()

    def observe(self, queue: QueueState) -> None:
        """Take over the present load."""
        self._under_way.set(queue.waiting, state="waiting")
        self._under_way.set(queue.running, state="running")
        self._kv_tokens.set(queue.kv_tokens_used, state="used")
        self._kv_tokens.set(queue.kv_tokens, state="all")

    def _note_answer(self, timer: AnswerTimer) -> None:
        self._answers.add(1, outcome=timer.outcome)
        self._tokens.add(timer.tokens, of="answers")
        if timer.first_s is None:
            return
        is_whole = timer.outcome in WHOLE
        if timer.arrived_s is not None:
            self._first_token.observe(timer.first_s - timer.arrived_s)
            if is_whole:
                self._answer.observe(timer.last_s - timer.arrived_s)
        if is_whole and timer.tokens > 1:
            self._token.observe((timer.last_s - timer.first_s) / (timer.tokens - 1))

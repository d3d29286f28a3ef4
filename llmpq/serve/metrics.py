"""Metrics of the server: numbers of requests and tokens, and the times of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmpq.serve.access import CLIENT_GONE
from llmpq.serve.engine import EngineBusyError, EngineStoppingError, QueueState

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
        return self

    def note_token(self) -> None:
        self.tokens += 1
        self.last_s = self._clock()
        if self.first_s is None:
            self.first_s = self.last_s

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineBusyError | EngineStoppingError):
            self.outcome = "refused"
        elif isinstance(error, Exception):
            self.outcome = "error"
        self._report(self)


_PREFIX = "llmpq_serve_"
_MODEL = "model"


class Instruments:
    """Makes instruments of one server; `model`, where it is given, has them be Ray's as well, under
    a tag with that name, for which Ray must be initialised.
    """

    def __init__(self, model: str | None = None) -> None:
        self._registry = CollectorRegistry()
        self._model = model

    def counter(self, name: str, text: str, *labels: str) -> Instrument:
        own = Counter(_PREFIX + name, text, labels, registry=self._registry)
        return Instrument(own, self._of_ray("Counter", name, text, tag_keys=labels))

    def gauge(self, name: str, text: str) -> Instrument:
        own = Gauge(_PREFIX + name, text, ("state",), registry=self._registry)
        return Instrument(own, self._of_ray("Gauge", name, text, tag_keys=("state",)))

    def histogram(self, name: str, text: str, boundaries: Sequence[float]) -> Instrument:
        own = Histogram(_PREFIX + name, text, buckets=boundaries, registry=self._registry)
        of_ray = self._of_ray("Histogram", name, text, boundaries=list(boundaries), tag_keys=())
        return Instrument(own, of_ray)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _of_ray(self, kind: str, name: str, text: str, **options: Any) -> Any:
        if self._model is None:
            return None
        from ray.util import metrics

        options["tag_keys"] += (_MODEL,)
        made = getattr(metrics, kind)(_PREFIX + name, text, **options)
        return made.set_default_tags({_MODEL: self._model})


class Instrument:
    """An instrument of Prometheus, and beside it Ray's, where there is one: a counter has `add`, a
    gauge `set`, a histogram `observe`.
    """

    def __init__(self, own: Any, of_ray: Any) -> None:
        self._own, self._of_ray = own, of_ray

    def add(self, amount: int, **labels: str) -> None:
        self._own.labels(**labels).inc(amount)
        if self._of_ray is not None and amount:  # Ray's refuse 0
            self._of_ray.inc(amount, labels)

    def set(self, value: int, **labels: str) -> None:
        self._own.labels(**labels).set(value)
        if self._of_ray is not None:
            self._of_ray.set(value, labels)

    def observe(self, value: float) -> None:
        self._own.observe(value)
        if self._of_ray is not None:
            self._of_ray.observe(value)


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
        self._under_way = made.gauge("answers_under_way", "Answers by state")
        self._kv_tokens = made.gauge("kv_tokens", "Token slots of the KV cache")
        self._new_tokens = 0

    def timer(self, arrived_s: float | None) -> AnswerTimer:
        """A timer of one answer to a request whose body arrived at `arrived_s` of the clock; None
        where the times from its arrival on are not wanted.
        """
        return AnswerTimer(self._note_answer, self.clock, arrived_s)

    def count_request(self, address: str, status: str) -> None:
        self._requests.add(1, address=address, status=status)

    def count_prompts(self, tokens: int) -> None:
        self._tokens.add(tokens, of="prompts")

    def text(self, queue: QueueState) -> bytes:
        """All of them in Prometheus' text format, with the present load."""
        self.observe(queue)
        return self._made.text()

    def observe(self, queue: QueueState) -> None:
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


_OTHER = "other"


class Counting:
    """Tells `count` the address and status of every request once its answer has ended.

    The status is "cancelled" where the answer was not sent to its end. `addresses` are told by
    name, all others together: clients choose them.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[str, str], None], addresses: Collection[str]
    ) -> None:
        self._app = app
        self._count = count
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_whole = CANCELLED, False

        async def send_counted(message: Message) -> None:
            nonlocal status, is_whole
            await send(message)
            if message["type"] == "http.response.start":
                status = str(message["status"])
            else:
                is_whole = not message.get("more_body", False) and status != str(CLIENT_GONE)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            path = scope["path"] if scope["path"] in self._addresses else _OTHER
            self._count(path, status if is_whole else CANCELLED)

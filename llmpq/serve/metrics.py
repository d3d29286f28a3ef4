"""Metrics of the server: numbers of requests and tokens, and the times of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.recovery.policy import RecoveryEvent
from llmpq.serve.access import CLIENT_GONE
from llmpq.serve.engine import EngineStoppingError, QueueState
from quant.common.text import in_ascii

CANCELLED = "cancelled"
"""How answers end whose client has gone, or does not read."""


class AnswerTimer:
    """Context manager around the generation of an answer, which `report` is told of at its end.

    It is that of the request `custom_id`, from `began_s` to `ended_s` by `clock`. `tokens` came
    from `first_s` to `last_s`, and the request at `arrived_s` (None: it is no matter when).
    `outcome` is the finish reason, once it is known; else "cancelled", or "refused" or "error" by
    what was raised.
    """

    def __init__(
        self,
        report: Callable[[AnswerTimer], None],
        clock: Callable[[], float],
        arrived_s: float | None,
    ) -> None:
        self._report = report
        self._clock = clock
        self.arrived_s = arrived_s
        self.custom_id = ""
        self.began_s = self.ended_s = 0.0
        self.tokens = 0
        self.first_s: float | None = None
        self.last_s = arrived_s or 0.0
        self.outcome = CANCELLED

    def __enter__(self) -> AnswerTimer:
        self.began_s = self._clock()
        return self

    def note_token(self) -> None:
        self.tokens += 1
        self.last_s = self._clock()
        if self.first_s is None:
            self.first_s = self.last_s

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineStoppingError):
            self.outcome = "refused"
        elif isinstance(error, Exception):
            self.outcome = "error"
        self.ended_s = self._clock()
        self._report(self)


_PREFIX = "llmpq_serve_"
_MODEL = "model"

_WRITE: dict[type, str] = {Counter: "inc", Gauge: "set", Histogram: "observe"}


class Instrument:
    """An instrument of Prometheus, and beside it Ray's, where there is one: values are added to a
    counter, are a gauge's present ones, and are observed by a histogram.
    """

    def __init__(self, own: Any, of_ray: Any) -> None:
        self._own, self._of_ray = own, of_ray
        self._write = _WRITE[type(own)]

    def note(self, value: float, **labels: str) -> None:
        own = self._own.labels(**labels) if labels else self._own
        getattr(own, self._write)(value)
        if self._of_ray is not None and (value or self._write != "inc"):  # Ray's refuse 0
            getattr(self._of_ray, self._write)(value, labels)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ANSWER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

WHOLE = ("stop", "length")
"""Outcomes of answers whose times are those of a whole one."""


class ServeMetrics:
    """All metrics of one server. Called in one event loop.

    `model`: where it is given, they are Ray's metrics too, under this tag, for which Ray must be
    initialised.
    """

    def __init__(
        self, model: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._model = model
        self._first_token = self._histogram(
            "first_token_seconds",
            "From the arrival of a request's body to the first token of an answer",
            FIRST_TOKEN_S,
        )
        self._token = self._histogram(
            "output_token_seconds", "Mean time of an answer's tokens after the first", TOKEN_S
        )
        self._answer = self._histogram(
            "answer_seconds",
            "From the arrival of a request's body to the last token of an answer",
            ANSWER_S,
        )
        self._requests = self._made(
            Counter, "requests", "HTTP requests by address and status", "address", "status"
        )
        self._answers = self._made(Counter, "answers", "Answers that ended, by how", "outcome")
        self._tokens = self._made(Counter, "tokens", "Tokens of prompts and of answers", "of")
        self._under_way = self._made(Gauge, "answers_under_way", "Answers by state", "state")
        self._kv_tokens = self._made(Gauge, "kv_tokens", "Token slots of the KV cache", "state")
        self._planned = self._made(Gauge, "planned_tokens_per_s", "Tokens/s by the plan")
        self._events = self._made(Counter, "events", "Faults of stages and repairs", "kind")

    def _made(self, kind: type[Counter | Gauge], name: str, text: str, *labels: str) -> Instrument:
        own = kind(_PREFIX + name, text, labels, registry=self._registry)
        return Instrument(own, self._of_ray(kind, name, text, labels))

    def _histogram(self, name: str, text: str, boundaries: Sequence[float]) -> Instrument:
        own = Histogram(_PREFIX + name, text, buckets=boundaries, registry=self._registry)
        return Instrument(own, self._of_ray(Histogram, name, text, (), list(boundaries)))

    def _of_ray(self, kind: type, name: str, text: str, labels: tuple[str, ...], *more: Any) -> Any:
        if self._model is None:
            return None
        from ray.util import metrics

        of_ray = getattr(metrics, kind.__name__)
        made = of_ray(_PREFIX + name, text, *more, tag_keys=(*labels, _MODEL))
        return made.set_default_tags({_MODEL: in_ascii(self._model)})

    def timer(
        self, arrived_s: float | None, also: Callable[[AnswerTimer], None] | None = None
    ) -> AnswerTimer:
        """A timer of one answer to a request whose body arrived at `arrived_s` of the clock; None
        where the times from its arrival on are not wanted. `also` is told of it too.
        """

        def report(timer: AnswerTimer) -> None:
            self._note_answer(timer)
            if also is not None:
                also(timer)

        return AnswerTimer(report, self.clock, arrived_s)

    def count_request(self, address: str, status: str) -> None:
        self._requests.note(1, address=address, status=status)

    def count_event(self, event: RecoveryEvent) -> None:
        """Count a fault or a repair; from any thread."""
        self._events.note(1, kind=event.kind)

    def count_prompts(self, tokens: int) -> None:
        self._tokens.note(tokens, of="prompts")

    def text(self, queue: QueueState) -> bytes:
        """All of them in Prometheus' text format, with the present load."""
        self.observe(queue)
        return generate_latest(self._registry)

    def observe(self, queue: QueueState) -> None:
        self._under_way.note(queue.waiting, state="waiting")
        self._under_way.note(queue.running, state="running")
        self._kv_tokens.note(queue.kv_tokens_used, state="used")
        self._kv_tokens.note(queue.kv_tokens, state="all")
        self._planned.note(queue.planned_tokens_per_s)

    def _note_answer(self, timer: AnswerTimer) -> None:
        self._answers.note(1, outcome=timer.outcome)
        self._tokens.note(timer.tokens, of="answers")
        if timer.first_s is None:
            return
        is_whole = timer.outcome in WHOLE
        if timer.arrived_s is not None:
            self._first_token.note(timer.first_s - timer.arrived_s)
            if is_whole:
                self._answer.note(timer.last_s - timer.arrived_s)
        if is_whole and timer.tokens > 1:
            self._token.note((timer.last_s - timer.first_s) / (timer.tokens - 1))


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

"""The trace of one request over HTTP, as a server makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmpq.serve.metrics import AnswerTimer

if TYPE_CHECKING:
    from llmpq.run.spans import RequestTracer


class RequestTrace:
    """Spans of a request and its answers, from its arrival to the end of its body; of nothing
    without a `tracer`.
    """

    def __init__(
        self,
        tracer: RequestTracer | None = None,
        arrived_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        self._tracer = tracer
        self._begin = (arrived_s, headers or {}, figures or {})
        self._span: Any = None
        self._context: Any = None

    def __enter__(self) -> RequestTrace:
        if self._tracer is not None:
            from opentelemetry.trace import set_span_in_context

            self._span = self._tracer.begin("request", *self._begin)
            self._context = set_span_in_context(self._span)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._span is not None:
            if error is not None and not isinstance(error, GeneratorExit):
                self._span.set_attribute("error.type", type(error).__name__)
            self._span.end()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Tell of the body as a part of the request."""
        if self._tracer is None:
            yield
            return
        began_s = self._tracer.clock()
        try:
            yield
        finally:
            self._tracer.part(name, self._context, (began_s, self._tracer.clock()), {})

    def answered(self, timer: AnswerTimer) -> None:
        """Tell of an answer that has ended."""
        if self._tracer is None:
            return
        from llmpq.run.spans import EndedRequest, Figures

        figures: Figures = {
            "gen_ai.usage.output_tokens": timer.tokens,
            "llmpq.outcome": timer.outcome,
        }
        whole = (timer.began_s, timer.ended_s, self._context, timer.first_s)
        self._tracer.end(EndedRequest("generate", timer.custom_id, *whole, figures=figures))


NO_TRACE = RequestTrace()

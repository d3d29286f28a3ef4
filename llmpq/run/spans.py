"""Spans of requests for OpenTelemetry: how long each waited, and what every stage did for it.

Imports OpenTelemetry, and so is imported itself only where spans are asked for.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.messages import Finished, Request
from llmpq.run.monitor import Watch
from llmpq.version import llmpq_version
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from actors.processes.request_log import RequestTimes

MOST_WAITING = 2**16
"""Requests that have ended and wait for the figures of stages; more are left out."""

SEND_S = 5.0
"""Seconds for a message to the collector; one that does not answer costs spans, and no request."""

_PATH = "/v1/traces"

Figures = Mapping[str, str | int | float]


@dataclass(frozen=True)
class EndedRequest:
    """A request that the stages had from `submitted_s` to `ended_s`. Its text came from `text_s`
    on, where that is known; `parent` is None where it has a trace of its own.
    """

    name: str
    custom_id: str
    submitted_s: float
    ended_s: float
    parent: Context | None = None
    text_s: float | None = None
    figures: Figures = field(default_factory=dict)


class RequestTracer:
    """Makes spans of requests, those of their stages among them; times are those of `clock`.

    Requests are told of in any thread when they have ended, and what stages know of them is asked
    for about once a second.
    """

    def __init__(
        self,
        provider: TracerProvider,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("llmpq", llmpq_version())
        self.clock = clock
        self._offset_s = wall() - clock()
        self._submitted: dict[str, float] = {}
        self._ended: deque[EndedRequest] = deque(maxlen=MOST_WAITING)
        self._group: LiveGroup | None = None

    def begin(self, name: str, at_s: float, headers: Mapping[str, str], figures: Figures) -> Span:
        """Begin the span of a request over HTTP, in the trace that its headers name."""
        parent = TraceContextTextMapPropagator().extract(headers)
        began_ns = self._ns(at_s)
        return self._tracer.start_span(name, parent, SpanKind.SERVER, figures, start_time=began_ns)

    def part(
        self, name: str, parent: Context | None, span: tuple[float, float], figures: Figures
    ) -> Span:
        """Tell of a part that has ended, from when to when."""
        begins_s, ends_s = span
        made = self._tracer.start_span(
            name, parent, attributes=figures, start_time=self._ns(begins_s)
        )
        made.end(self._ns(max(begins_s, ends_s)))
        return made

    def end(self, ended: EndedRequest) -> None:
        self._ended.append(ended)

    def submitting(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        """Note when each request is taken."""
        for request in requests:
            if request is not None:
                self._submitted.setdefault(request.custom_id, self.clock())
            yield request

    def rows(self, finished: Sequence[Finished]) -> None:
        """Tell of requests that end now, each of which is a trace of its own."""
        now_s = self.clock()
        for each in finished:
            begun_s = self._submitted.pop(each.custom_id, now_s)
            figures: Figures = {
                "llmpq.custom_id": each.custom_id,
                "gen_ai.usage.output_tokens": len(each.token_ids),
                "llmpq.outcome": each.finish_reason,
            }
            self.end(EndedRequest("row", each.custom_id, begun_s, now_s, figures=figures))

    @contextmanager
    def following(self, group: LiveGroup) -> Iterator[None]:
        """Ask the stages of `group` for what they know of requests, to the end of the body."""
        self._group = group
        try:
            with Watch(self.flush, (), "spans"):
                yield
            self.flush()
        finally:
            self._group = None  # stages may be lost where there is an error

    def flush(self) -> None:
        """Make the spans of all requests that have ended."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        if not ended:
            return
        group = self._group
        stages: Sequence[Mapping[str, RequestTimes]] = ()
        devices: Sequence[str] = ()
        if group is not None:
            stages = group.observer.take_requests([each.custom_id for each in ended])
            devices = [stage.label for stage in group.plan.stages]
        for each in ended:
            self._tell(each, [found.get(each.custom_id, {}) for found in stages], devices)

    def _tell(
        self, ended: EndedRequest, stages: Sequence[RequestTimes], devices: Sequence[str]
    ) -> None:
        whole = (ended.submitted_s, ended.ended_s)
        within = set_span_in_context(self.part(ended.name, ended.parent, whole, ended.figures))
        begins = [times["prefill"].began_s for times in stages if "prefill" in times]
        if begins:
            self.part("queue", within, (ended.submitted_s, min(begins)), {})
        for number, times in enumerate(stages):
            where: Figures = {"llmpq.stage": number}
            if len(devices) == len(stages):
                where = {**where, "llmpq.device": devices[number]}
            for phase, each in times.items():
                done = {
                    "llmpq.busy_s": each.busy_s,
                    "llmpq.micro_batches": each.micro_batches,
                    "llmpq.tokens": each.tokens,
                }
                self.part(phase, within, (each.began_s, each.ended_s), {**where, **done})
        if ended.text_s is not None:
            self.part("text", within, (ended.text_s, ended.ended_s), {})

    def close(self) -> None:
        """Send what has not been sent; a collector that does not answer is not waited for long."""
        self.flush()
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return round((at_s + self._offset_s) * 1e9)


class _OneWarning(logging.Handler):
    """Warns once of what exporters tell in the log at each try."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.ERROR)
        self._url, self._has_warned = url, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the collector at {self._url} does not take spans ({record.getMessage():.200}); "
                "requests go on without them",
                stacklevel=1,
            )


def open_tracer(url: str, model: str) -> RequestTracer:
    """A tracer that sends spans to a collector; raises `SpecError` for what is no address of one.

    The sampler and other settings are those of OpenTelemetry's environment variables. Raises
    `ImportError` where there is no exporter, which nothing else brings.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(
            f"trace_to is {url!r:.200}; give the address of a collector that takes OTLP over HTTP, "
            "such as http://localhost:4318"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if parts.path in ("", "/"):
        url = parts._replace(path=_PATH).geturl()
    resource = Resource.create(
        {"service.name": "llmpq", "service.version": llmpq_version(), "llmpq.model": model}
    )
    provider = TracerProvider(resource=resource)
    exporters = logging.getLogger("opentelemetry.exporter")
    exporters.propagate, exporters.handlers = False, [_OneWarning(url)]
    exporter = OTLPSpanExporter(endpoint=url, timeout=SEND_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider)

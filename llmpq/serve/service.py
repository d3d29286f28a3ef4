"""One request for text, from its fields to its answer, whole or as events that a client reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmpq.rows.answers import Head, Json, TextPiece, joined, usage_content
from llmpq.serve.access import CLIENT_GONE, ApiError, Gate, read_body, tasks
from llmpq.serve.bodies import BodyT, ChatBody, CompletionBody, parse_json
from llmpq.serve.choices import pieces
from llmpq.serve.engine import Engine
from llmpq.serve.metrics import ServeMetrics
from llmpq.serve.options import ServeOptions
from llmpq.serve.requests import AnswerStreams, Asked, asked, generations_of
from llmpq.serve.traces import NO_TRACE, RequestTrace
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from llmpq.run.spans import RequestTracer

DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")


def event(content: Mapping[str, object]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """Sends `events` as fast as the client reads them.

    The status is sent with the first event, so that what is raised before it has an own status.
    `events` is closed at the end, also where the client has gone, or has left an event unread for
    `stall_s` seconds: then the connection ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_s: float) -> None:
        super().__init__(headers=_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; raises what getting the first one raises."""
        try:
            await _unless_gone(receive, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        is_begun = False
        try:
            async for content in self._events:
                async with asyncio.timeout(self._stall_s):
                    if not is_begun:
                        start = {"status": self.status_code, "headers": self.raw_headers}
                        await send({"type": "http.response.start", **start})
                        is_begun = True
                    await send(_body(content, more=True))
            async with asyncio.timeout(self._stall_s):
                await send(_body(b"", more=False))
        except TimeoutError:
            return  # an answer that is not complete has the server close the connection


def _body(content: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None where the client goes before, which cancels it."""
    async with tasks(work, _gone(receive)) as (working, watching):
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Service:
    def __init__(
        self,
        engine: Engine,
        options: ServeOptions,
        clock: Callable[[], float] = time.time,
        metrics: ServeMetrics | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.engine, self._tracer = engine, tracer
        self.options = options
        if len(set(self.names)) < len(self.names):
            raise SpecError(
                f"the names {', '.join(self.names)} of the model and its adapters must differ; "
                "give another --served_model_name"
            )
        self.gate = Gate(engine, options)
        self.clock = clock
        self.metrics = metrics or ServeMetrics()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, then of adapters beside it."""
        own = self.options.served_model_names or (self.engine.model_name,)
        return (*own, *self.engine.adapters)

    def check_model(self, name: str) -> None:
        if name not in self.names:
            message = f"the model {name!r:.200} is not served here; {self.names[0]!r} is"
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")

    async def body(self, request: Request) -> Json:
        """The JSON object of a request, which is read only while requests are taken."""
        self.gate.check_open()
        options = self.options
        body = await read_body(request, options.body_limit_bytes, options.body_s)
        request.state.arrived_s = self.metrics.clock()
        return parse_json(body)

    async def answer(
        self, request: Request, body: BodyT, kind: Callable[[Service, BodyT, Engine, float], Job]
    ) -> Response:
        """The answer to a request, by a job of its `kind`."""
        self.check_model(body.model)
        job = kind(self, body, self.engine, request.state.arrived_s)
        if self._tracer is not None:
            figures = {"gen_ai.request.model": body.model, "gen_ai.response.id": job.head.id}
            arrived_s = request.state.arrived_s
            job.trace = RequestTrace(self._tracer, arrived_s, request.headers, figures)
        if body.stream:
            return EventStream(job.events(), self.options.stall_s)
        answer = await _unless_gone(request.receive, job.whole())
        return Response(status_code=CLIENT_GONE) if answer is None else answer

    async def content(self, body: CompletionBody | ChatBody, engine: Engine) -> Json:
        """The content of a whole answer by `engine`, which decides alone when it may run."""
        self.check_model(body.model)
        self.gate.check_number(generations_of(body))
        return await Job(self, body, engine).content()


class Job:
    """A checked request for text; `arrived_s` of its body, None for a line of a batch. What is
    answered in another form than choices overrides `content` and `chunks`, and how these are told.
    """

    ending = DONE
    trace = NO_TRACE

    def __init__(
        self,
        service: Service,
        body: CompletionBody | ChatBody,
        engine: Engine,
        arrived_s: float | None = None,
    ) -> None:
        self._service, self._engine, self._arrived_s = service, engine, arrived_s
        self._body, self._form = body, body.form
        name = f"{self.prefix}-{uuid4().hex}"
        self.head = Head(name, int(service.clock()), body.model)

    @property
    def prefix(self) -> str:
        """What the names of such answers begin with."""
        return self._form.prefix

    async def whole(self) -> Response:
        with self.trace, self._service.gate.admitted(generations_of(self._body)):
            return JSONResponse(await self.content())

    async def content(self) -> Json:
        """The JSON object of the answer in one piece."""
        wanted, answers = await self.answers()
        choices = [self._form.whole(wanted.whole(answer)) for answer in answers]
        of_prompt = self._form.of_prompt(answers[0].prompt_logprobs)
        new_tokens = sum(answer.new_tokens for answer in answers)
        shared_tokens = sum(answer.shared_tokens for answer in answers)
        content = self.head.content(self._form.whole_kind, choices)
        return content | of_prompt | {"usage": self._usage(wanted, new_tokens, shared_tokens)}

    async def answers(self) -> tuple[Asked, list[TextPiece]]:
        """What was asked for, and the whole answers, not divided."""
        parts: dict[int, list[TextPiece]] = {}
        wanted = await self.asked()
        async with aclosing(self.pieces(wanted)) as made:
            async for piece in made:
                parts.setdefault(piece.index, []).append(piece)
        return wanted, [joined(parts[index]) for index in sorted(parts)]

    def _usage(self, wanted: Asked, new_tokens: int, shared_tokens: int) -> Json:
        """The tokens of all answers; those of prompts are counted once."""
        return usage_content(wanted.prompt_tokens, new_tokens, shared_tokens // self._body.answers)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an `ApiError` is raised before the first of them, else one itself."""
        is_begun = False
        try:
            with self.trace, self._service.gate.admitted(generations_of(self._body)):
                async with aclosing(self.chunks()) as chunks:
                    async for chunk in chunks:
                        is_begun = True
                        yield self.framed(chunk)
        except ApiError as error:
            if not is_begun:
                raise
            yield self.framed(self.told(error))
        if self.ending:
            yield self.ending

    def framed(self, chunk: Json) -> bytes:
        """A chunk as an event that a client reads."""
        return event(chunk)

    def told(self, error: ApiError) -> Json:
        """The chunk of an error in a stream that has begun."""
        return error.content

    async def chunks(self) -> AsyncGenerator[Json, None]:
        form = self._form
        wanted = await self.asked()
        new_tokens = shared_tokens = 0
        opened: set[int] = set()
        streams: dict[int, AnswerStreams] = {}
        async with aclosing(self.pieces(wanted)) as made:
            async for each in made:
                piece = wanted.divide(each, streams)
                new_tokens += piece.new_tokens
                shared_tokens += piece.shared_tokens
                if piece.index not in opened:
                    opened.add(piece.index)
                    opening = form.opening(piece.index)
                    if opening is not None:
                        yield self._chunk(opening)
                if piece.text or piece.reasoning or piece.calls or piece.tokens:
                    yield self._chunk(form.part(piece))
                if piece.finish_reason is not None:
                    yield self._chunk(form.closing(piece))
        if self._body.wants_usage:
            usage = self._usage(wanted, new_tokens, shared_tokens)
            yield self.head.content(form.chunk_kind, ()) | {"usage": usage}

    def _chunk(self, choice: Json) -> dict[str, object]:
        content = self.head.content(self._form.chunk_kind, (choice,))
        return content | {"usage": None} if self._body.wants_usage else content

    async def asked(self) -> Asked:
        with self.trace.part("tokenize"):
            wanted = await asked(self._body, self._engine, self.head.id)
        self._service.metrics.count_prompts(wanted.prompt_tokens)
        return wanted

    def pieces(self, wanted: Asked) -> AsyncGenerator[TextPiece, None]:
        service = self._service
        return pieces(
            self._engine,
            wanted.generations,
            wanted.told,
            service.gate.given_up,
            lambda: service.metrics.timer(self._arrived_s, self.trace.answered),
        )

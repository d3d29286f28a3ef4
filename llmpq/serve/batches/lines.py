"""Lines of a batch: what they ask for, and their answers, with room that online requests leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from actors.messages import Request
from llmpq.rows.answers import BAD_LINE, Json, answer_line, line_response, written_line
from llmpq.rows.row import MAX_ID_CHARACTERS, Row
from llmpq.serve.access import ApiError, Gate, bad_request, log_fault
from llmpq.serve.access import failed as failure
from llmpq.serve.batches.records import Endpoint, Problem
from llmpq.serve.bodies import (
    ChatBody,
    CompletionBody,
    chat_body,
    checked,
    completion_body,
    parse_json,
)
from llmpq.serve.engine import Engine, EngineStatus, QueueState, TokenEvent
from llmpq.serve.service import Service

STARTING_SHARE = 4
"""One in so many slots may hold a batch's generation that has no token yet: an online request that
comes just then has few prompts before its own.
"""

LOOK_S = 0.25
"""Seconds after which room is looked for again where nothing tells of any."""


class BehindOnline:
    """An `Engine` whose generations wait for room, first come, first served.

    A generation is handed to the engine while no online answer waits, as long as the answers and
    generations in flight are fewer than the engine's slots, and only few of these have no token
    yet. So none waits in the engine's own queue, where it would be before an online request that
    comes later: that one waits for one slot to become free at most.
    """

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self.model_name, self.created_s = engine.model_name, engine.created_s
        self.adapters = engine.adapters
        self.limits, self.sampling, self.markers = engine.limits, engine.sampling, engine.markers
        self.decode, self.kept_form = engine.decode, engine.kept_form
        self.call_reading = engine.call_reading
        self._gate = gate
        self._starting = 0
        self._first = asyncio.Lock()
        self._encoding = asyncio.Lock()
        self._changed = asyncio.Event()
        gate.on_room = self._changed.set

    @property
    def has_room(self) -> bool:
        """Whether a generation may be handed to the engine now."""
        gate, queue = self._gate, self._engine.queue
        if gate.status != "ready":
            return False
        online = max(gate.answers, queue.waiting + queue.running - gate.background)
        most_starting = max(1, queue.slots // STARTING_SHARE)
        return online + gate.background < queue.slots and self._starting < most_starting

    async def room(self) -> None:
        while not self.has_room:
            await self.pause()

    async def pause(self) -> None:
        """Wait until something changes, or for a moment."""
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK_S)

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The tokens of an answer, as `Engine.generate`, once there is room."""
        async with self._first:
            await self.room()
            self._gate.background += 1
            self._starting += 1
        is_starting = True
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if is_starting:
                        is_starting = False
                        self._starting -= 1
                        self._changed.set()
                    yield event
        finally:
            self._gate.background -= 1
            self._starting -= is_starting
            self._changed.set()

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids, as `Engine.encode`; one prompt at a time, so that online ones come between."""
        async with self._encoding:
            return await self._engine.encode(row)

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    @property
    def queue(self) -> QueueState:
        return self._engine.queue


DUPLICATE = "duplicate_custom_id"
EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"


class _Envelope(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
    method: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """A line of the input by its number from 1; `problem` says why its content is missing."""

    number: int
    content: bytes
    problem: str | None = None


@dataclass(frozen=True)
class Scan:
    """What a reading of the whole input shows: `lines` that are not blank.

    `repeats`: numbers of lines whose id stands in the line given already. `problem`: why the file
    cannot be used.
    """

    lines: int = 0
    repeats: dict[int, int] = field(default_factory=dict)
    problem: Problem | None = None


@dataclass(frozen=True)
class LineAnswer:
    """The line that answers a line; `error` is a code where it belongs into the file of errors."""

    text: str
    error: str | None


def custom_id_of(line: bytes) -> str | None:
    """The id of a line, also of one that is wrong otherwise; None where it has no usable one."""
    try:
        found = parse_json(line).get("custom_id")
        if not isinstance(found, str) or not 0 < len(found) <= MAX_ID_CHARACTERS:
            return None
        found.encode()
    except (ApiError, UnicodeEncodeError):
        return None
    return found


def envelope(line: bytes, endpoint: Endpoint) -> Mapping[str, object]:
    """The body of a line's request; raises `ApiError` for a line that is no request of a batch."""
    found = checked(_Envelope, parse_json(line, "the line"))
    try:
        found.custom_id.encode()
    except UnicodeEncodeError as error:
        raise bad_request("custom_id holds half a surrogate pair", "custom_id") from error
    if found.method != "POST":
        raise bad_request(f"method is {found.method!r:.40}; it must be 'POST'", "method")
    if found.url != endpoint:
        raise bad_request(f"url is {found.url!r:.80}; the batch's endpoint is {endpoint!r}", "url")
    return found.body


def request_of(content: Mapping[str, object], endpoint: Endpoint) -> CompletionBody | ChatBody:
    """The request of a body, checked as by HTTP; raises `ApiError` where it cannot be served."""
    is_chat = endpoint == "/v1/chat/completions"
    body = chat_body(content) if is_chat else completion_body(content)
    if body.stream:
        raise bad_request("stream is true; a batch gives whole answers: leave it out", "stream")
    return body


def answered(
    custom_id: str | None, status: int, content: Json, code: str | None = None
) -> LineAnswer:
    """The line of a request that was answered, or refused with this `code`."""
    response = line_response(status, content, uuid4().hex)
    return LineAnswer(written_line(answer_line(custom_id, response, None, uuid4().hex)), code)


def failed(custom_id: str | None, code: str, message: str) -> LineAnswer:
    """The line of what was no request, or did not run."""
    error = {"code": code, "message": message}
    return LineAnswer(written_line(answer_line(custom_id, None, error, uuid4().hex)), code)


_PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses that tell of the server's state, not of the request."""


class Answering:
    """Answers the lines of a batch, whose input is as `found`; a fault of one is its answer."""

    def __init__(
        self, service: Service, engine: BehindOnline, endpoint: Endpoint, found: Scan
    ) -> None:
        self._service = service
        self._engine = engine
        self._endpoint = endpoint
        self._found = found

    async def answer(self, line: BatchLine) -> LineAnswer:
        """The answer; waits while the engine takes no requests."""
        problem = self._problem(line)
        if problem is not None:
            return problem
        custom_id = custom_id_of(line.content)
        try:
            content = envelope(line.content, self._endpoint)
        except ApiError as error:
            message = f"line {line.number}: {error.message}"
            return failed(custom_id, BAD_LINE, message)
        while True:
            await self._engine.room()
            try:
                body = request_of(content, self._endpoint)
                found = await self._service.content(body, self._engine)
                return answered(custom_id, HTTPStatus.OK, found)
            except ApiError as error:
                told, is_passing = error, self._is_passing(error)
            except Exception as error:  # one line's fault must not end the others
                log_fault(f"line {line.number} of a batch", error)
                told = failure("the server failed at this line; its log says more")
                is_passing = False
            if not is_passing:
                return answered(custom_id, told.status, told.content, told.code or told.type)
            await self._engine.pause()

    def ended(self, line: BatchLine, code: str, message: str) -> LineAnswer:
        return self._problem(line) or failed(custom_id_of(line.content), code, message)

    def _problem(self, line: BatchLine) -> LineAnswer | None:
        most = self._service.options.body_limit_bytes
        problem = line.problem
        if problem is None and len(line.content) > most:
            problem = f"it has more than {most} bytes"
        if problem is not None:
            return failed(None, BAD_LINE, f"line {line.number}: {problem}")
        first = self._found.repeats.get(line.number)
        if first is None:
            return None
        message = (
            f"line {line.number}: its custom_id stands in line {first} already; results could "
            "not be told apart"
        )
        return failed(custom_id_of(line.content), DUPLICATE, message)

    def _is_passing(self, error: ApiError) -> bool:
        """Whether the line may be answered better when it is tried again."""
        if error.status in _PASSING:
            return True
        is_fault = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return is_fault and self._service.gate.status != "ready"

"""The answer to a line of a batch, as HTTP would give it, when there is room for it."""

from __future__ import annotations

from http import HTTPStatus

from llmpq.rows.answers import BAD_LINE
from llmpq.serve.batches import lines
from llmpq.serve.batches.behind import BehindOnline
from llmpq.serve.batches.job import Line, Scan
from llmpq.serve.batches.lines import LineAnswer
from llmpq.serve.batches.storage.records import Endpoint
from llmpq.serve.service import Service
from llmpq.serve.wire.boundary import log_fault
from llmpq.serve.wire.errors import ApiError
from llmpq.serve.wire.errors import failed as failure

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

    async def answer(self, line: Line) -> LineAnswer:
        """The answer; waits while the engine takes no requests."""
        problem = self._problem(line)
        if problem is not None:
            return problem
        custom_id = lines.custom_id_of(line.content)
        try:
            content = lines.envelope(line.content, self._endpoint)
        except ApiError as error:
            message = f"line {line.number}: {error.answer.message}"
            return lines.failed(custom_id, BAD_LINE, message)
        while True:
            await self._engine.room()
            try:
                asked = lines.request_of(content, self._endpoint)
                found = await self._service.content(asked.body, asked.form, self._engine)
                return lines.answered(custom_id, found)
            except ApiError as error:
                if not self._is_passing(error):
                    return lines.refused(custom_id, error.answer)
            except Exception as error:  # one line's fault must not end the others
                log_fault(f"line {line.number} of a batch", error)
                told = failure("the server failed at this line; its log says more")
                return lines.refused(custom_id, told.answer)
            await self._engine.pause()

    def ended(self, line: Line, code: str, message: str) -> LineAnswer:
        """The answer to a line that does not run any more."""
        return self._problem(line) or lines.failed(lines.custom_id_of(line.content), code, message)

    def _problem(self, line: Line) -> LineAnswer | None:
        """The answer to a line that is not looked into."""
        most = self._service.options.body_limit_bytes
        problem = line.problem
        if problem is None and len(line.content) > most:
            problem = f"it has more than {most} bytes"
        if problem is not None:
            return lines.failed(None, BAD_LINE, f"line {line.number}: {problem}")
        first = self._found.repeats.get(line.number)
        if first is None:
            return None
        message = (
            f"line {line.number}: its custom_id stands in line {first} already; results could "
            "not be told apart"
        )
        return lines.failed(lines.custom_id_of(line.content), lines.DUPLICATE, message)

    def _is_passing(self, error: ApiError) -> bool:
        """Whether the line may be answered better when it is tried again."""
        if error.answer.status in _PASSING:
            return True
        is_fault = error.answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return is_fault and self._service.gate.status != "ready"

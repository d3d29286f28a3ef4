"""Rows on their way from the request that is handed to the stages to the result."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from actors.messages import Finished, Request
from llmpq.lengths.finished_rows import texts_of
from llmpq.rows.results import CALLS, REASONING, Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.drift import LengthRecord
from llmpq.run.meter import RunMeter
from llmpq.tokenizing.reasoning import PROMPT_END_TOKENS, divided
from llmpq.tokenizing.requests import RequestMaker, not_finite
from llmpq.tokenizing.tool_calls import CallReading, calls_apart, calls_reason
from quant.common.errors import InputError

NOT_FINITE = (
    "the model's logits are not finite: its values overflow the compute type on some stage; plan "
    "with --dtype float32, or bfloat16 where every GPU has it"
)

BAD_ROWS_AT_ONCE = 256
"""Rows that cannot run which are put aside at most while the next request is looked for."""

BAD_ROWS_S = 5.0
"""Seconds for which they are put aside at most: one whose tokens take too long may cost `row_s`."""


class RowsInFlight:
    """Makes results of finished requests and of rows that cannot run; tells `meter` of each.

    `ended` counts all rows with a result, `errors` those that failed, `tokens` those generated;
    `first_error` is the first result that failed. `record` is told of lengths. Requests that only
    the plan for long rows has room for wait in `long`. `columns_held` has the own columns of rows
    while their requests are with the stages, by id.
    """

    def __init__(self, maker: RequestMaker, meter: RunMeter) -> None:
        self._maker, self._meter = maker, meter
        self.record = LengthRecord()
        self.long = WaitingRequests()
        self._requests: dict[str, Request] = {}
        self.columns_held: dict[str, Mapping[str, Any]] = {}
        self._bad_rows: deque[BadRow] = deque()
        self.ended = self.errors = self.tokens = 0
        self.first_error: Result | None = None

    def taken_in(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The `rows`, whose own columns are kept for their results; that of the reasoning, which is
        to come, beside those of a chat with a model that reasons, and that of calls, with how they
        are read, beside those of one with tools.
        """
        for row in rows:
            columns = row.columns
            if isinstance(row, Row) and row.messages is not None:
                columns = {**self._columns_to_come(row), **columns}
            if columns:
                self.columns_held[row.custom_id] = columns
            yield row

    def _columns_to_come(self, row: Row) -> dict[str, Any]:
        tokenizer = self._maker.tokenizer
        reading = None if tokenizer is None else tokenizer.call_reading(row.prompt_options)
        reasoning = {REASONING: None} if self._maker.markers else {}
        return reasoning if reading is None else {**reasoning, CALLS: reading}

    def requests(self, items: Iterator[Request | BadRow]) -> Iterator[Request | None]:
        """The requests among `items`; None where `bad_results` should be given out first."""
        since_s = time.monotonic()
        for item in items:
            if isinstance(item, Request) and not self.wait_if_long(item):
                yield self._begin(item)
            else:
                if isinstance(item, BadRow):
                    self._bad_rows.append(item)
                is_late = time.monotonic() - since_s > BAD_ROWS_S
                if len(self._bad_rows) < BAD_ROWS_AT_ONCE and not is_late:
                    continue
                yield None
            since_s = time.monotonic()

    def wait_if_long(self, request: Request) -> bool:
        """Have a request wait that only the plan for long rows has room for; tell whether it is."""
        if not self._maker.is_long(request):
            return False
        self.long.add(request, self.columns_held.pop(request.custom_id, {}))
        return True

    def long_requests(self) -> Iterator[Request | None]:
        """The requests that waited for the plan for long rows; the record begins anew for them."""
        self.record.forget()
        for request, columns in self.long.take_all():
            if columns:
                self.columns_held[request.custom_id] = columns
            yield self._begin(request)

    def _begin(self, request: Request) -> Request:
        self._requests[request.custom_id] = request
        self.record.begin(request)
        return request

    @property
    def in_flight(self) -> int:
        """Number of requests that the stages have, or that wait there."""
        return len(self._requests)

    def bad_results(self) -> Iterator[Result]:
        while self._bad_rows:
            yield self.bad_result(self._bad_rows.popleft())

    def bad_result(self, row: BadRow) -> Result:
        self._meter.leave_out()
        return self._failed(row.custom_id, row.error)

    def results(self, finished: Sequence[Finished]) -> Iterator[Result]:
        requests = [self._requests.pop(each.custom_id) for each in finished]
        made = (each.token_ids for each in finished)
        answers = self._maker.texts([*zip(requests, made, strict=True)])
        for each, request, answer in zip(finished, requests, answers, strict=True):
            self.tokens += len(each.token_ids)
            self._meter.end(len(each.token_ids), request.max_new_tokens)
            error = None
            if each.finish_reason == "error":
                error = each.error or not_finite(request, NOT_FINITE)
            if error is None and answer.error is not None:
                error = f"its tokens cannot be turned into text: {answer.of}: {answer.error}"
            prompt_tokens = len(request.prompt_ids)
            if error is not None:
                failed = self._failed(each.custom_id, error, each.token_ids)
                yield replace(failed, prompt_tokens=prompt_tokens)
                continue
            self.record.end(request, len(each.token_ids))
            self.ended += 1
            text, columns = self._divided(answer.text, request)
            reason = calls_reason(each.finish_reason, bool(columns.get(CALLS)))
            yield Result(
                each.custom_id,
                text,
                each.token_ids,
                reason,
                columns=columns,
                prompt_tokens=prompt_tokens,
            )

    def _divided(self, text: str | None, request: Request) -> tuple[str | None, Mapping[str, Any]]:
        """The text of an answer without reasoning and calls, and its row's columns with these."""
        columns, markers = self.columns_held.pop(request.custom_id, {}), self._maker.markers
        has_form = bool(request.sampling.structured_outputs)  # which leaves no room for reasoning
        if REASONING in columns and text is not None and markers is not None and not has_form:
            end = texts_of(self._maker.tokenizer, [request.prompt_ids[-PROMPT_END_TOKENS:]])[0]
            reasoning, text = divided(text, markers, end)
            columns = {**columns, REASONING: reasoning}
        if CALLS in columns and text is not None:
            reading = CallReading(*columns[CALLS])
            text, calls = calls_apart(text, reading, request.custom_id)
            columns = {**columns, CALLS: [call.content for call in calls] or None}
        return text, columns

    def _failed(self, custom_id: str, error: str, token_ids: tuple[int, ...] = ()) -> Result:
        columns = self.columns_held.pop(custom_id, {})
        if CALLS in columns:
            columns = {**columns, CALLS: None}
        result = Result(custom_id, None, token_ids, None, error, columns)
        self.ended += 1
        self.errors += 1
        self.first_error = self.first_error or result
        return result


MEMORY_BYTES = 64 << 20
"""Bytes of requests in memory; more of them lie in a temporary file."""


class WaitingRequest(NamedTuple):
    request: Request
    columns: Mapping[str, Any]


_WAITING: TypeAdapter[WaitingRequest] = TypeAdapter(WaitingRequest)


class WaitingRequests:
    """Requests in their order, in memory or, if many, in a temporary file; `prompts` wait."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115
        self.prompts = 0

    def add(self, request: Request, columns: Mapping[str, Any]) -> None:
        """Add a request and its row's own columns; `InputError` where the disk takes no more."""
        try:
            self._file.write(_WAITING.dump_json(WaitingRequest(request, columns)) + b"\n")
        except OSError as error:
            raise _no_room(self.prompts, error) from error
        self.prompts += 1

    def take_all(self) -> Iterator[WaitingRequest]:
        """The requests, each once, when all are added. InputError if the disk lost them."""
        for line in self._lines():
            self.prompts -= 1
            yield _WAITING.validate_json(line)

    def _lines(self) -> Iterator[bytes]:
        try:
            self._file.seek(0)  # writes what the file still holds back
            yield from self._file
        except OSError as error:
            raise _no_room(self.prompts, error) from error

    def close(self) -> None:
        """Forget the requests."""
        self._file.close()


def _no_room(prompts: int, error: OSError) -> InputError:
    return InputError(
        f"cannot keep {prompts} long prompts in {tempfile.gettempdir()}: {error.strerror}; free "
        "space there, or set TMPDIR to another folder"
    )


def until(closed: threading.Event, requests: Iterator[Request | None]) -> Iterator[Request | None]:
    """Those `requests` that are taken before `closed` is set; the others stay where they are."""
    for request in requests:
        yield request
        if closed.is_set():
            return


MOST_WAITING = 4096
"""Rows among which the next one is drawn: some MiB of prompts."""

T = TypeVar("T")


def in_random_order(items: Iterator[T], most_waiting: int = MOST_WAITING) -> Iterator[T]:
    """Yield all of `items`, each drawn from up to `most_waiting` that wait, the same in every run.

    At most two are read for one that is yielded, so that rows which come slowly are not waited for
    longer than they need be.
    """
    generator = random.Random(0)
    waiting: list[T] = []
    while True:
        for _ in range(2):
            if len(waiting) < most_waiting:
                waiting.extend(islice(items, 1))
        if not waiting:
            return
        chosen = generator.randrange(len(waiting))
        waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
        yield waiting.pop()

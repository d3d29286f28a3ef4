"""Rows on their way from the request that is handed to the stages to the result."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from actors.messages import Finished, Request
from actors.stage.grammar import leaves_room
from llmpq.rows.generations import Wanted
from llmpq.rows.results import (
    CALLS,
    GENERATIONS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    REASONING,
    Result,
    RowError,
)
from llmpq.rows.row import BadRow, Row
from llmpq.run.drift import LengthRecord
from llmpq.run.meter import RunMeter
from llmpq.tokenizing.reasoning import divided
from llmpq.tokenizing.requests import RequestMaker, not_finite
from llmpq.tokenizing.row_logprobs import TokenTexts, logprob_columns
from llmpq.tokenizing.tokenizer_process import Tokenized
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


class Begun(NamedTuple):
    """A request that the stages have, for answer `number` of the `answers` of a row."""

    request: Request
    custom_id: str
    number: int
    answers: int


class RowsInFlight:
    """Makes results of finished requests and of rows that cannot run; tells `meter` of each.

    `ended` counts all rows with a result, `errors` those that failed, `tokens` those generated;
    `first_error` is the first result that failed. `record` is told of lengths. Requests that only
    the plan for long rows has room for wait in `long`. `columns_held` has the own columns of rows
    while their requests are with the stages, by id. A row of several answers has a request for
    each, and its result once all of them have ended.
    """

    def __init__(self, maker: RequestMaker, meter: RunMeter) -> None:
        self._maker, self._meter = maker, meter
        self._token_texts = TokenTexts(maker.tokenizer)
        self.record = LengthRecord()
        self.long = WaitingRequests()
        self._begun: dict[str, Begun] = {}
        self._ended: dict[str, dict[int, Result]] = {}  # answers of rows that have others to come
        self.columns_held: dict[str, Mapping[str, Any]] = {}
        self._bad_rows: deque[BadRow] = deque()
        self.ended = self.errors = self.tokens = 0
        self.first_error: Result | None = None

    def taken_in(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The `rows`, whose own columns are kept for their results; that of the reasoning, which is
        to come, beside those of a chat with a model that reasons, and that of calls, with how they
        are read, beside those of one with tools, those of log-probabilities, of an answer's with
        whether it is a chat's, and that of several answers, with how many.
        """
        for row in rows:
            columns = row.columns
            if isinstance(row, Row) and row.messages is not None:
                columns = {**self._columns_to_come(row), **columns}
            if isinstance(row, Row) and row.prompt_logprobs is not None:
                columns = {PROMPT_LOGPROBS: None, **columns}
            if isinstance(row, Row) and row.logprobs is not None:
                columns = {LOGPROBS: row.messages is not None, **columns}
            if isinstance(row, Row) and row.answers > 1:
                columns = {GENERATIONS: Wanted.by(row), **columns}
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
                yield from self._begin(item)
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
            yield from self._begin(request)

    def _begin(self, row: Request) -> Iterator[Request]:
        """The requests of a row's answers, under names that no other one has which is under way."""
        name, wanted = row.custom_id, self._wanted(row.custom_id)
        requests = [row] if wanted is None else [*wanted.requests(row)]
        for number, request in enumerate(requests):
            if number or name in self._begun:
                request = replace(request, custom_id=self._free_name(name, number))
                request = replace(request, draw_id=request.draw_id or name)
            self._begun[request.custom_id] = Begun(request, name, number, len(requests))
            self.record.begin(request)
            yield request

    def _free_name(self, name: str, number: int) -> str:
        names = (f"{name}\0{each}" for each in count(number))
        return next(each for each in names if each not in self._begun)

    def _wanted(self, custom_id: str) -> Wanted | None:
        given = self.columns_held.get(custom_id, {}).get(GENERATIONS)
        return None if given is None else Wanted(*given)

    @property
    def in_flight(self) -> int:
        """Number of requests that the stages have, or that wait there."""
        return len(self._begun)

    def bad_results(self) -> Iterator[Result]:
        while self._bad_rows:
            yield self.bad_result(self._bad_rows.popleft())

    def bad_result(self, row: BadRow) -> Result:
        self._meter.leave_out()
        return self._failed(row.custom_id, row.error)

    def results(self, finished: Sequence[Finished]) -> Iterator[Result]:
        begun = [self._begun.pop(each.custom_id) for each in finished]
        made = zip(begun, finished, strict=True)
        texts = self._maker.texts([(own.request, each.token_ids) for own, each in made])
        for each, own, text in zip(finished, begun, texts, strict=True):
            self.tokens += len(each.token_ids)
            ended = self._ended.setdefault(own.custom_id, {})
            ended[own.number] = self._answer(each, own, text)
            if len(ended) == own.answers:
                del self._ended[own.custom_id]
                yield self._ended_row(own.request, [ended[number] for number in sorted(ended)])

    def _answer(self, finished: Finished, own: Begun, text: Tokenized) -> Result:
        """One answer of a row, with the columns that are its own."""
        request, token_ids = own.request, finished.token_ids
        result = Result(own.custom_id, None, token_ids, None, prompt_tokens=len(request.prompt_ids))
        error = None
        if finished.finish_reason == "error":
            error = finished.error or not_finite(request, NOT_FINITE)
        if error is None and text.error is not None:
            error = f"its tokens cannot be turned into text: {text.of}: {text.error}"
        logprobs: dict[str, Any] = {}
        try:
            if error is None and request.wants_logprobs:
                is_chat = bool(self.columns_held[own.custom_id].get(LOGPROBS))
                logprobs = logprob_columns(self._token_texts, request, finished, is_chat)
        except RowError as problem:
            error = str(problem)
        if error is not None:
            return replace(result, error=error)
        self.record.end(request, len(token_ids))
        answer, columns = self._divided(text.text, own)
        reason = calls_reason(finished.finish_reason, bool(columns.get(CALLS)))
        columns = {**columns, **logprobs}
        return replace(result, text=answer, finish_reason=reason, columns=columns)

    def _ended_row(self, request: Request, answers: Sequence[Result]) -> Result:
        """The result of a row all of whose `answers` are there; `request` is of one of them."""
        tokens = sum(len(answer.token_ids) for answer in answers)
        self._meter.end(tokens, request.max_new_tokens * len(answers))
        first = answers[0]
        wanted = self._wanted(first.custom_id)
        failed = first if wanted is None else wanted.failure(answers)
        if failed is not None and failed.error is not None:
            result = self._failed(failed.custom_id, failed.error, failed.token_ids)
            return replace(result, prompt_tokens=failed.prompt_tokens)
        self.ended += 1
        columns = {**self.columns_held.pop(first.custom_id, {}), **first.columns}
        if wanted is not None:
            columns[GENERATIONS] = wanted.content(answers)
        return replace(first, columns=columns)

    def _divided(self, text: str | None, own: Begun) -> tuple[str | None, Mapping[str, Any]]:
        """The text of an answer without reasoning and calls, and the columns of these."""
        request, markers = own.request, self._maker.markers
        held = self.columns_held.get(own.custom_id, {})
        columns = {name: held[name] for name in (REASONING, CALLS) if name in held}
        form = request.sampling.structured_outputs
        if REASONING in columns and text is not None and markers and leaves_room(form):
            end = self._maker.prompt_end(request.prompt_ids)
            columns[REASONING], text = divided(text, markers, end, bool(form))
        if CALLS in columns and text is not None:
            reading = CallReading(*columns[CALLS])
            text, calls = calls_apart(text, reading, request.custom_id)
            columns[CALLS] = [call.content for call in calls] or None
        return text, columns

    def _failed(self, custom_id: str, error: str, token_ids: tuple[int, ...] = ()) -> Result:
        columns = dict(self.columns_held.pop(custom_id, {}))
        columns |= {name: None for name in (GENERATIONS, CALLS, LOGPROBS) if name in columns}
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

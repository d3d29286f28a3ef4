"""Lines of results, in our form or in OpenAI's: writing them, knowing them again, their errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from llmpq.jobs.file_format import (
    READ_ERRORS,
    FileFormat,
    contradiction,
    json_value,
    numbered_lines,
    output_format,
    require_pyarrow,
)
from llmpq.jobs.job_files import Shard
from llmpq.jobs.parquet import read_results
from llmpq.jobs.text_files import read_csv_results
from llmpq.rows.answers import (
    BAD_LINE,
    ChatForm,
    CompletionForm,
    Form,
    Head,
    Json,
    TextPiece,
    ToolCall,
    answer_line,
    line_response,
    usage_content,
    written_line,
)
from llmpq.rows.results import (
    CALLS,
    FINGERPRINT,
    GENERATIONS,
    LOGPROBS,
    PREFIX,
    PROMPT_LOGPROBS,
    REASONING,
    RESULT_FIELDS,
    Result,
)
from llmpq.rows.row import FINGERPRINT_HEX, digest
from planner.option_rules import flag, option
from quant.common.errors import InputError
from quant.common.text import printable

OutputForm = Literal["rows", "openai"]
"""Lines of results: rows of llmpq's own fields, or answers to lines of OpenAI's batches."""

OUTPUT_FORMS: tuple[OutputForm, ...] = ("rows", "openai")


@dataclass(frozen=True)
class OutputOptions:
    """`resume` demands that there is something to go on from. A shard is closed after `shard_rows`
    rows or `shard_s` seconds (None: after rows alone). `output_format`: None for that of the job
    that is there, and of a new one `default_format`.
    """

    overwrite: bool = flag("start anew, replace the output")
    resume: bool = flag("go on; refused where there is nothing to go on with")
    shard_rows: int = option("COUNT", "results that are committed together", 1000)
    shard_s: float | None = option(
        "SECONDS",
        "time after which results are committed at the latest",
        10.0,
        names=("--shard_seconds",),
    )
    output_format: OutputForm | None = option(
        OUTPUT_FORMS,
        "lines of results: rows, or answers of OpenAI's batches (default: openai where the first "
        "row is a Batch line and the output no table)",
    )
    default_format: OutputForm = "rows"


FAILED = "generation_failed"
"""Code of a row that has run, and failed."""

_KEYS = ("custom_id", "error", FINGERPRINT)
_FINGERPRINT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{20}")
_ID_HEX = 8
_ID = re.compile(rf"batch_req_([0-9a-f]+)([0-9a-f]{{{FINGERPRINT_HEX}}})[0-9a-f]{{{_ID_HEX}}}")
"""The parts of a row's fingerprint, and digits of its `custom_id`, which tell rows of one prompt
apart.
"""
_REMEDY = "name another output or pass --overwrite"
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class ResultIdentity:
    """The id of a row of results, whether it failed, its fingerprint, and the form of its line."""

    custom_id: str
    failed: bool
    fingerprint: str
    form: OutputForm = "rows"

    @property
    def model(self) -> str:
        return self.fingerprint.partition("-")[0]


def line_of(result: Result, fingerprint: str) -> bytes:
    row = {name: getattr(result, name) for name in RESULT_FIELDS}
    row |= {FINGERPRINT: fingerprint} | dict(result.columns)
    return _ENCODE(row).encode() + b"\n"


def openai_line(result: Result, fingerprint: str, model_name: str, is_chat: bool) -> bytes:
    """A row's answer as in OpenAI's batches, with its own columns; `is_chat`: of messages."""
    name = fingerprint.replace("-", "") + digest({"id": result.custom_id}, _ID_HEX)
    response = error = None
    columns = dict(result.columns)
    first = {name: getattr(result, name) for name in ("text", "token_ids", "finish_reason")}
    first |= {name: columns.pop(name, None) for name in (REASONING, CALLS, LOGPROBS)}
    of_prompt = columns.pop(PROMPT_LOGPROBS, None)
    answers = columns.pop(GENERATIONS, None) or [first]
    if result.error is None:
        head = Head(name, int(time.time()), model_name)
        answers = [{**each, PROMPT_LOGPROBS: of_prompt} for each in answers]
        body = _body(answers, result.prompt_tokens or 0, head, is_chat)
        response = line_response(HTTPStatus.OK, body, name)
    else:
        code = BAD_LINE if result.prompt_tokens is None else FAILED
        error = {"code": code, "message": result.error}
    line = answer_line(result.custom_id, response, error, name)
    for column, value in columns.items():
        while column in line:
            column = PREFIX + column
        line[column] = value
    return written_line(line).encode() + b"\n"


def _calls(column: Sequence[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
    calls = enumerate(column or ())
    return tuple(ToolCall(number, call["id"], **call["function"]) for number, call in calls)


def _body(
    answers: Sequence[Mapping[str, Any]], prompt_tokens: int, head: Head, is_chat: bool
) -> Json:
    form = ChatForm(False) if is_chat else CompletionForm(False)
    choices = [_choice(form, *each) for each in enumerate(answers)]
    content = head.content(form.whole_kind, choices)
    usage = usage_content(prompt_tokens, sum(len(answer["token_ids"]) for answer in answers))
    of_prompt = form.of_prompt(answers[0][PROMPT_LOGPROBS])
    return {**content, **of_prompt, "id": f"{form.prefix}-{head.id}", "usage": usage}


def _choice(form: Form, index: int, answer: Mapping[str, Any]) -> Json:
    text, token_ids, reason = (answer[name] for name in ("text", "token_ids", "finish_reason"))
    calls, reasoning = _calls(answer.get(CALLS)), answer.get(REASONING)
    piece = TextPiece(index, text or "", 0, finish_reason=reason, reasoning=reasoning, calls=calls)
    piece = replace(piece, prompt_logprobs=answer[PROMPT_LOGPROBS])
    told = {} if text is not None else {"token_ids": list(token_ids)}  # there is no tokenizer
    return {**form.whole(piece), LOGPROBS: answer.get(LOGPROBS), **told}


def is_openai_line(row: Mapping[str, Any]) -> bool:
    """Whether a row answers a line of a batch, of whichever server, and is no row of results."""
    return "response" in row and "token_ids" not in row and FINGERPRINT not in row


def error_of(line: Mapping[str, Any]) -> str | None:
    """The words for what is wrong with a line of OpenAI's form; None where it was answered."""
    error, response = line.get("error"), line["response"]
    if error is None and isinstance(response, Mapping):
        if response.get("status_code") == HTTPStatus.OK:
            return None
        body = response.get("body")
        error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else None
    return message if isinstance(message, str) else "no answer"


def check_writable(named: Path, path: Path) -> None:
    """Raise `InputError` where no such format can be written; `named` may be a link to `path`."""
    found = output_format(path)
    if found != output_format(named):
        raise InputError(
            f"output {named} is a link to {path}, whose name stands for {found.name}; give both "
            "the same ending"
        )
    if found.rows == "parquet":
        require_pyarrow()
    elif found.compression == ".zst":
        require_pyarrow("Files that end in .zst")


def result_identities(path: Path) -> Iterator[ResultIdentity]:
    """Identities of the rows of a finished file.

    Raises `InputError` for a row that llmpq did not write and for a file that is not what its name
    says, one of `READ_ERRORS` for a damaged file.
    """
    named = output_format(path)
    wrong = contradiction(path, named)
    if wrong is not None:
        raise InputError(f"output {path} exists already: {wrong}, {_REMEDY}")
    for number, row in enumerate(finished_rows(path, named, _KEYS), start=1):
        found = result_identity(row)
        if found is None:
            raise InputError(
                f"output {path} exists already and its row {number} is no result of llmpq; "
                f"{_REMEDY}"
            )
        yield found


def result_identity(row: object) -> ResultIdentity | None:
    """The identity of a line or a row; None if it is no result of llmpq."""
    if isinstance(row, bytes):
        row = json_value(row)
    if not isinstance(row, Mapping):
        return None
    form: OutputForm = "rows"
    if is_openai_line(row):
        found = _ID.fullmatch(str(row.get("id")))
        mark = None if found is None else "-".join(found.groups())
        values = (row.get("custom_id"), error_of(row), mark)
        form, row = "openai", dict(zip(_KEYS, values, strict=True))
    if any(key not in row for key in _KEYS):
        return None
    custom_id, error, fingerprint = (row[key] for key in _KEYS)
    if not isinstance(custom_id, str) or not isinstance(fingerprint, str):
        return None
    if not _FINGERPRINT.fullmatch(fingerprint) or not isinstance(error, str | None):
        return None
    return ResultIdentity(custom_id, error is not None, fingerprint, form)


def finished_rows(path: Path, named: FileFormat, columns: Sequence[str] | None) -> Iterator[object]:
    """Lines of JSON, or the rows of a table, of Parquet only the `columns` that are named."""
    if named.rows == "parquet":
        return read_results(path, columns)
    if named.rows == "csv":
        return read_csv_results(path, named.compression)
    return finished_lines(path, named)


def finished_lines(path: Path, named: FileFormat) -> Iterator[bytes]:
    """Lines with their ends, which editors may drop at the last; empty for those too long."""
    for _, line in numbered_lines(path, named.compression):
        if line is None or line.strip():
            line = line or b""
            yield line if line.endswith(b"\n") else line + b"\n"


MOST_KINDS = 40
"""Kinds that are told apart; what comes after them is of one kind, `OTHERS`."""

OTHERS = "other errors"

_KIND_CHARACTERS = 160
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBER = re.compile(r"(?<![\w…])[+−-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")

BUDGET_S = 1.0
"""Seconds of reading at most: files may have gigabytes."""

_TEXT = 800  # characters
_NO_ERROR = b'"error": null'
_ROW_ID = re.compile(rb'\{"custom_id": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class ErrorKind:
    """Rows that ended in one kind of error, and the first of them."""

    what: str
    count: int
    custom_id: str
    error: str


def kind_of(error: str) -> str:
    """The message with … in place of numbers and quoted names, cut to a line."""
    text = " ".join(error[: 8 * _KIND_CHARACTERS].split())
    text = _NUMBER.sub("…", _QUOTED.sub("'…'", text))
    return text if len(text) <= _KIND_CHARACTERS else text[: _KIND_CHARACTERS - 1] + "…"


class ErrorCounts:
    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}

    def add(self, custom_id: str, error: str) -> ErrorKind:
        what = kind_of(error)
        if what not in self.kinds and len(self.kinds) >= MOST_KINDS:
            what = OTHERS
        return self.merge(ErrorKind(what, 1, custom_id, error))

    def merge(self, more: ErrorKind) -> ErrorKind:
        """Add rows of a kind; its first example stays."""
        before = self.kinds.get(more.what)
        if before is not None:
            more = ErrorKind(more.what, before.count + more.count, before.custom_id, before.error)
        self.kinds[more.what] = more
        return more

    def most_first(self) -> tuple[ErrorKind, ...]:
        return tuple(sorted(self.kinds.values(), key=lambda kind: (-kind.count, kind.what)))


def read_errors(
    file: Path | None, shards: Iterable[Shard]
) -> tuple[int, tuple[ErrorKind, ...], bool]:
    """Rows of results as far as they can be read in `BUDGET_S`, the kinds of errors among them, and
    whether those are all rows.

    `file`: the finished file, where it counts. Of two results of a row the later one counts.
    """
    deadline_s = time.monotonic() + BUDGET_S
    failed: dict[bytes, tuple[str, str]] = {}
    rows = 0
    try:
        for line in _lines(file, shards):
            rows += 1
            _note(line, failed)
            if rows % 256 == 0 and time.monotonic() > deadline_s:
                return rows, _kinds(failed), False
    except (*READ_ERRORS, InputError):
        return rows, _kinds(failed), False
    return rows, _kinds(failed), True


def _lines(file: Path | None, shards: Iterable[Shard]) -> Iterator[object]:
    if file is not None:
        yield from finished_rows(file, output_format(file), _KEYS)
    for shard in shards:
        yield from shard.lines()


def _note(row: object, failed: dict[bytes, tuple[str, str]]) -> None:
    if isinstance(row, bytes):
        if _NO_ERROR in row:
            if failed and (found := _ROW_ID.match(row)):
                failed.pop(found[1], None)
            return
        row = json_value(row)
    if not isinstance(row, Mapping):
        return
    custom_id, error = str(row.get("custom_id")), row.get("error")
    if is_openai_line(row):
        error = error_of(row)
    key = json.dumps(custom_id, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if isinstance(error, str):
        failed[key] = (custom_id, error)
    else:
        failed.pop(key, None)


def _kinds(failed: dict[bytes, tuple[str, str]]) -> tuple[ErrorKind, ...]:
    counts = ErrorCounts()
    for custom_id, error in failed.values():
        counts.add(printable(custom_id, _TEXT), printable(error, _TEXT))
    return counts.most_first()

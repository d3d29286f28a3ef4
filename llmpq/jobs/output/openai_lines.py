"""Results as lines of the answers of OpenAI's batches, by whose ids they are known again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from llmpq.rows.answers import (
    BAD_LINE,
    ChatForm,
    CompletionForm,
    Head,
    Json,
    TextPiece,
    Usage,
    answer_line,
    line_response,
    written_line,
)
from llmpq.rows.results import FINGERPRINT, PREFIX, REASONING, Result
from llmpq.rows.row import FINGERPRINT_HEX, digest

FAILED = "generation_failed"
"""Code of a row that has run, and failed."""

_ID_HEX = 8
_ID = re.compile(rf"batch_req_([0-9a-f]+)([0-9a-f]{{{FINGERPRINT_HEX}}})[0-9a-f]{{{_ID_HEX}}}")
"""The parts of a row's fingerprint, and digits of its `custom_id`, which tell rows of one prompt
apart.
"""


def openai_line(result: Result, fingerprint: str, model_name: str, is_chat: bool) -> str:
    """The line that answers a row, with its own columns; `is_chat`: its prompt was messages."""
    name = fingerprint.replace("-", "") + digest({"id": result.custom_id}, _ID_HEX)
    response = error = None
    columns = dict(result.columns)
    reasoning = columns.pop(REASONING, None)
    if result.error is None:
        head = Head(name, int(time.time()), model_name)
        body = _body(result, head, is_chat, reasoning)
        response = line_response(HTTPStatus.OK, body, name)
    else:
        code = BAD_LINE if result.prompt_tokens is None else FAILED
        error = {"code": code, "message": result.error}
    line = answer_line(result.custom_id, response, error, name)
    for column, value in columns.items():
        while column in line:
            column = PREFIX + column
        line[column] = value
    return written_line(line)


def _body(result: Result, head: Head, is_chat: bool, reasoning: str | None) -> Json:
    form = ChatForm(False) if is_chat else CompletionForm(False)
    new_tokens = len(result.token_ids)
    text, reason = result.text or "", result.finish_reason
    piece = TextPiece(0, text, new_tokens, finish_reason=reason, reasoning=reasoning)
    choice = dict(form.whole([piece]))
    if result.text is None:  # the model has no tokenizer
        choice["token_ids"] = list(result.token_ids)
    content = head.content(form.whole_kind, [choice])
    usage = Usage(result.prompt_tokens or 0, new_tokens)
    return {**content, "id": f"{form.prefix}-{head.id}", "usage": usage.content}


def is_line(row: Mapping[str, Any]) -> bool:
    """Whether a row is such a line, of whichever server, rather than a row of results."""
    return "response" in row and "token_ids" not in row and FINGERPRINT not in row


def error_of(line: Mapping[str, Any]) -> str | None:
    """The words for what is wrong with a row; None where it was answered."""
    error, response = line.get("error"), line["response"]
    if error is None and isinstance(response, Mapping):
        if response.get("status_code") == HTTPStatus.OK:
            return None
        body = response.get("body")
        error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else None
    return message if isinstance(message, str) else "no answer"


def fingerprint_of(line: Mapping[str, Any]) -> str | None:
    """The fingerprint of a row of this program's; None of another's."""
    found = _ID.fullmatch(str(line.get("id")))
    return None if found is None else "-".join(found.groups())

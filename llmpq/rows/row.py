"""One prompt of a batch, from a JSON line or a dictionary; a bad one becomes an error row."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmpq.rows.fields import (
    ADAPTER,
    ANSWERS,
    OTHER_PROMPTS,
    PROMPT_FIELDS,
    is_field,
    nearest_field,
)
from llmpq.rows.request_fields import (
    answers_wanted,
    fields_by_name,
    logprobs_wanted,
    plain_message,
    prompt_options,
    template_message,
)
from llmpq.rows.results import RowError, is_writable, own_columns, plain_value, whole_number
from llmpq.rows.sampling import sampling_overrides
from llmpq.rows.tools import forced_sampling
from quant.common.errors import MESSAGE_CHARACTERS, LlmpqError
from quant.common.json_text import loads
from quant.common.text import printable

Messages = tuple[Mapping[str, Any], ...]
RowInput = str | Sequence[int] | Mapping[str, Any]

_ENVELOPE = frozenset(("custom_id", "method", "url", "body"))  # of an OpenAI Batch line
_IGNORED_IN_BODY = "model"  # the plan says which model it is
_DEEPEST = 100  # levels of a message's content; three are usual, and Python gives up at a thousand

MAX_ID_CHARACTERS = 1000
"""Length of a `custom_id`: longer than any name, and short enough to be looked up and shown."""

ID_HEX = 16
"""Digits of an id, 64 bits. Prompts that share them by chance count as repeats of one prompt."""

FINGERPRINT_HEX = 20

CACHE_KIB = 16 * 1024
"""Memory for a list of ids: half a million rows."""

_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


@dataclass(frozen=True)
class Row:
    """One prompt: text, token ids or chat messages; `sampling` overrides the job's.

    `prompt_options`: how text or messages become tokens, where the row says so: arguments of the
    chat template and of the tokenizer. `columns`: what the row carries beside, which comes out with
    its result. `adapter`: the name of the one that answers it with the model. `answers`: how many
    it has, in one result. `logprobs`: how many tokens are told beside each of an answer with their
    log-probabilities, `prompt_logprobs` of its prompt (None: none, and not its own).
    """

    custom_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    answers: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def content(self) -> Mapping[str, Any]:
        """The prompt and the row's own options, without its id.

        Options of the prompt, several answers and log-probabilities count only where there are
        some, so that jobs of older versions can be resumed.
        """
        given = {
            "text": self.text,
            "token_ids": self.token_ids,
            "messages": self.messages,
            "prompt_options": self.prompt_options or None,
            ADAPTER: self.adapter,
            ANSWERS: self.answers if self.answers > 1 else None,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
        }
        return {name: value for name, value in given.items() if value is not None} | {
            "sampling": self.sampling
        }

    @property
    def tokenizing(self) -> dict[str, Any]:
        """The task of `tokenizer_child` that makes tokens of its text or messages."""
        task: dict[str, Any] = {"text": self.text}
        if self.messages is not None:
            chat = enumerate(self.messages, start=1)
            task = {"chat": [template_message(message, number) for number, message in chat]}
        return {**task, "options": self.prompt_options} if self.prompt_options else task

    @property
    def named_by(self) -> Mapping[str, Any]:
        """What the id of a row without one is made from.

        Its own columns are part of it: rows of one prompt could not be told apart otherwise, and
        their columns would change places where the rows do.
        """
        return {**self.content, "columns": self.columns} if self.columns else self.content

    def named(self, custom_id: str) -> Row:
        return replace(self, custom_id=custom_id)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot run, and why; `columns` as of a `Row`."""

    custom_id: str
    error: str
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)


def row_from_line(line: bytes, place: str) -> Row | BadRow:
    """The row of a JSON line; where that gives no id it has none, and a bad one its `place`."""
    try:
        content = loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8 (byte {error.start} of the line)")
    except ValueError as error:
        return BadRow(place, f"not JSON: {error}")
    if not isinstance(content, Mapping):
        return BadRow(place, "not a JSON object")
    return row_from_mapping(content, place)


def row_from_mapping(content: Mapping[str, Any], place: str) -> Row | BadRow:
    """The row of a dictionary, made as `row_from_line` makes that of a line."""
    try:
        return _row(content, place)
    except RecursionError:  # a message that quotes it needs more levels than reading it
        return BadRow(place, "a field nests too deeply")


def _row(content: Mapping[str, Any], place: str) -> Row | BadRow:
    body = content.get("body")
    beside, columns = _beside(content), {}
    name = place
    try:
        columns = own_columns(beside)
        custom_id = _custom_id(content)
        name = custom_id or place
        if isinstance(body, Mapping):
            _check_url(content.get("url"))
            fields = {name: value for name, value in body.items() if name != _IGNORED_IN_BODY}
        else:
            _refuse_near_misses(beside, content)
            fields = {name: value for name, value in content.items() if name not in beside}
        return _parse(fields, custom_id, columns)
    except (RowError, LlmpqError) as error:
        return BadRow(name, printable(str(error), MESSAGE_CHARACTERS), columns)


def _beside(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a row carries beside the fields that are read, or beside the body of a Batch line."""
    body = content.get("body")
    if isinstance(body, Mapping):
        return {name: value for name, value in content.items() if name not in _ENVELOPE}
    return {
        name: value
        for name, value in content.items()
        if not is_field(name, value, content) or (name == "body" and body is not None)
    }


def _custom_id(content: Mapping[str, Any]) -> str:
    custom_id = plain_value(content.get("custom_id"))
    if custom_id is None:
        return ""
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError(f"custom_id is {custom_id!r:.80}; it must be a non-empty string")
    if len(custom_id) > MAX_ID_CHARACTERS:
        raise RowError(
            f"custom_id {custom_id!r:.80}… has {len(custom_id)} characters; give it at most "
            f"{MAX_ID_CHARACTERS}"
        )
    if not is_writable(custom_id):
        raise RowError("custom_id holds half a surrogate pair, which UTF-8 cannot write")
    return custom_id


def _check_url(url: object) -> None:
    """Raise for a Batch line that asks another address than those of texts."""
    if url is not None and not (isinstance(url, str) and url.endswith("/completions")):
        raise RowError(
            f"url is {url!r:.80}; lines are answered that ask /v1/chat/completions or "
            "/v1/completions"
        )


def _refuse_near_misses(beside: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Raise where a column is probably meant as a field: its row would not run as it should."""
    for name, value in beside.items():
        nearest = None if value is None else nearest_field(name)
        if nearest is None or (nearest == "messages" and "prompt" in content):
            continue  # a row with a prompt may well carry a message
        raise RowError(
            f"unknown field {name!r:.80}, is {nearest} meant? write that, or give your own column "
            "another name"
        )


def _parse(fields: dict[str, Any], custom_id: str, columns: Mapping[str, Any]) -> Row:
    """The row of the `fields` that are read, or of a Batch line's body, and of its own columns."""
    fields.pop("custom_id", None)
    prompts = {name: plain_value(fields.pop(name)) for name in PROMPT_FIELDS if name in fields}
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        meant = [] if given else [name for name in OTHER_PROMPTS if name in {**columns, **fields}]
        raise RowError(
            f"a row needs exactly one of prompt and messages, found {given or 'neither'}"
            + "".join(f"; is {name} the prompt? name it so" for name in meant[:1])
        )
    value, is_chat = prompts[given[0]], given[0] == "messages"
    adapter = _adapter(plain_value(fields.pop(ADAPTER, None)))
    found = fields_by_name(fields)
    answers, logprobs = answers_wanted(found), logprobs_wanted(found)
    options, sampling = prompt_options(found, is_chat), sampling_overrides(found)
    row = Row(custom_id, None, None, None, sampling, options, columns, adapter, answers, *logprobs)
    if is_chat:
        sampling = forced_sampling(sampling, options)
        return replace(row, messages=_messages(value), sampling=sampling)
    if not isinstance(value, str):
        return replace(row, token_ids=_token_ids(value), prompt_options={})
    if not is_writable(value):
        raise RowError("prompt holds half a surrogate pair, which no tokenizer can read")
    return replace(row, text=value)


def _adapter(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and is_writable(value)):
        raise RowError(f"adapter is {value!r:.80}; it must be the name of one, or null")
    return value or None


def _messages(value: Any) -> Messages:
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise RowError("messages must be a non-empty list of objects with role and content")
    if not _can_be_written(value):
        raise RowError(
            f"messages hold half a surrogate pair, or nest deeper than {_DEEPEST} levels"
        )
    return tuple(plain_message(message, number) for number, message in enumerate(value, start=1))


def _can_be_written(value: Any, levels: int = _DEEPEST) -> bool:
    """Whether UTF-8 can write the texts in `value`, and Python can write its depth again."""
    if isinstance(value, str):
        return is_writable(value)
    if isinstance(value, Mapping):
        value = (*value.keys(), *value.values())
    if not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_can_be_written(each, levels - 1) for each in value)


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value
    if isinstance(value, list | tuple) and not all(type(t) is int for t in value):
        ids = [whole_number(plain_value(each)) for each in value]
    if isinstance(ids, list | tuple) and all(type(t) is int and 0 <= t < 2**31 for t in ids):
        return tuple(ids)
    raise RowError("prompt must be text or a list of token ids (whole numbers of at least 0)")


def digest(content: Mapping[str, Any], length: int) -> str:
    """`length` hexadecimal digits of `content`, in whichever order its keys are."""
    return hashlib.blake2b(_ENCODE(content).encode(), digest_size=length // 2).hexdigest()


class Occurrences:
    """Numbers of repeats of a content, in SQLite's page cache and a file without a name."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("BEGIN")
        self._database.execute("CREATE TABLE seen (id INTEGER PRIMARY KEY, times INT)")

    def custom_id(self, content: Mapping[str, Any]) -> str:
        """Id of the next prompt of this content: its digest, and its number from the second on."""
        made = digest(content, ID_HEX)
        key = (int.from_bytes(bytes.fromhex(made), signed=True),)
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, 1)", key).rowcount:
            return f"p-{made}"
        again = "UPDATE seen SET times = times + 1 WHERE id = ? RETURNING times"
        (times,) = self._database.execute(again, key).fetchone()
        return f"p-{made}-{times}"

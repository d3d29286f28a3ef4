"""One prompt of a batch, from a JSON line or a dictionary; a bad one becomes an error row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.messages import Sampling
from llmpq.rows.chat import MessageError, plain_message, template_message
from llmpq.rows.field_names import (
    KNOWN_FIELDS,
    PROMPT_FIELDS,
    SAMPLING_FIELDS,
    SPELLINGS,
    nearest_field,
)
from llmpq.rows.openai_fields import UnsupportedFieldError, without_neutral
from llmpq.rows.own_columns import ColumnError, own_columns
from quant.common.errors import MESSAGE_CHARACTERS, LlmpqError, SpecError
from quant.common.safe_text import printable

Messages = tuple[Mapping[str, Any], ...]
RowInput = str | Sequence[int] | Mapping[str, Any]

_ENVELOPE = frozenset(("custom_id", "method", "url", "body"))  # of an OpenAI Batch line
_IGNORED_IN_BODY = "model"  # the plan says which model it is
_LARGEST = 2**53  # whole numbers up to here are exact in every format
_DEEPEST = 100  # levels of a message's content; three are usual, and Python gives up at a thousand

MAX_ID_CHARACTERS = 1000
"""Length of a `custom_id`: longer than any name, and short enough to be looked up and shown."""

_NUMBERS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)


@dataclass(frozen=True)
class Row:
    """One prompt: text, token ids or chat messages; `sampling` overrides the job's.

    `prompt_options`: how text or messages become tokens, where the row says so: arguments of the
    chat template and of the tokenizer. `columns`: what the row carries beside, which comes out with
    its result.
    """

    custom_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompt_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def content(self) -> Mapping[str, Any]:
        """The prompt and the row's own options, without its id.

        Options of the prompt count only where there are some, so that jobs of older versions can be
        resumed.
        """
        given = {
            "text": self.text,
            "token_ids": self.token_ids,
            "messages": self.messages,
            "prompt_options": self.prompt_options or None,
        }
        return {name: value for name, value in given.items() if value is not None} | {
            "sampling": self.sampling
        }

    @property
    def tokenizing(self) -> dict[str, Any]:
        """The task for `llmpq.tokenizing.worker` that makes tokens of its text or messages."""
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
        """A copy under another id."""
        return dataclasses.replace(self, custom_id=custom_id)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot run, and why; `columns` as of a `Row`."""

    custom_id: str
    error: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


class _RowError(Exception):
    """A mistake in one row."""


def row_from_line(line: bytes, place: str) -> Row | BadRow:
    """The row of one JSON line, without an id where the line gives none.

    A bad row without an id is named by its `place`.
    """
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8 (byte {error.start} of the line)")
    except (ValueError, RecursionError) as error:
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
            fields = {name: value for name, value in body.items() if name != _IGNORED_IN_BODY}
        else:
            _refuse_near_misses(beside, content)
            fields = {name: value for name, value in content.items() if name not in beside}
        return dataclasses.replace(_parse(fields, custom_id), columns=columns)
    except (_RowError, MessageError, UnsupportedFieldError, ColumnError, LlmpqError) as error:
        return BadRow(name, printable(str(error), MESSAGE_CHARACTERS), columns)


def _beside(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a row carries beside the fields that are read, or beside the body of a Batch line."""
    body = content.get("body")
    if isinstance(body, Mapping):
        return {name: value for name, value in content.items() if name not in _ENVELOPE}
    read = KNOWN_FIELDS if body is None else KNOWN_FIELDS - {"body"}
    return {name: value for name, value in content.items() if name not in read}


def _custom_id(content: Mapping[str, Any]) -> str:
    """The id of a row, empty where it has none."""
    custom_id = content.get("custom_id", "")
    if not isinstance(custom_id, str) or (not custom_id and "custom_id" in content):
        raise _RowError(f"custom_id is {custom_id!r:.80}; it must be a non-empty string")
    if len(custom_id) > MAX_ID_CHARACTERS:
        raise _RowError(
            f"custom_id {custom_id!r:.80}… has {len(custom_id)} characters; give it at most "
            f"{MAX_ID_CHARACTERS}"
        )
    if not _is_text(custom_id):
        raise _RowError("custom_id holds half a surrogate pair, which UTF-8 cannot write")
    return custom_id


def _refuse_near_misses(beside: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Raise where a column is probably meant as a field: its row would not run as it should."""
    for name, value in beside.items():
        nearest = None if value is None else nearest_field(name)
        if nearest is None or (nearest == "messages" and "prompt" in content):
            continue  # a row with a prompt may well carry a message
        raise _RowError(
            f"unknown field {name!r:.80}, is {nearest} meant? write that, or give your own column "
            "another name"
        )


def _parse(fields: dict[str, Any], custom_id: str) -> Row:
    """The row of the `fields` that are read, or of a Batch line's body."""
    fields.pop("custom_id", None)
    given = [name for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise _RowError(
            f"a row needs exactly one of prompt and messages, found {given or 'neither'}"
        )
    value = fields.pop(given[0])
    sampling = _sampling_overrides(fields)
    if given[0] == "messages":
        return Row(custom_id, messages=_messages(value), sampling=sampling)
    if isinstance(value, str):
        if not _is_text(value):
            raise _RowError("prompt holds half a surrogate pair, which no tokenizer can read")
        return Row(custom_id, text=value, sampling=sampling)
    return Row(custom_id, token_ids=_token_ids(value), sampling=sampling)


def _sampling_overrides(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if not fields:
        return {}
    nested = fields.get("sampling")
    if nested is not None and not isinstance(nested, Mapping):
        raise _RowError("sampling must be an object")
    beside = {name: value for name, value in fields.items() if name != "sampling"}
    overrides: dict[str, Any] = {}
    for given in (beside, nested or {}):
        for spelling, value in without_neutral(given).items():
            name = SPELLINGS.get(str(spelling), str(spelling))
            if name in overrides and overrides[name] != value:
                raise _RowError(
                    f"{name} is given twice, as {overrides[name]!r:.80} and as {value!r:.80} "
                    f"({spelling}); give it once"
                )
            overrides[name] = value
    unknown = sorted(set(overrides) - set(SAMPLING_FIELDS))
    if unknown:
        nearest = nearest_field(unknown[0])
        hint = f"is {nearest} meant?" if nearest else f"known: {', '.join(SAMPLING_FIELDS)}"
        raise _RowError(f"unknown field {unknown[0]!r:.80}; {hint}")
    if overrides:
        merge_sampling(Sampling(), overrides)
    return overrides


def merge_sampling(base: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """`base` with a row's own fields.

    Raises `SpecError` for a value out of range or of a wrong type.
    """
    if not overrides:
        return base
    changes = dict(overrides)
    if isinstance(changes.get("stop"), str):
        changes["stop"] = (changes["stop"],)
    for name, value in changes.items():
        changes[name] = _typed(name, value)
    return dataclasses.replace(base, **changes)


def _typed(name: str, value: Any) -> Any:
    """`value` as the type that `Sampling.name` has, or `SpecError`; a bias is checked there."""
    if name not in SAMPLING_FIELDS:
        raise SpecError(f"unknown sampling field {name!r}; known: {', '.join(SAMPLING_FIELDS)}")
    if name == "logit_bias":
        return value
    if name == "stop":
        if isinstance(value, list | tuple) and all(
            isinstance(s, str) and _is_text(s) for s in value
        ):
            return tuple(value)
        raise SpecError("stop must be a string or a list of strings")
    wants_bool, wants_float = name == "ignore_eos", name in _NUMBERS
    accepted = {bool} if wants_bool else {int, float} if wants_float else {int}
    fits = type(value) in accepted
    if not fits or abs(value) > _LARGEST:
        kind = "true or false" if wants_bool else "a number" if wants_float else "a whole number"
        limit = f" of at most {_LARGEST}" if fits else ""
        raise SpecError(f"{name} is {value!r:.80}; it must be {kind}{limit}")
    return float(value) if wants_float else value


def _is_text(value: str) -> bool:
    """Whether UTF-8 can write it: JSON lets halves of surrogate pairs through."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(value: Any) -> Messages:
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise _RowError("messages must be a non-empty list of objects with role and content")
    if not _is_writable(value):
        raise _RowError(
            f"messages hold half a surrogate pair, or nest deeper than {_DEEPEST} levels"
        )
    return tuple(plain_message(message, number) for number, message in enumerate(value, start=1))


def _is_writable(value: Any, levels: int = _DEEPEST) -> bool:
    """Whether UTF-8 can write the texts in `value`, and Python can write its depth again."""
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, Mapping):
        value = (*value.keys(), *value.values())
    if not isinstance(value, list | tuple):
        return True
    return levels > 0 and all(_is_writable(each, levels - 1) for each in value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(type(t) is int and 0 <= t < 2**31 for t in value):
        return tuple(value)
    raise _RowError("prompt must be text or a list of token ids (whole numbers of at least 0)")

"""The prompts of a batch: JSONL lines, dictionaries, strings or token lists, checked row by row.

A row that cannot be understood becomes an error row; what makes the whole batch ambiguous (no rows,
an id twice) is an `InputError`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.messages import Sampling
from quant.errors import InputError, LlmpqError

Messages = tuple[Mapping[str, Any], ...]
RowInput = str | Sequence[int] | Mapping[str, Any]

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))
_SPELLINGS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# Fields of an OpenAI Batch body that do not change what is generated here.
_IGNORED_IN_BODY = frozenset({"model", "user", "metadata", "stream"})
_LARGEST = 2**53  # whole numbers up to here are exact in every format
_PROMPT_FIELDS = ("prompt", "messages")


@dataclass(frozen=True)
class Row:
    """One prompt: text, token ids or chat messages; `sampling` overrides the job's."""

    custom_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: Messages | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot run, and why."""

    custom_id: str
    error: str


class _RowError(Exception):
    """What is wrong with one row."""


def read_rows(path: Path) -> tuple[Row | BadRow, ...]:
    """Rows of a JSONL file; raises `InputError` when it is missing, empty or names an id twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read input {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"input {path} is not UTF-8 (byte {error.start})") from error
    rows = [
        _from_line(line, number)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    return _checked(rows, str(path))


def rows_of(items: Iterable[RowInput]) -> tuple[Row | BadRow, ...]:
    """Rows from Python: strings, token lists or dictionaries as in a JSONL line.

    Raises `InputError` for a single string, whose characters nobody means as prompts.
    """
    if isinstance(items, str | bytes):
        raise InputError("rows is one string; pass a list of prompts")
    return _checked([_from_item(item, n) for n, item in enumerate(items)], "rows")


def _checked(rows: list[Row | BadRow], source: str) -> tuple[Row | BadRow, ...]:
    if not rows:
        raise InputError(f"{source}: no prompts; give one JSON object per line with a prompt")
    first_seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if row.custom_id in first_seen:
            raise InputError(
                f"{source}: custom_id {row.custom_id!r} of row {number} stands in row "
                f"{first_seen[row.custom_id]} already; results could not be told apart"
            )
        first_seen[row.custom_id] = number
    return tuple(rows)


def _from_line(line: str, number: int) -> Row | BadRow:
    fallback_id = f"line-{number}"
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(fallback_id, f"line {number} is not JSON: {error}")
    if not isinstance(content, Mapping):
        return BadRow(fallback_id, f"line {number} is not a JSON object")
    return _from_mapping(content, fallback_id)


def _from_item(item: RowInput, number: int) -> Row | BadRow:
    row_id = f"row-{number}"
    return _from_mapping(item if isinstance(item, Mapping) else {"prompt": item}, row_id)


def _from_mapping(content: Mapping[str, Any], fallback_id: str) -> Row | BadRow:
    custom_id = content.get("custom_id", fallback_id)
    if not isinstance(custom_id, str) or not custom_id:
        return BadRow(fallback_id, f"custom_id is {custom_id!r}; it must be a non-empty string")
    if not _is_text(custom_id):
        return BadRow(
            fallback_id, "custom_id holds half a surrogate pair, which UTF-8 cannot write"
        )
    try:
        return _parse(content, custom_id)
    except (_RowError, LlmpqError) as error:
        return BadRow(custom_id, str(error))


def _parse(content: Mapping[str, Any], custom_id: str) -> Row:
    body = content.get("body")
    fields = dict(body if isinstance(body, Mapping) else content)
    if isinstance(body, Mapping):
        fields = {k: v for k, v in fields.items() if k not in _IGNORED_IN_BODY}
    fields.pop("custom_id", None)
    given = [name for name in _PROMPT_FIELDS if name in fields]
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
    nested = fields.get("sampling")
    if nested is not None and not isinstance(nested, Mapping):
        raise _RowError("sampling must be an object")
    merged: dict[str, Any] = {k: v for k, v in fields.items() if k != "sampling"}
    merged |= dict(nested or {})
    merged = {name: value for name, value in merged.items() if value is not None}
    if merged.pop("n", 1) != 1:
        raise _RowError("n must be 1: one answer a row; repeat the row with another seed")
    overrides = {_SPELLINGS.get(str(name), str(name)): value for name, value in merged.items()}
    unknown = sorted(set(overrides) - set(_SAMPLING_FIELDS))
    if unknown:
        raise _RowError(f"unknown field {unknown[0]!r}; known: {', '.join(_SAMPLING_FIELDS)}")
    merge_sampling(Sampling(), overrides)
    return overrides


def merge_sampling(base: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """`base` with a row's own fields; raises `SpecError` for a value out of range or of a wrong
    type.
    """
    changes = dict(overrides)
    if isinstance(changes.get("stop"), str):
        changes["stop"] = (changes["stop"],)
    for name, value in changes.items():
        changes[name] = _typed(name, value)
    return dataclasses.replace(base, **changes)


def _typed(name: str, value: Any) -> Any:
    """`value` as the type that `Sampling.name` has, or a row error."""
    if name == "stop":
        if isinstance(value, list | tuple) and all(
            isinstance(s, str) and _is_text(s) for s in value
        ):
            return tuple(value)
        raise _RowError("stop must be a string or a list of strings")
    wants_bool, wants_float = name == "ignore_eos", name in ("temperature", "top_p")
    accepted = {bool} if wants_bool else {int, float} if wants_float else {int}
    if type(value) not in accepted or abs(value) > _LARGEST:
        kind = "true or false" if wants_bool else "a number" if wants_float else "a whole number"
        raise _RowError(f"{name} is {value!r}; it must be {kind}")
    return float(value) if wants_float else value


def _is_text(value: str) -> bool:
    """Whether UTF-8 can write it: JSON lets halves of surrogate pairs through."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _messages(value: Any) -> Messages:
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise _RowError("messages must be a non-empty list of objects with role and content")
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and all(type(t) is int and 0 <= t < 2**31 for t in value):
        return tuple(value)
    raise _RowError("prompt must be text or a list of token ids (whole numbers of at least 0)")

"""Results of a run, one a row, and what a row carries to its result beside the fields we read."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

SHOWN_CHARACTERS = 60
"""Length of the text of a result where it is shown in one line."""


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of one row: generated tokens (EOS included) and their text, or `error`.

    `text` is None where the model has no tokenizer. `columns`: what the row carried beside the
    fields that are read, under names that no field here has; before it, of a chat with a model that
    reasons, the `reasoning_content` of its answer, and of one with tools its `tool_calls`, which
    `text` is without; `logprobs` and `prompt_logprobs` of a row that asks for them; of a row with
    several answers all `generations`, of which the other fields have the first. `prompt_tokens`:
    those of its prompt, None of a row that could not run.
    """

    custom_id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_tokens: int | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RESULT_FIELDS} | dict(self.columns)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.custom_id!r}, error={_shortened(self.error)!r})"
        text = None if self.text is None else _shortened(self.text)
        tokens = len(self.token_ids)
        return f"Result({self.custom_id!r}, {text!r}, {tokens} tokens, {self.finish_reason!r})"

    def _repr_html_(self) -> str:
        from llmpq.report.notebook import result_html

        return result_html(self.as_dict())

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False)


_NOT_WRITTEN = ("columns", "prompt_tokens")

RESULT_FIELDS = tuple(each.name for each in fields(Result) if each.name not in _NOT_WRITTEN)
"""Names of the fields that every result has."""

REASONING = "reasoning_content"
"""Name of the column of what a model has reasoned before its answer, None where it has not."""

CALLS = "tool_calls"
"""Name of the column of the calls in an answer, in OpenAI's form, None where there is none."""

GENERATIONS = "generations"
"""Name of the column of all answers of a row that has several (`n`), null where one failed."""

LOGPROBS = "logprobs"
"""Name of the column of the log-probabilities of an answer's tokens, in OpenAI's form."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""Name of the column of those of the prompt's tokens, in vLLM's form."""

FINGERPRINT = "fingerprint"
"""Name of the field that a row of an output has beside them."""


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


MADE_COLUMNS = (REASONING, CALLS, LOGPROBS, PROMPT_LOGPROBS, GENERATIONS)
"""Columns that an answer brings, where its row asks for them."""

_TAKEN = frozenset((*RESULT_FIELDS, *MADE_COLUMNS, FINGERPRINT))
"""Names that a row of results has itself."""

PREFIX = "input_"
"""Stands before an own column of such a name: a reference answer `text` becomes `input_text`."""

_DEEPEST = 100  # as of messages: Python gives up at a thousand levels
_LARGEST_BITS = 10_000  # of a whole number: Python writes no more than 4300 digits
_PLAIN = frozenset((str, int, bool, dict, list, type(None)))
_MISSING = ("NAType", "NaTType")  # of pandas
_AS_TEXT = (Decimal, UUID, timedelta)


class RowError(ValueError):
    """A row that cannot run, or that carries what a result could not; the text says why."""


def own_columns(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The columns of `given` under the names and with the values that a result carries.

    Times become text by ISO 8601, decimals text, bytes base64, NaN null. Raises `RowError` for
    what JSON cannot hold, and for two columns of one name.
    """
    columns: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not name or not is_writable(name):
            raise RowError(f"the name of its column {name!r:.80} is no text; give it one")
        shown = PREFIX + name if name in _TAKEN else name
        if shown in columns or (shown != name and shown in given):
            raise RowError(
                f"its column {name!r} would come out as {shown!r}, as results have a {name!r} of "
                f"their own, and there is a column {shown!r} already; rename one of them"
            )
        try:
            columns[shown] = json_value(value)
        except RowError as error:
            raise RowError(f"its column {name!r:.80} {error}") from error
    return columns


def plain_value(value: Any) -> Any:
    """A value of numpy as Python's; None for those by which tables mark what is missing."""
    if type(value) in _PLAIN:
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    is_nan = isinstance(value, float) and value != value
    return None if is_nan or type(value).__name__ in _MISSING else value


def whole_number(value: Any) -> Any:
    """`value` with 3.0 as 3: pandas writes whole numbers so where others of their column lack."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_value(value: Any, levels: int = _DEEPEST) -> Any:
    """`value` as JSON has it; raises `RowError` where it has no form of it."""
    if isinstance(value, str):
        if not is_writable(value):
            raise RowError("holds half a surrogate pair, which UTF-8 cannot write")
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(value)
    if levels == 0:
        raise RowError(f"nests deeper than {_DEEPEST} levels; write it as text")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and is_writable(name) for name in value):
            raise RowError("has an object with a name that is no text; give it one")
        return {str(name): json_value(each, levels - 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each, levels - 1) for each in value]
    plain = plain_value(value)
    return _as_text(value) if plain is value else json_value(plain, levels - 1)


def _number(value: float) -> int | float | None:
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_BITS:
            raise RowError("is a number of thousands of digits; write it as text")
        return int(value)
    if math.isinf(value):
        raise RowError(f"is {value}, which JSON cannot write; leave it out, or write it as text")
    return None if math.isnan(value) else float(value)


def _as_text(value: Any) -> str | None:
    """The text of a value that tables and Python have, and JSON has not."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise RowError(
        f"is of type {type(value).__name__}, which JSON has not; give text, a number, a list or an "
        "object"
    )


def is_writable(value: str) -> bool:
    """Whether UTF-8 can write it: JSON lets halves of surrogate pairs through."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

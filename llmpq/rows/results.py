"""Results of a run, one a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SHOWN_CHARACTERS = 60
"""Length of the text of a result where it is shown in one line."""


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of one row: generated tokens (EOS included) and their text, or `error`.

    `text` is None where the model has no tokenizer. `columns`: what the row carried beside the
    fields that are read, under names that no field here has; before it, of a chat with a model that
    reasons, the `reasoning_content` of its answer, which `text` is without. `prompt_tokens`: those
    of its prompt, None of a row that could not run.
    """

    custom_id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_tokens: int | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, and after them the row's own columns."""
        return {name: getattr(self, name) for name in RESULT_FIELDS} | dict(self.columns)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.custom_id!r}, error={_shortened(self.error)!r})"
        text = None if self.text is None else _shortened(self.text)
        tokens = len(self.token_ids)
        return f"Result({self.custom_id!r}, {text!r}, {tokens} tokens, {self.finish_reason!r})"

    def _repr_html_(self) -> str:
        from llmpq.notebook import result_html

        return result_html(self.as_dict())

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict(), ensure_ascii=False)


_NOT_WRITTEN = ("columns", "prompt_tokens")

RESULT_FIELDS = tuple(each.name for each in fields(Result) if each.name not in _NOT_WRITTEN)
"""Names of the fields that every result has."""

REASONING = "reasoning_content"
"""Name of the column of what a model has reasoned before its answer, None where it has not."""

FINGERPRINT = "fingerprint"
"""Name of the field that a row of an output has beside them."""


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"

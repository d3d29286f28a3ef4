"""Results of a run, one a row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 60
"""Length of the text of a result where it is shown in one line."""


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of one row: generated tokens (EOS included) and their text, or `error`.

    `text` is None where the model has no tokenizer.
    """

    custom_id: str
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return dict(vars(self))

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


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"

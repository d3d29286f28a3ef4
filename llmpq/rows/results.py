"""Results of a run, one a row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
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

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

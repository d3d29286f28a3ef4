"""Rows with several answers (`n`): how many they want, and the answers in their one result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from actors.messages import Request
from llmpq.rows.results import PROMPT_LOGPROBS, Result
from llmpq.rows.row import Row


class Wanted(NamedTuple):
    """How many answers a row wants, and what the names begin with that they are drawn by."""

    answers: int
    drawn_by: str

    @classmethod
    def by(cls, row: Row) -> Wanted:
        """What `row` wants: drawn as over HTTP, by its own `seed` and the number of the answer, or
        else by the row's id too.
        """
        return cls(row.answers, "" if "seed" in row.sampling else f"{row.custom_id}-")

    def requests(self, request: Request) -> Iterator[Request]:
        """The requests that are computed; greedy ones would be all the same, so there is one. The
        first alone tells of the prompt, which all have.
        """
        count = 1 if request.sampling.temperature == 0 else self.answers
        for number in range(count):
            yield replace(request, draw_id=f"{self.drawn_by}{number}")
            request = replace(request, prompt_logprobs=None)

    def failure(self, answers: Sequence[Result]) -> Result | None:
        """The first of the `answers` that failed, with an error that says which one it is."""
        for number, answer in enumerate(answers, start=1):
            if answer.error is not None:
                error = f"answer {number} of {self.answers}: {answer.error}"
                return replace(answer, error=error)
        return None

    def content(self, answers: Sequence[Result]) -> list[dict[str, Any]]:
        """The column of all answers: those that were computed, the only one for each."""
        copies = self.answers // len(answers)
        return [
            {
                "index": index,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                **{name: v for name, v in answer.columns.items() if name != PROMPT_LOGPROBS},
            }
            for index, answer in enumerate([*answers] * copies)
        ]

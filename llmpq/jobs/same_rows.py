"""Rows that ask for the same as another: how many there are, and results that they share."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmpq.jobs.file_format import json_value
from llmpq.jobs.result_lines import is_openai_line, result_identity
from llmpq.rows.results import (
    GENERATIONS,
    LOGPROBS,
    MADE_COLUMNS,
    PROMPT_LOGPROBS,
    REASONING,
    Result,
)
from llmpq.rows.row import Row
from llmpq.rows.sampling import merge_sampling

MOST_COUNTED = 4096
"""Fingerprints that are counted at once: shares of many rows are known to 2 %."""

WORTH_SAYING = 0.05
"""Share of same rows from which a job tells of them."""

_HASH_HEX = 12
_LARGEST = 16**_HASH_HEX


class SameShare:
    """Counts of rows by fingerprint, of those fingerprints that are small enough to fit."""

    def __init__(self) -> None:
        self._below = _LARGEST
        self._counts: dict[int, int] = {}

    def add(self, fingerprint: str) -> None:
        number = int(fingerprint[-_HASH_HEX:], 16)
        if number >= self._below:
            return
        self._counts[number] = self._counts.get(number, 0) + 1
        while len(self._counts) > MOST_COUNTED:
            self._below //= 2
            kept = ((each, count) for each, count in self._counts.items() if each < self._below)
            self._counts = dict(kept)

    @property
    def share(self) -> float:
        """Share of rows that come after another of the same fingerprint."""
        rows = sum(self._counts.values())
        return 1 - len(self._counts) / rows if rows else 0.0


def is_greedy(row: Row, sampling: Any) -> bool:
    """Whether the answer does not hang on the row's id, by which tokens are drawn."""
    return merge_sampling(sampling, row.sampling).temperature == 0


class SharedResults:
    """Results of rows that others are the same as, in a temporary file without a name.

    `repeated`: the fingerprints that several rows have.
    """

    def __init__(self, repeated: Iterable[str]) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("BEGIN")
        self._database.execute(
            "CREATE TABLE shared (fingerprint TEXT PRIMARY KEY, taken INT, result TEXT) "
            "WITHOUT ROWID"
        )
        rows = ((fingerprint,) for fingerprint in repeated)
        self._database.executemany("INSERT INTO shared VALUES (?, 0, NULL)", rows)

    def take(self, fingerprint: str) -> bool:
        """Whether a row is to be computed: the first of its fingerprint, or the only one."""
        take = "UPDATE shared SET taken = 1 WHERE fingerprint = ? AND NOT taken"
        if self._database.execute(take, (fingerprint,)).rowcount:
            return True
        known = "SELECT 1 FROM shared WHERE fingerprint = ?"
        return self._database.execute(known, (fingerprint,)).fetchone() is None

    def note_finished(self, lines: Iterable[object]) -> None:
        """Keep results of an earlier run, as they stand in its output; errors are not shared."""
        for line in lines:
            found = result_identity(line)
            row = json_value(line) if isinstance(line, bytes) else line
            if found is None or found.failed or not isinstance(row, Mapping):
                continue
            if is_openai_line(row):
                row = _as_row(row)
            names = ("text", "token_ids", "finish_reason")
            values: dict[str, Any] = {name: row.get(name) for name in names}
            result = Result(found.custom_id, **values, columns=_made(row))
            result = replace(result, prompt_tokens=row.get("prompt_tokens"))
            self.keep(found.fingerprint, result)

    def keep(self, fingerprint: str, result: Result) -> None:
        """Keep the result of a row that others are the same as; of another one nothing."""
        content = {name: getattr(result, name) for name in _KEPT}
        content["columns"] = _made(result.columns)
        self._database.execute(
            "UPDATE shared SET taken = 1, result = ? WHERE fingerprint = ? AND result IS NULL",
            (json.dumps(content), fingerprint),
        )

    def of(self, row: Row, fingerprint: str) -> Result | None:
        """The result of a row that is the same as one which has been computed."""
        found = self._database.execute(
            "SELECT result FROM shared WHERE fingerprint = ? AND result IS NOT NULL", (fingerprint,)
        ).fetchone()
        if found is None:
            return None
        content = json.loads(found[0])
        made = Result(**{**content, "custom_id": row.custom_id})
        if made.error is not None:
            error = f"as row {content['custom_id']!r:.80}, which is the same: {made.error}"
            return replace(made, error=error, columns=row.columns)
        return replace(
            made, token_ids=tuple(made.token_ids), columns={**made.columns, **row.columns}
        )

    def close(self) -> None:
        self._database.close()


_KEPT = ("custom_id", "text", "token_ids", "finish_reason", "error", "prompt_tokens")


def _as_row(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of results that an answered line of OpenAI's form was made of; of token ids, which
    such a line has only without a text, the number alone.
    """
    body = line["response"]["body"]
    (choice, *others), usage = body["choices"], body["usage"]  # of greedy rows all are alike
    answers = 1 + len(others)
    message = choice.get("message", {})
    token_ids = choice.get("token_ids")
    row = {
        "text": None if token_ids is not None else message.get("content", choice.get("text")),
        "token_ids": token_ids or [0] * (usage["completion_tokens"] // answers),
        "finish_reason": choice["finish_reason"],
        **{name: message[name] for name in MADE_COLUMNS if name in message},
        **({LOGPROBS: choice[LOGPROBS]} if choice.get(LOGPROBS) else {}),
    }
    several = {GENERATIONS: [{"index": index, **row} for index in range(answers)]}
    found = body.get(PROMPT_LOGPROBS) or choice.get(PROMPT_LOGPROBS)
    of_prompt = {} if found is None else {PROMPT_LOGPROBS: found}
    row |= {**(several if others else {}), **of_prompt}
    return {**row, "prompt_tokens": usage["prompt_tokens"]}


def _made(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that an answer has brought; lists are JSON text in a row of CSV."""
    made = {name: columns[name] for name in MADE_COLUMNS if name in columns}
    for name in MADE_COLUMNS:
        if name != REASONING and isinstance(made.get(name), str):
            made[name] = json_value(made[name])
    return made

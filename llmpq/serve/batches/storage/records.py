"""What is known of a file and of a batch, on disk and on the wire."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINISHED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

WINDOW = "24h"
WINDOW_S = 24 * 3600
KEPT_S = 30 * 24 * 3600
"""Seconds that files for batches, and finished batches, are kept: OpenAI's 30 days for files."""

_DIGITS = "[0-9a-f]{32}"
FILE_ID = re.compile(f"file-{_DIGITS}")
BATCH_ID = re.compile(f"batch_{_DIGITS}")


def new_file_id() -> str:
    """An id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """An id that nobody can guess."""
    return f"batch_{secrets.token_hex(16)}"


@dataclass(frozen=True)
class StoredFile:
    """A file; `number` tells the order in which they came, times are in seconds.

    `digest`: of the content that was sent, None where it is not known. `problem`: what is wrong
    with the file.
    """

    id: str
    number: int
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    expires_at: int | None
    digest: str | None = None
    problem: str | None = None

    @property
    def content(self) -> Mapping[str, object]:
        """OpenAI's JSON object."""
        shown = asdict(self)
        for name in ("number", "digest", "problem"):
            del shown[name]
        status = "error" if self.problem else "processed"
        return shown | {"object": "file", "status": status, "status_details": self.problem}


@dataclass(frozen=True)
class Counts:
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Problem:
    """Why a batch fails as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class Batch:
    """A batch; times are in seconds, None for what has not happened.

    `number` tells the order in which they came, `output_s` how long its output is kept. One that
    has `problems` fails as soon as it is looked at.
    """

    id: str
    number: int
    endpoint: Endpoint
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    completion_window: str = WINDOW
    metadata: Mapping[str, str] | None = None
    output_s: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[Problem, ...] = ()
    request_counts: Counts = field(default_factory=Counts)

    def turned(self, status: Status, now_s: int) -> Batch:
        """The batch in another state."""
        at = f"{status}_at"
        times = {at: now_s} if at in _FIELDS else {}
        return replace(self, status=status, **times)  # type: ignore[arg-type]

    @property
    def is_finished(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in FINISHED

    @property
    def finished_at(self) -> int | None:
        """When it came to its end."""
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((time for time in times if time is not None), None)

    @property
    def content(self) -> Mapping[str, object]:
        """OpenAI's JSON object."""
        shown = asdict(self)
        problems = shown.pop("problems")
        for name in ("number", "output_s"):
            del shown[name]
        errors = {"object": "list", "data": list(problems)} if problems else None
        return {"object": "batch", **shown, "errors": errors}


_FIELDS = frozenset(each.name for each in fields(Batch))

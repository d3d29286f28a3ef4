"""The fields of requests about files and batches, with their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmpq.serve.batches.storage.records import Endpoint
from llmpq.serve.wire.errors import bad_request
from llmpq.serve.wire.parsing import checked

LEAST_KEPT_S = 3600
MOST_KEPT_S = 30 * 24 * 3600
"""Bounds of `expires_after.seconds`, as in OpenAI's interface."""

MOST_PAIRS = 16
"""Pairs of `metadata`, as in OpenAI's interface."""

_PREFIX = "expires_after["
_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """How long a file is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)]


class UploadFields(BaseModel):
    """The fields beside a file that is sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    purpose: str
    expires_after: ExpiresAfter | None = None


class BatchBody(BaseModel):
    """A request for a batch."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Name, _Value] | None, Field(max_length=MOST_PAIRS)] = None
    output_expires_after: ExpiresAfter | None = None


class BatchPage(BaseModel):
    """A page of the list of batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilePage(BaseModel):
    """A page of the list of files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def upload_fields(given: Mapping[str, str]) -> UploadFields:
    """The fields of a form; 400 for one that is wrong, and for another purpose than batches."""
    flat = {name: value for name, value in given.items() if not name.startswith(_PREFIX)}
    nested = {
        name.removeprefix(_PREFIX).removesuffix("]"): value
        for name, value in given.items()
        if name.startswith(_PREFIX)
    }
    content = flat | ({"expires_after": nested} if nested else {})
    found = checked(UploadFields, content, ExpiresAfter)
    if found.purpose != "batch":
        raise bad_request(
            f"purpose is {found.purpose!r:.40}; files are taken for batches alone: give 'batch'",
            "purpose",
        )
    return found


def batch_body(content: Mapping[str, object]) -> BatchBody:
    """The fields of a batch; 400 naming the first that is wrong."""
    given = {name: value for name, value in content.items() if value is not None}
    return checked(BatchBody, given, ExpiresAfter)

"""Upload of a file: a form of several parts (RFC 7578), written to disk as it comes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from llmpq.serve.access import SERVER_ERROR, ApiError, bad_request, queue_full
from llmpq.serve.batches.records import KEPT_S, StoredFile
from llmpq.serve.batches.store import MOST_RECORDS, Arrival, BatchStore
from llmpq.serve.bodies import checked
from llmpq.serve.service import Service
from quant.common.units import GIB, MIB

MOST_FIELDS = 16
"""Fields of a form: those that are known are fewer."""

FIELD_BYTES = 1024
"""Most bytes of a field."""

_FILE = "file"


class MultipartForm:
    """Takes the bytes of a form; raises `ApiError` (400) for one that is malformed.

    `fields` have their texts, the file's part its content and `filename`, which is None before the
    part has come.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._is_file = False
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._file = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                },
            )
        except FormParserError as error:
            raise bad_request(f"the form's boundary cannot be used: {error}") from error

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in the next bytes of the form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise bad_request(f"the form is malformed: {error}") from error
        found = bytes(self._file)
        self._file.clear()
        return found

    def close(self) -> None:
        """Raise unless the form is complete."""
        if self._parser.state != MultipartState.END:
            raise bad_request("the form is cut off before its last boundary")

    def _begin_part(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise bad_request("a part of the form has no name")
        self._is_file = self._name == _FILE
        if self._name in self.fields or (self._is_file and self.filename is not None):
            raise bad_request("a field of the form is given twice", self._name)
        if not self._is_file:
            return
        if b"filename" not in options:
            raise bad_request("file is a text; send it as a file, with a name", _FILE)
        self.filename = options[b"filename"].decode("utf-8", "replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES:
            raise bad_request(f"a field has more than {FIELD_BYTES} bytes", self._name)

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= MOST_FIELDS:
            raise bad_request(f"the form has more than {MOST_FIELDS} fields")
        self.fields[self._name] = self._value.decode("utf-8", "replace")


LEAST_KEPT_S = 3600
MOST_KEPT_S = 30 * 24 * 3600
"""Bounds of `expires_after.seconds`, as in OpenAI's interface."""

_EXPIRES = "expires_after["

MOST_UPLOADS = 8
"""Files that arrive at once."""

FORM_BYTES = 2 * MOST_FIELDS * FIELD_BYTES
"""Bytes of a form beside its file, at most."""

DROPPED_BYTES = 16 * MIB
"""Bytes of a file that are read, and dropped, after it was refused."""

_BLOCK_BYTES = MIB
_MOST_NAME = 255
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)]


class UploadFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    purpose: str
    expires_after: ExpiresAfter | None = None


class Uploads:
    def __init__(self, store: BatchStore, service: Service) -> None:
        self._store = store
        self._service = service
        self._arriving = 0

    async def take(self, request: Request, arrival: Arrival) -> StoredFile:
        """The file of a request, written aside; it still has to be kept.

        Raises `ApiError`: 400 for what is malformed, 413, 408 and 429 beyond the limits, 415 for
        what is no form.
        """
        if len(self._store.files) >= MOST_RECORDS:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"there are {MOST_RECORDS} files; delete some that are not needed any more",
            )
        if self._arriving >= MOST_UPLOADS:
            raise queue_full(self._service.options.retry_after_s)
        self._arriving += 1
        try:
            return await self._read(request, arrival)
        finally:
            self._arriving -= 1

    async def _read(self, request: Request, arrival: Arrival) -> StoredFile:
        async with aclosing(self._parts(request)) as parts:
            try:
                form = MultipartForm(_boundary(request.headers.get("content-type", "")))
                length = request.headers.get("content-length", "")
                if length.isdecimal() and int(length[:20]) > self._file_limit + FORM_BYTES:
                    raise self._too_large()
                await self._write(parts, form, arrival)
            except ApiError:
                await _drop(parts)
                raise
        form.close()
        fields = upload_fields(form.fields)
        if form.filename is None:
            raise bad_request("file is missing; send one", "file")
        if not arrival.bytes:
            raise bad_request("file is empty; send one line a request", "file")
        return self._described(form.filename, fields)

    async def _write(
        self, parts: AsyncGenerator[bytes, None], form: MultipartForm, arrival: Arrival
    ) -> None:
        block = bytearray()
        async for part in parts:
            data = form.feed(part)
            arrival.count(len(data))
            if arrival.bytes > self._file_limit:
                raise self._too_large()
            block += data
            if len(block) >= _BLOCK_BYTES:
                self._check_room()
                await asyncio.to_thread(arrival.write, bytes(block))
                block.clear()
        self._check_room()
        await asyncio.to_thread(arrival.write, bytes(block))

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        within_s = self._service.options.body_s
        stream = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(within_s):
                    part = await anext(stream, None)
            except TimeoutError as error:
                raise ApiError(
                    HTTPStatus.REQUEST_TIMEOUT, f"nothing of the file came for {within_s:g} s"
                ) from error
            if part is None:
                return
            yield part

    def _check_room(self) -> None:
        most = int(self._store.options.batch_dir_limit_gib * GIB)
        if self._store.stored_bytes > most:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"with this file the server would hold {self._store.stored_bytes} bytes, more than "
                f"{most}; delete files that are not needed any more",
            )

    @property
    def _file_limit(self) -> int:
        return int(self._store.options.file_limit_mib * MIB)

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the file has more than {self._file_limit} bytes; split it",
        )

    def _described(self, name: str, fields: UploadFields) -> StoredFile:
        now_s = int(self._service.clock())
        kept_s = KEPT_S if fields.expires_after is None else fields.expires_after.seconds
        shown = os.path.basename(name.replace("\\", "/"))[:_MOST_NAME] or "file"
        return StoredFile("", 0, 0, now_s, shown, "batch", now_s + kept_s)


async def _drop(parts: AsyncGenerator[bytes, None]) -> None:
    """Read on for a while: a client that is still sending may not look at an answer before."""
    left = DROPPED_BYTES
    with suppress(ApiError):
        async for part in parts:
            left -= len(part)
            if left < 0:
                return


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind.lower() != b"multipart/form-data":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type is {content_type or 'missing'!r:.80}; send multipart/form-data",
        )
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise bad_request("Content-Type has no boundary")
    return boundary


def disk_error(error: OSError) -> ApiError:
    """507: what is told where the disk fails."""
    why = "the server's disk is full" if error.errno in _FULL else "the server's disk has failed"
    message = f"{why} ({error.strerror}); nothing was changed: try again later"
    return ApiError(HTTPStatus.INSUFFICIENT_STORAGE, message, code="no_room", type=SERVER_ERROR)


def upload_fields(given: Mapping[str, str]) -> UploadFields:
    """The fields of a form; 400 for one that is wrong, and for another purpose than batches."""
    flat = {name: value for name, value in given.items() if not name.startswith(_EXPIRES)}
    nested = {
        name.removeprefix(_EXPIRES).removesuffix("]"): value
        for name, value in given.items()
        if name.startswith(_EXPIRES)
    }
    content = flat | ({"expires_after": nested} if nested else {})
    found = checked(UploadFields, content, ExpiresAfter)
    if found.purpose != "batch":
        raise bad_request(
            f"purpose is {found.purpose!r:.40}; files are taken for batches alone: give 'batch'",
            "purpose",
        )
    return found

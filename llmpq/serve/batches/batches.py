"""What clients ask of files and batches, at OpenAI's addresses."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from llmpq.serve.access import ApiError, bad_request, check_origin, not_found, queue_full
from llmpq.serve.batches.records import WINDOW_S, Batch, Endpoint, StoredFile
from llmpq.serve.batches.runner import Runner
from llmpq.serve.batches.store import MOST_RECORDS, Arrival, BatchStore
from llmpq.serve.batches.uploading import ExpiresAfter, Uploads, disk_error
from llmpq.serve.bodies import checked
from llmpq.serve.service import Service

MOST_UNFINISHED = 100
"""Batches that wait or run at once."""

MOST_PAIRS = 16
"""Pairs of `metadata`, as in OpenAI's interface."""

_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
T = TypeVar("T")
RecordT = TypeVar("RecordT", Batch, StoredFile)


class BatchBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Name, _Value] | None, Field(max_length=MOST_PAIRS)] = None
    output_expires_after: ExpiresAfter | None = None


class BatchPage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilePage(BatchPage):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Batches:
    """Files and batches in `store`, over the engine of `service`; all is called in one event loop.

    Methods raise `ApiError`: 404 for what does not exist, 409 where a state does not allow it, 507
    where the disk fails.
    """

    def __init__(self, store: BatchStore, service: Service) -> None:
        self._store = store
        self._service = service
        self._uploads = Uploads(store, service)
        self._runner = Runner(store, service)

    def start(self) -> None:
        self._runner.start()

    async def close(self) -> None:
        await self._runner.close()

    def routes(self) -> APIRouter:
        router = APIRouter(dependencies=[Depends(self._refuse_pages)])
        for method, path, answer in (
            ("POST", "/files", self.upload),
            ("GET", "/files", self.files),
            ("GET", "/files/{file_id}", self.file),
            ("DELETE", "/files/{file_id}", self.delete_file),
            ("GET", "/files/{file_id}/content", self.content),
            ("POST", "/batches", self.create),
            ("GET", "/batches", self.batches),
            ("GET", "/batches/{batch_id}", self.batch),
            ("POST", "/batches/{batch_id}/cancel", self.cancel),
        ):
            router.add_api_route(path, answer, methods=[method])
        return router

    async def _refuse_pages(self, origin: Annotated[str | None, Header()] = None) -> None:
        if self._service.options.api_key is None:
            check_origin(origin)

    async def upload(self, request: Request) -> Response:
        self._service.gate.check_open()
        try:
            with closing(Arrival(self._store)) as arrival:
                described = await self._uploads.take(request, arrival)
                kept = await self._runner.keep(partial(arrival.keep, described))
        except OSError as error:
            raise disk_error(error) from error
        return JSONResponse(kept.content)

    async def file(self, file_id: str) -> Response:
        return JSONResponse(self._file(file_id).content)

    def _file(self, file_id: str) -> StoredFile:
        found = self._store.files.get(file_id)
        is_expired = (
            found is not None
            and found.expires_at is not None
            and found.expires_at <= self._service.clock()
        )
        if found is None or (is_expired and not self._store.users(file_id)):
            raise not_found("file", file_id)
        return found

    async def files(self, request: Request) -> Response:
        page = checked(FilePage, dict(request.query_params))
        found = [each for each in self._store.files if page.purpose in (None, each.purpose)]
        if page.order == "desc":
            found.reverse()
        return _listed(found, page, lambda file: file.content)

    async def content(self, file_id: str) -> Response:
        path = self._store.path(self._file(file_id).id)
        if not path.is_file():  # somebody else has removed it
            raise not_found("content of a file", file_id)
        return FileResponse(path, media_type="application/jsonl")

    async def delete_file(self, file_id: str) -> Response:

        def delete() -> None:
            self._file(file_id)
            users = self._store.users(file_id)
            if users:
                raise ApiError(
                    HTTPStatus.CONFLICT,
                    f"the file {file_id} is the input of {users[0]}, which is not finished; cancel "
                    "that first",
                    code="file_in_use",
                )
            self._store.remove_file(file_id)

        await self._kept(delete)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        content = await self._service.body(request)
        given = {name: value for name, value in content.items() if value is not None}
        body = checked(BatchBody, given, ExpiresAfter)

        def make() -> Batch:
            file = self._store.files.get(body.input_file_id)
            if file is None:
                raise not_found("file", body.input_file_id)
            if file.purpose != "batch":
                raise bad_request(
                    f"the file {file.id} was made by a batch; send one with purpose 'batch'",
                    "input_file_id",
                )
            are_many = len(self._store.unfinished()) >= MOST_UNFINISHED
            if are_many or len(self._store.batches) >= MOST_RECORDS:
                raise queue_full(self._service.options.retry_after_s)
            now_s = int(self._service.clock())
            kept = body.output_expires_after
            batch = Batch(
                f"batch_{secrets.token_hex(16)}",
                self._store.batches.next_number,
                body.endpoint,
                file.id,
                now_s,
                now_s + WINDOW_S,
                metadata=body.metadata,
                output_s=None if kept is None else kept.seconds,
            )
            self._store.batches.put(batch)
            return batch

        self._file(body.input_file_id)
        batch = await self._kept(make)
        self._runner.follow(batch.id)
        return JSONResponse(batch.content)

    async def batch(self, batch_id: str) -> Response:
        return JSONResponse(self._content(self._found(batch_id)))

    async def batches(self, request: Request) -> Response:
        page = checked(BatchPage, dict(request.query_params))
        return _listed(list(self._store.batches)[::-1], page, self._content)

    async def cancel(self, batch_id: str) -> Response:
        def turn() -> Batch:
            batch = self._found(batch_id)
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise ApiError(
                    HTTPStatus.CONFLICT,
                    f"the batch {batch_id} is {batch.status}; it cannot be cancelled any more",
                    code="batch_not_cancellable",
                )
            cancelling = batch.turned("cancelling", int(self._service.clock()))
            self._store.batches.put(cancelling)
            return cancelling

        batch = await self._kept(turn)
        self._runner.end(batch_id)
        return JSONResponse(self._content(batch))

    def _found(self, batch_id: str) -> Batch:
        found = self._store.batches.get(batch_id)
        if found is None:
            raise not_found("batch", batch_id)
        return found

    def _content(self, batch: Batch) -> Mapping[str, object]:
        counts = self._runner.counts.get(batch.id)
        if counts is not None and not batch.is_finished:
            batch = replace(batch, request_counts=counts)
        return batch.content

    async def _kept(self, change: Callable[[], T]) -> T:
        try:
            return await self._runner.keep(change)
        except OSError as error:
            raise disk_error(error) from error


def _listed(
    records: Sequence[RecordT], page: BatchPage, content: Callable[[RecordT], Mapping[str, object]]
) -> Response:
    """The records behind the one that the `page` comes after, and whether there are more."""
    begin = 0
    if page.after is not None:
        places = (place for place, each in enumerate(records) if each.id == page.after)
        begin = next(places, -1) + 1
        if not begin:
            raise not_found("entry", page.after)
    shown = records[begin : begin + page.limit]
    return JSONResponse(
        {
            "object": "list",
            "data": [content(each) for each in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(records) > begin + page.limit,
        }
    )

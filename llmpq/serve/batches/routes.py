"""OpenAI's addresses for files and batches."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from llmpq.serve.access import check_origin
from llmpq.serve.batches.batches import Batches
from llmpq.serve.batches.bodies import BatchPage, FilePage, batch_body
from llmpq.serve.service import Service
from llmpq.serve.wire.parsing import checked


def batch_routes(batches: Batches, service: Service) -> APIRouter:
    """The addresses of `batches`."""

    async def not_from_page(origin: Annotated[str | None, Header()] = None) -> None:
        if service.options.api_key is None:
            check_origin(origin)

    router = APIRouter(dependencies=[Depends(not_from_page)])

    @router.post("/files")
    async def upload(request: Request) -> Response:
        return JSONResponse(await batches.upload(request))

    @router.get("/files")
    async def files(request: Request) -> Response:
        return JSONResponse(batches.files(checked(FilePage, dict(request.query_params))))

    @router.get("/files/{file_id}")
    async def file(file_id: str) -> Response:
        return JSONResponse(batches.file(file_id).content)

    @router.delete("/files/{file_id}")
    async def delete_file(file_id: str) -> Response:
        return JSONResponse(await batches.delete_file(file_id))

    @router.get("/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        return FileResponse(batches.content_path(file_id), media_type="application/jsonl")

    @router.post("/batches")
    async def create(request: Request) -> Response:
        return JSONResponse(await batches.create(batch_body(await service.body(request))))

    @router.get("/batches")
    async def listed(request: Request) -> Response:
        return JSONResponse(batches.batches(checked(BatchPage, dict(request.query_params))))

    @router.get("/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        return JSONResponse(batches.batch(batch_id))

    @router.post("/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        return JSONResponse(await batches.cancel(batch_id))

    return router

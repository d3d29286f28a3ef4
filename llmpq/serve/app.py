"""The application: OpenAI's addresses over one engine."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llmpq.rows.answers import ChatForm, CompletionForm, model_content, models_content
from llmpq.serve.access import check_host, check_key
from llmpq.serve.batches.batches import Batches, batch_routes
from llmpq.serve.service import Service
from llmpq.serve.telemetry.counting import Counting
from llmpq.serve.telemetry.metrics import CONTENT_TYPE
from llmpq.serve.wire.boundary import Boundary
from llmpq.serve.wire.errors import ApiError, ErrorAnswer
from llmpq.serve.wire.parsing import chat_body, completion_body

_COUNTED = ("/v1/completions", "/v1/chat/completions")
"""Addresses whose requests are counted apart."""


def application(service: Service, batches: Batches | None = None) -> FastAPI:
    """The application that answers for `service`, and for `batches` where there are any.

    It has no pages of documentation: those load scripts from elsewhere.
    """

    async def admit(
        authorization: Annotated[str | None, Header()] = None,
        host: Annotated[str, Header()] = "",
    ) -> None:
        check_key(authorization, service.options.api_key)
        if service.options.api_key is None:
            check_host(host)

    app = FastAPI(title="llmpq", openapi_url=None, redirect_slashes=False)
    app.add_middleware(Boundary)
    app.add_middleware(Counting, service.metrics.count_request, _COUNTED)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.include_router(_probes(service))
    app.include_router(_openai(service), prefix="/v1", dependencies=[Depends(admit)])
    if batches is not None:
        routes = batch_routes(batches, service)
        app.include_router(routes, prefix="/v1", dependencies=[Depends(admit)])
    app.include_router(_load(service), dependencies=[Depends(admit)])
    return app


def _probes(service: Service) -> APIRouter:
    """Addresses for whoever keeps the server running; they need no key."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "alive"})

    @router.get("/ready")
    async def ready() -> Response:
        status = service.gate.status
        is_ready = status == "ready"
        code = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": status}, code)

    return router


def _load(service: Service) -> APIRouter:
    """The address of metrics, which tell what others ask for, though no text."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.text(service.engine.queue)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return router


def _openai(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse(models_content(service.names, service.engine.created_s))

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model_content(name, service.engine.created_s))

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = completion_body(await service.body(request))
        return await service.answer(request, body, CompletionForm(body.logprobs is not None))

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = chat_body(await service.body(request))
        return await service.answer(request, body, ChatForm(bool(body.logprobs)))

    return router


def _json(answer: ErrorAnswer) -> Response:
    return JSONResponse(answer.content, answer.status, dict(answer.headers))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.answer)


async def _http_error(request: Request, error: Exception) -> Response:
    """An address or method that does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(ErrorAnswer(error.status_code, message, headers=error.headers or {}))

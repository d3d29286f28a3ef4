"""The application: OpenAI's addresses over one engine."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Annotated, cast

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llmpq.rows.answers import model_content, models_content
from llmpq.serve.access import ApiError, Boundary, Gate, check_host, check_key
from llmpq.serve.batches.batches import Batches
from llmpq.serve.bodies import chat_body, completion_body
from llmpq.serve.metrics import CONTENT_TYPE, Counting
from llmpq.serve.responses import ResponseJob, response_body
from llmpq.serve.service import Job, Service
from quant.common.errors import SpecError, StageLostError

_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Addresses whose requests are counted apart."""

_NOT_SERVED = {
    "/audio/speech": "sound",
    "/audio/transcriptions": "sound",
    "/classify": "classification",
    "/embeddings": "embeddings",
    "/images/generations": "images",
    "/moderations": "moderation",
    "/rerank": "ranking",
    "/score": "scores of pairs",
}
"""Addresses of other servers that clients may ask for, and what they are for."""


def application(service: Service, batches: Batches | None = None) -> FastAPI:
    """The application of `service` and `batches`, without documentation, which loads scripts."""

    async def admit(
        authorization: Annotated[str | None, Header()] = None, host: Annotated[str, Header()] = ""
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
        app.include_router(batches.routes(), prefix="/v1", dependencies=[Depends(admit)])

    @app.get("/metrics", dependencies=[Depends(admit)])  # they tell what others ask for, no text
    async def metrics() -> Response:
        text = service.metrics.text(service.engine.queue)
        return Response(text, headers={"content-type": CONTENT_TYPE})

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
        return await service.answer(request, body, Job)

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = chat_body(await service.body(request))
        return await service.answer(request, body, Job)

    @router.post("/responses")
    async def responses(request: Request) -> Response:
        given = await service.body(request)
        return await service.answer(request, response_body(given), partial(ResponseJob, given))

    for path, what in _NOT_SERVED.items():
        router.add_api_route(path, _not_served(what), methods=["GET", "POST"])

    return router


def _not_served(what: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        message = f"llmpq generates text and has no {what}; ask a server that has"
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="not_served")

    return refuse


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.content, error.status, dict(error.headers))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    told = ApiError(error.status_code, message, headers=error.headers or {})
    return await _api_error(request, told)


CLOSING_S = 5
"""Seconds for connections to close once the answers have ended or been given up."""

LOOK_TICKS = 5  # tenths of a second from one look at the load to the next
HEADER_BYTES = 64 << 10  # most of a request's headers

_LOG = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, or until the engine is lost for good.

    Then it refuses new requests (503) and lets the answers that have begun finish, for `drain_s` at
    most; a second signal gives them up. `serve` and `run` return, so that what was started for the
    engine can be ended; they raise `StageLostError` where that is lost. `batches` run meanwhile,
    and are left where they are.
    """

    def __init__(self, service: Service, batches: Batches | None = None) -> None:
        options = self._options = service.options
        super().__init__(
            uvicorn.Config(
                application(service, batches),
                host=options.host,
                port=options.port,
                http="h11",  # it bounds the headers
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=options.connection_limit + 1,  # it refuses one that reaches it
                timeout_graceful_shutdown=CLOSING_S,
                h11_max_incomplete_event_size=HEADER_BYTES,
            )
        )
        self._service = service
        self._gate: Gate = service.gate
        self._batches = batches
        self._ends_s: float | None = None
        self._is_engine_lost = False
        self.on_listening: Callable[[int], None] = lambda port: None
        """Called with the port when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; raises `SpecError` where the address cannot be had.

        The system ends connections that leave what was sent unread for too long. Closing them would
        wait until it is read, and answers that are complete wait in buffers, too.
        """
        options = self._options
        try:
            await super().startup(sockets=sockets)
        except SystemExit as error:  # after a line in the log that has the system's words
            raise SpecError(
                f"port {options.port} of {options.host} cannot be had; choose another port or host"
            ) from error
        if self._batches is not None:
            self._batches.start()
        self.on_listening(self.bound_port)
        for listening in self._listening:
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                most_ms = round(options.stall_s * 1000)
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets)
        if self._is_engine_lost:
            raise StageLostError("the engine is lost for good; start the server again")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, once batches have stopped."""
        if self._batches is not None:
            await self._batches.close()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Set when to end: later at the first signal, now at the second."""
        is_first = self._ends_s is None
        self._end_within(self._options.drain_s if is_first else 0.0)

    def _end_within(self, seconds: float) -> None:
        self._gate.close()
        self._ends_s = time.monotonic() + seconds

    async def on_tick(self, counter: int) -> bool:
        """Tell uvicorn, ten times a second, whether to end, and metrics of the load."""
        if counter % LOOK_TICKS == 0:
            self._service.metrics.observe(self._service.engine.queue)
        if self._ends_s is None and self._service.engine.status == "failed":
            _LOG.error(
                "the engine is lost for good: the server ends when the answers under way have "
                "ended; batches go on when it is started again"
            )
            self._is_engine_lost = True
            self._end_within(self._options.drain_s)
        if self._ends_s is not None:
            if time.monotonic() >= self._ends_s and self._gate.answers:
                _LOG.warning("%d answers did not finish in time", self._gate.answers)
                self._gate.give_up()
                self.should_exit = True
            self.should_exit |= not self._gate.answers
        return await super().on_tick(counter)

    @property
    def bound_port(self) -> int:
        """The port that it listens on, once it has started."""
        return cast(int, self._listening[0].getsockname()[1])

    @property
    def _listening(self) -> list[socket.socket]:
        return [each for server in self.servers for each in server.sockets]

"""A layer around the application that counts its requests."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmpq.serve.telemetry.answer_timer import CANCELLED
from llmpq.serve.wire.streaming import CLIENT_GONE

_OTHER = "other"


class Counting:
    """Tells `count` the address and status of every request once its answer has ended.

    The status is "cancelled" where the answer was not sent to its end. `addresses` are told by
    name, all others together: clients choose them.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[str, str], None], addresses: Collection[str]
    ) -> None:
        self._app = app
        self._count = count
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_whole = CANCELLED, False

        async def send_counted(message: Message) -> None:
            nonlocal status, is_whole
            await send(message)
            if message["type"] == "http.response.start":
                status = str(message["status"])
            else:
                is_whole = not message.get("more_body", False) and status != str(CLIENT_GONE)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            path = scope["path"] if scope["path"] in self._addresses else _OTHER
            self._count(path, status if is_whole else CANCELLED)

"""Who is let in, and when: the API key, the length of the queue, and the end of the server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmpq.serve.api_errors import (
    bad_request,
    from_page,
    other_host,
    queue_full,
    unavailable,
    wrong_key,
)
from llmpq.serve.engine import Engine, EngineStatus
from llmpq.serve.options import ServeOptions, is_of_this_machine

_NOT_READY: dict[EngineStatus, str] = {
    "loading": "the model is loading; try again when /ready answers 200",
    "draining": "the server takes no more requests",
    "failed": "the engine has failed; the server's log says more",
}


class Gate:
    """Lets requests in while there is room for the answers that they ask for.

    `answers`: those that are being worked on. `background`: generations that the engine has beside
    them, which take nobody's place in the queue. `on_room` is called when answers have ended. After
    `close` nothing new is let in, and after `give_up` they end.
    """

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._engine = engine
        self._options = options
        self.answers = 0
        self.background = 0
        self.on_room: Callable[[], None] = lambda: None
        self.is_closed = False
        self.given_up = asyncio.Event()

    def close(self) -> None:
        """Let nothing in from now on."""
        self.is_closed = True

    def give_up(self) -> None:
        """Let no more time to the answers that are being worked on."""
        self.close()
        self.given_up.set()

    @property
    def status(self) -> EngineStatus:
        """Whether requests are taken."""
        status = self._engine.status
        return "draining" if self.is_closed and status != "failed" else status

    def check_open(self) -> None:
        """Raise `ApiError` (503) unless requests are taken."""
        if self.status != "ready":
            raise unavailable(_NOT_READY[self.status])

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Let a request in that asks for so many answers.

        Raises `ApiError`: 503 as `check_open`, 429 where too many wait, 400 where they could never
        wait together.
        """
        self.check_open()
        self.check_number(answers)
        queue = self._engine.queue
        present = max(self.answers, queue.waiting + queue.running - self.background)
        if present + answers > self._most:
            raise queue_full(self._options.retry_after_s)
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers
            self.on_room()

    def check_number(self, answers: int) -> None:
        """Raise `ApiError` (400) for more answers than could ever wait together."""
        if answers > self._most:
            raise bad_request(
                f"the request asks for {answers} answers (prompts times n), this server takes at "
                f"most {self._most} at once; split it",
                "n",
            )

    @property
    def _most(self) -> int:
        return self._engine.queue.slots + self._options.queue_limit


def check_key(authorization: str | None, api_key: str | None) -> None:
    """Raise `ApiError` (401) unless the header has the key, or none is needed.

    How long it takes tells nothing of the key, nor of its length.
    """
    if api_key is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    is_same = hmac.compare_digest(_digest(given.strip()), _digest(api_key))
    if not is_same or scheme.lower() != "bearer":
        raise wrong_key()


def check_host(host: str) -> None:
    """Raise `ApiError` (403) unless `host`, of a request's header, is a name of this machine.

    A web page can have its own name lead to 127.0.0.1, and so reach a server that has no key; the
    browser then sends that name.
    """
    name = host.strip().lower()
    if not name.endswith("]"):  # of an IPv6 address without port
        name = name.rpartition(":")[0] or name
    if not is_of_this_machine(name.removeprefix("[").removesuffix("]")):
        raise other_host(host)


def check_origin(origin: str | None) -> None:
    """Raise `ApiError` (403) for a request that a web page sends.

    Browsers name the page's origin in requests that a page may send to any site without being
    asked, such as forms with files.
    """
    if origin is not None:
        raise from_page(origin)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()

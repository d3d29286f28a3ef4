"""Requests on their way to the stages: those that wait until others have run, and a gate."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from actors.messages import Request
from quant.common.errors import InputError

MEMORY_BYTES = 64 << 20
"""Bytes of requests in memory; more of them lie in a temporary file."""


class WaitingRequest(NamedTuple):
    """A request, and the own columns of its row."""

    request: Request
    columns: Mapping[str, Any]


_WAITING: TypeAdapter[WaitingRequest] = TypeAdapter(WaitingRequest)


class WaitingRequests:
    """Requests in the order in which they were added; `prompts` of them wait.

    They lie in memory, or where they are many in a temporary file.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115
        self.prompts = 0

    def add(self, request: Request, columns: Mapping[str, Any]) -> None:
        """Add a request and its row's own columns; `InputError` where the disk takes no more."""
        try:
            self._file.write(_WAITING.dump_json(WaitingRequest(request, columns)) + b"\n")
        except OSError as error:
            raise _no_room(self.prompts, error) from error
        self.prompts += 1

    def take_all(self) -> Iterator[WaitingRequest]:
        """The requests, each once; nothing may be added any more. Raises `InputError` where the
        disk has lost them.
        """
        for line in self._lines():
            self.prompts -= 1
            yield _WAITING.validate_json(line)

    def _lines(self) -> Iterator[bytes]:
        try:
            self._file.seek(0)  # writes what the file still holds back
            yield from self._file
        except OSError as error:
            raise _no_room(self.prompts, error) from error

    def close(self) -> None:
        """Forget the requests."""
        self._file.close()


def _no_room(prompts: int, error: OSError) -> InputError:
    return InputError(
        f"cannot keep {prompts} long prompts in {tempfile.gettempdir()}: {error.strerror}; free "
        "space there, or set TMPDIR to another folder"
    )


class Gate(Iterator[Request | None]):
    """Iterator over `requests` that ends when it is closed; the others stay in `requests`."""

    def __init__(self, requests: Iterator[Request | None]) -> None:
        self._requests = requests
        self.is_closed = False

    def __next__(self) -> Request | None:
        if self.is_closed:
            raise StopIteration
        return next(self._requests)

    def close(self) -> None:
        """Let no more requests through."""
        self.is_closed = True

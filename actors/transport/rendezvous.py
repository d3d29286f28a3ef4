"""Where the ends of links find each other: on a board that one of them keeps and the others reach
by calls of Ray's, under its token and TLS. Nothing listens for them.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any, Protocol

import ray
import torch.distributed

from quant.common.errors import DeviceError

CONTROL = "control"  # an actor's thread of its own, for calls that must not wait for its work
LOOPBACK = "127.0.0.1"

KEYS_OF_AN_END = 8  # gloo writes one, as read off its calls
KEY_CHARACTERS = 64
VALUE_BYTES = 4096  # gloo's has about 150 bytes, and few for each further end
VALUE_BYTES_OF_AN_END = 256
_LOOK_S = 0.01


@dataclass(frozen=True)
class Meeting:
    """The node address of each end, how long they try to meet, and the `secret` that they know each
    other by.
    """

    hosts: tuple[str, ...]
    timeout_s: float
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def address(self, index: int) -> str:
        """Where end `index` listens: for its own machine alone where all ends are on one."""
        return self.hosts[index] if len(set(self.hosts)) > 1 else LOOPBACK

    def proof(self, source: int, target: int) -> bytes:
        """What end `source` shows to end `target`, and nobody who lacks the secret."""
        return hmac.digest(self.secret, f"{source} to {target}".encode(), "sha256")


class Board(Protocol):
    """A place where the ends tell each other their addresses."""

    def put(self, key: str, value: bytes) -> None:
        """Keep `value` for the others."""

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those of `keys` that are there."""


class LocalBoard:
    """A board in this process, for any thread; it takes no more than gloo's ends need."""

    def __init__(self, ends: int) -> None:
        self._most_keys = KEYS_OF_AN_END * ends
        self._most_bytes = VALUE_BYTES + VALUE_BYTES_OF_AN_END * ends
        self._values: dict[str, bytes] = {}
        self._lock = Lock()

    def put(self, key: str, value: bytes) -> None:
        """Keep `value`; raises `DeviceError` where it is too much, or there already."""
        with self._lock:
            if len(value) > self._most_bytes or len(key) > KEY_CHARACTERS:
                raise DeviceError(
                    f"stages meet by values of at most {self._most_bytes} bytes, and one has "
                    f"{len(value)}; choose transport='ray'"
                )
            if key in self._values or len(self._values) >= self._most_keys:
                raise DeviceError(
                    f"stages meet by at most {self._most_keys} values, each told once, and "
                    f"{key!r} comes on top; choose transport='ray'"
                )
            self._values[key] = value

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those of `keys` that are there."""
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}


class BoardKeeper:
    """An actor's part: the board of the latest meeting, for who knows its secret."""

    _kept: tuple[Meeting, LocalBoard] | None = None

    @ray.method(concurrency_group=CONTROL)
    def open_meeting(self, meeting: Meeting) -> None:
        """Begin with an empty board; the one of an earlier meeting is gone."""
        self._kept = meeting, LocalBoard(len(meeting.hosts))

    @ray.method(concurrency_group=CONTROL)
    def board_put(self, secret: bytes, key: str, value: bytes) -> None:
        """As `Board.put`."""
        self.board(secret).put(key, value)

    @ray.method(concurrency_group=CONTROL)
    def board_read(self, secret: bytes, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Board.read`."""
        return self.board(secret).read(keys)

    def board(self, secret: bytes) -> LocalBoard:
        """The board of the meeting with this `secret`; raises `DeviceError` where it is over."""
        if self._kept is None or not hmac.compare_digest(self._kept[0].secret, secret):
            raise DeviceError("the meeting of the stages is over, another one may have begun")
        return self._kept[1]

    def close_meeting(self) -> None:
        """Forget the board."""
        self._kept = None


class RemoteBoard:
    """The board of `meeting` that the actor `keeper` has."""

    def __init__(self, keeper: Any, meeting: Meeting) -> None:
        self._keeper, self._meeting = keeper, meeting

    def put(self, key: str, value: bytes) -> None:
        """As `Board.put`."""
        self._get(self._keeper.board_put.remote(self._meeting.secret, key, value))

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Board.read`."""
        found: dict[str, bytes] = self._get(
            self._keeper.board_read.remote(self._meeting.secret, list(keys))
        )
        return found

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._meeting.timeout_s)
        except ray.exceptions.RayError as error:
            raise DeviceError(f"the first stage does not answer at the meeting: {error}") from error


_Store: Any = getattr(torch.distributed, "Store", object)  # missing in a torch without it


class MeetingStore(_Store):  # type: ignore[misc]
    """A board as the store by which gloo's ends exchange addresses; it calls these three alone."""

    def __init__(self, board: Board, timeout_s: float) -> None:
        super().__init__()
        self._board, self._timeout_s = board, timeout_s

    def set(self, key: str, value: bytes) -> None:
        """Tell the others."""
        self._board.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        """What another has told, or tells within the time."""
        self.wait([key])
        return self._board.read([key])[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all `keys` are there; raises `DeviceError` when the time is up."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        ends_s = time.monotonic() + limit_s
        while len(self._board.read(keys)) < len(keys):
            if time.monotonic() > ends_s:
                raise DeviceError("not all of them came")
            time.sleep(_LOOK_S)

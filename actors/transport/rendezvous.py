"""Exchanging the addresses of links before they connect, without a port that listens for it.

The first process keeps a small store of keys and values, which the others reach by calls of Ray's,
under Ray's token and TLS.
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

CONTROL = "control"  # an actor's own thread for calls that must not wait for its work
LOOPBACK = "127.0.0.1"

KEYS_OF_AN_END = 8  # gloo writes one, as its calls show
KEY_CHARACTERS = 64
VALUE_BYTES = 4096  # gloo's has about 150 bytes, and few for each further end
VALUE_BYTES_OF_AN_END = 256
_LOOK_S = 0.01


@dataclass(frozen=True)
class Rendezvous:
    """The node address of each end, the seconds within which they must connect, and the `secret`
    by which they know each other.
    """

    hosts: tuple[str, ...]
    timeout_s: float
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def address(self, index: int) -> str:
        """The address on which end `index` listens: loopback where all ends are on one machine."""
        return self.hosts[index] if len(set(self.hosts)) > 1 else LOOPBACK

    def proof(self, source: int, target: int) -> bytes:
        """The bytes by which end `source` shows end `target` that it knows the secret."""
        return hmac.digest(self.secret, f"{source} to {target}".encode(), "sha256")


class Board(Protocol):
    """A store of keys and values in which the ends tell each other their addresses."""

    def put(self, key: str, value: bytes) -> None:
        """Keep `value` for the others."""

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those `keys` that are there."""


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
                    f"stages exchange values of at most {self._most_bytes} bytes, and one has "
                    f"{len(value)}; choose transport='ray'"
                )
            if key in self._values or len(self._values) >= self._most_keys:
                raise DeviceError(
                    f"stages exchange at most {self._most_keys} values, each told once, and "
                    f"{key!r} comes on top; choose transport='ray'"
                )
            self._values[key] = value

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those `keys` that are there."""
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}


class BoardKeeper:
    """The part of an actor that keeps the board of the latest rendezvous, for those who know its
    secret.
    """

    _kept: tuple[Rendezvous, LocalBoard] | None = None

    @ray.method(concurrency_group=CONTROL)
    def open_rendezvous(self, rendezvous: Rendezvous) -> None:
        """Begin with an empty board; the one of an earlier rendezvous is gone."""
        self._kept = rendezvous, LocalBoard(len(rendezvous.hosts))

    @ray.method(concurrency_group=CONTROL)
    def board_put(self, secret: bytes, key: str, value: bytes) -> None:
        self.board(secret).put(key, value)

    @ray.method(concurrency_group=CONTROL)
    def board_read(self, secret: bytes, keys: Sequence[str]) -> dict[str, bytes]:
        return self.board(secret).read(keys)

    def board(self, secret: bytes) -> LocalBoard:
        """The board of the rendezvous with this `secret`; raises `DeviceError` where it is over."""
        if self._kept is None or not hmac.compare_digest(self._kept[0].secret, secret):
            raise DeviceError("the rendezvous of the stages is over, another one may have begun")
        return self._kept[1]

    def close_rendezvous(self) -> None:
        """Forget the board."""
        self._kept = None


class RemoteBoard:
    """The board of `rendezvous` that the actor `keeper` has."""

    def __init__(self, keeper: Any, rendezvous: Rendezvous) -> None:
        self._keeper, self._rendezvous = keeper, rendezvous

    def put(self, key: str, value: bytes) -> None:
        self._get(self._keeper.board_put.remote(self._rendezvous.secret, key, value))

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = self._get(
            self._keeper.board_read.remote(self._rendezvous.secret, list(keys))
        )
        return found

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._rendezvous.timeout_s)
        except ray.exceptions.RayError as error:
            raise DeviceError(f"the first stage does not answer its neighbours: {error}") from error


_Store: Any = getattr(torch.distributed, "Store", object)  # missing in a torch without it


class RendezvousStore(_Store):  # type: ignore[misc]
    """A board as the store by which gloo's ends exchange addresses.

    Gloo calls only these methods.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        super().__init__()
        self._board, self._timeout_s = board, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._board.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, which another end may still have to put there."""
        self.wait([key])
        return self._board.read([key])[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there; raises `DeviceError` when the time is up."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        ends_s = time.monotonic() + limit_s
        while len(self._board.read(keys)) < len(keys):
            if time.monotonic() > ends_s:
                raise DeviceError("not all of them came")
            time.sleep(_LOOK_S)

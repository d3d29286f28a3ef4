"""Point-to-point links between the processes of the stages over torch.distributed's gloo, which
exchange their addresses without a port that listens for it.

The first process keeps a small store of keys and values, which the others reach by calls of Ray's,
under Ray's token and TLS.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from actors.transport.message_format import host_memory, message_bytes
from actors.transport.nccl import GpuLink
from actors.transport.rendezvous import Rendezvous
from quant.common.errors import DeviceError, StageLostError

KEYS_OF_AN_END = 8  # gloo writes one, as its calls show
KEY_CHARACTERS = 64
VALUE_BYTES = 4096  # gloo's has about 150 bytes, and few for each further end
VALUE_BYTES_OF_AN_END = 256
_LOOK_S = 0.01


class Board(Protocol):
    """A store of keys and values in which the ends tell each other their addresses."""

    def put(self, key: str, value: bytes) -> None: ...

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
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}


_Store: Any = getattr(torch.distributed, "Store", object)  # missing in a torch without it


class RendezvousStore(_Store):  # type: ignore[misc]
    """A board as the store by which gloo's ends exchange addresses: gloo calls these methods."""

    def __init__(self, board: Board, timeout_s: float) -> None:
        super().__init__()
        self._board, self._timeout_s = board, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._board.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])  # another end may still have to put it there
        return self._board.read([key])[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there; raises `DeviceError` when the time is up."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        ends_s = time.monotonic() + limit_s
        while len(self._board.read(keys)) < len(keys):
            if time.monotonic() > ends_s:
                raise DeviceError("not all of them came")
            time.sleep(_LOOK_S)


FRAME_BYTES = 4 * 2**20
"""A message goes in frames of at most this size: 512 tokens of 4,096 fp16 values are one frame."""

_FRAMES_AHEAD = 2  # receives that are posted: one message is computed while the next one arrives
_STOP = torch.zeros(64, dtype=torch.uint8)  # states a length of 0, as no message does
_PROOF = 1  # the tag of proofs, messages have 0
_FOR_EVER = timedelta(days=365)


def gloo_group(store: Any, index: int, ends: int, address: str, timeout: timedelta) -> Any:
    """The group of end `index`, which listens on `address` and meets the others at `store`."""
    distributed: Any = torch.distributed
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, index, ends, options)


def check_invited(
    group: Any,
    ends: str,
    own: int,
    others: Iterable[int],
    secret: bytes,
    wait: Callable[[Any], None],
) -> None:
    """Check that the `others` know the `secret`, and show them that end `own` does: gloo takes
    whoever comes first under their numbers.

    `ends` is what they are called, "stage" or "rank", in proofs too and in the `DeviceError` of one
    that was not invited. `wait` waits for gloo's work.
    """

    def proof(source: int, target: int) -> bytes:
        return hmac.digest(secret, f"{ends} {source} to {target}".encode(), "sha256")

    others = sorted(others)
    shown = [torch.frombuffer(bytearray(proof(own, each)), dtype=torch.uint8) for each in others]
    sending = [group.send([each], other, _PROOF) for each, other in zip(shown, others, strict=True)]
    for other in others:
        expected = proof(other, own)
        found = torch.zeros(len(expected), dtype=torch.uint8)
        wait(group.recv([found], other, _PROOF))
        if not hmac.compare_digest(found.numpy().tobytes(), expected):
            raise DeviceError(f"who came as {ends} {other} is not the one that was invited")
    for work in sending:
        wait(work)


class Links:
    """The connections of stage `index` to all others, which find each other by the `board` of their
    rendezvous.

    Raises `DeviceError` where torch was built without gloo, when they do not connect in time, or
    one does not prove that it was invited.
    """

    def __init__(self, rendezvous: Rendezvous, index: int, board: Board) -> None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_gloo_available()):
            raise DeviceError("this torch has no gloo; choose transport='ray'")
        self.index, self.stages = index, len(rendezvous.hosts)
        self._senders: list[Sender] = []
        address = rendezvous.address(index)
        timeout = timedelta(seconds=rendezvous.timeout_s)
        # Python's part of the store goes with its last reference here, and gloo keeps the other
        self._store = RendezvousStore(board, rendezvous.timeout_s)
        try:
            self._group = gloo_group(self._store, index, self.stages, address, timeout)
            neighbours = {(index + step) % self.stages for step in (1, -1)} - {index}
            check_invited(
                self._group,
                "stage",
                index,
                neighbours,
                rendezvous.secret,
                lambda work: work.wait(timeout),
            )
        except (RuntimeError, DeviceError) as error:
            raise DeviceError(
                f"stage {index} on {address} did not meet the others within "
                f"{rendezvous.timeout_s:g} s: {error}"
            ) from error

    def sender(self, to: int) -> Sender:
        self._senders.append(Sender(self._group, to, self.stages))
        return self._senders[-1]

    def gpu_link(self, other: int) -> GpuLink | None:
        """The link from this GPU to that of `other`; None where messages have it all."""
        return None

    def stop(self) -> None:
        """Tell the stages that receive from this one that no more comes; for any thread."""
        for sender in self._senders:
            sender.stop()

    def receiver(
        self,
        source: int,
        timeout_s: float | None = None,
        bytes_of: Callable[[Tensor], int] = message_bytes,
    ) -> Receiver:
        """A receiver; each message may take `timeout_s`, `bytes_of` has its length by frame 0."""
        return Receiver(self._group, source, timeout_s, bytes_of)


class Sender:
    """Sends without waiting, and keeps the memory of a message until its send is over.

    At most `2 * stages` micro-batches are under way, so that earlier sends are known to be over.
    """

    def __init__(self, group: Any, to: int, stages: int) -> None:
        self._group, self._to = group, to
        self._kept = 2 * stages
        self._sending: deque[list[tuple[Any, Tensor]]] = deque()
        self._lock = Lock()  # the frames of a message stay together

    def send(self, message: Tensor) -> None:
        """Start sending `message` `[bytes]`, which must not change afterwards."""
        if len(self._sending) > self._kept:
            for work, _ in self._sending.popleft():
                _wait(work, self._to, _FOR_EVER)
        frames = message.split(FRAME_BYTES)
        with self._lock:
            self._sending.append([(self._send(frame), frame) for frame in frames])

    def stop(self) -> None:
        """Send the end of all messages; a receiver that is lost needs none."""
        with self._lock, suppress(StageLostError):
            self._sending.append([(self._send(_STOP), _STOP)])

    def _send(self, frame: Tensor) -> Any:
        try:
            return self._group.send([frame], self._to, 0)
        except RuntimeError as error:
            raise lost(self._to, error) from error


class Receiver:
    """Receives into buffers that are posted ahead, so that transfer overlaps computation."""

    def __init__(
        self, group: Any, source: int, timeout_s: float | None, bytes_of: Callable[[Tensor], int]
    ) -> None:
        self._group, self._source, self._bytes_of = group, source, bytes_of
        self._timeout = _FOR_EVER if timeout_s is None else timedelta(seconds=timeout_s)
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._in_use: Tensor | None = None
        for _ in range(_FRAMES_AHEAD):
            self._post(host_memory(FRAME_BYTES))

    def _post(self, buffer: Tensor) -> None:
        try:
            self._posted.append((self._group.recv([buffer], self._source, 0), buffer))
        except RuntimeError as error:
            raise lost(self._source, error) from error

    def receive(self) -> Tensor:
        """The next message `[bytes]`, valid until the next call; or raise `StageLostError`."""
        if self._in_use is not None:
            self._post(self._in_use)
            self._in_use = None
        first = self._frame()
        size = self._bytes_of(first)
        if not size:
            raise StageLostError(f"stage {self._source} broke the run off")
        if size <= FRAME_BYTES:
            self._in_use = first
            return first[:size]
        whole = host_memory(size)
        for index, part in enumerate(whole.split(FRAME_BYTES)):
            frame = self._frame() if index else first
            part.copy_(frame[: len(part)])
            self._post(frame)
        return whole

    def _frame(self) -> Tensor:
        work, buffer = self._posted.popleft()
        _wait(work, self._source, self._timeout)
        return buffer


def _wait(work: Any, stage: int, timeout: timedelta) -> None:
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise lost(stage, error) from error


def lost(stage: int, error: object) -> StageLostError:
    return StageLostError(f"stage {stage} cannot be reached, its process died or hangs: {error}")

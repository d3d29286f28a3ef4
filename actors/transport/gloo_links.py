"""Point-to-point links between the processes of the stages over torch.distributed's gloo."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from actors.transport.message_format import host_memory, message_bytes
from actors.transport.rendezvous import Board, Rendezvous, RendezvousStore
from quant.common.errors import DeviceError, StageLostError

FRAME_BYTES = 4 * 2**20
"""A message goes in frames of at most this size: 512 tokens of 4,096 fp16 values are one frame."""

_FRAMES_AHEAD = 2  # receives that are posted: one message is computed while the next one arrives
_STOP = torch.zeros(64, dtype=torch.uint8)  # states a length of 0, as no message does
_PROOF = 1  # the tag of proofs, messages have 0
_FOR_EVER = timedelta(days=365)


def check_available() -> None:
    """Raise `DeviceError` where torch was built without gloo."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise DeviceError("this torch has no gloo; choose transport='ray'")


class Links:
    """The connections of stage `index` to all others, which find each other by the `board` of their
    rendezvous.

    Raises `DeviceError` when they do not connect in time, or one does not prove that it was
    invited.
    """

    def __init__(self, rendezvous: Rendezvous, index: int, board: Board) -> None:
        check_available()
        self.index, self.stages = index, len(rendezvous.hosts)
        self._senders: list[Sender] = []
        address = rendezvous.address(index)
        distributed: Any = torch.distributed
        gloo = distributed.ProcessGroupGloo
        # Python's part of the store goes with its last reference here, and gloo keeps the other
        self._store = RendezvousStore(board, rendezvous.timeout_s)
        try:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=rendezvous.timeout_s)
            self._group = gloo(self._store, index, self.stages, options)
            self._check_neighbours(rendezvous)
        except (RuntimeError, DeviceError) as error:
            raise DeviceError(
                f"stage {index} on {address} did not meet the others within "
                f"{rendezvous.timeout_s:g} s: {error}"
            ) from error

    def _check_neighbours(self, rendezvous: Rendezvous) -> None:
        """Check that both neighbours know the secret: gloo takes whoever comes first under their
        numbers.
        """
        timeout = timedelta(seconds=rendezvous.timeout_s)
        near = {(self.index + step) % self.stages for step in (1, -1)} - {self.index}
        shown = {other: _bytes(rendezvous.proof(self.index, other)) for other in near}
        sending = [self._group.send([proof], other, _PROOF) for other, proof in shown.items()]
        for other in sorted(near):
            expected = rendezvous.proof(other, self.index)
            found = torch.zeros(len(expected), dtype=torch.uint8)
            self._group.recv([found], other, _PROOF).wait(timeout)
            if not hmac.compare_digest(found.numpy().tobytes(), expected):
                raise DeviceError(f"who came as stage {other} is not the one that was invited")
        for work in sending:
            work.wait(timeout)

    def sender(self, to: int) -> Sender:
        """A sender of messages to stage `to`."""
        self._senders.append(Sender(self._group, to, self.stages))
        return self._senders[-1]

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
        """A receiver of messages from stage `source`, each of which may take `timeout_s`.

        `bytes_of` gives the length of a message by its first frame.
        """
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
            raise _lost(self._to, error) from error


class Receiver:
    """Receives into buffers that are posted ahead, so that transfer overlaps computation."""

    def __init__(
        self,
        group: Any,
        source: int,
        timeout_s: float | None,
        bytes_of: Callable[[Tensor], int],
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
            raise _lost(self._source, error) from error

    def receive(self) -> Tensor:
        """The next message `[bytes]`; valid until the next call.

        Raises `StageLostError` when none comes, and what `bytes_of` raises.
        """
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
        raise _lost(stage, error) from error


def _lost(stage: int, error: RuntimeError) -> StageLostError:
    return StageLostError(f"stage {stage} cannot be reached, its process died or hangs: {error}")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

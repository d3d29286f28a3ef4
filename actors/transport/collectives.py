"""What the ranks of a tensor-parallel stage do together: sums, messages from rank 0, gathering.

Ranks in processes of their own are connected by torch.distributed. Orders go over gloo in host
memory. Tensors go over NCCL where ranks compute on CUDA devices, each on another one, and else over
gloo too, whose sums are taken in float32: so few numbers are added that their transfer costs less
than what 16 bit would lose.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from actors.transport.gloo_links import check_invited, gloo_group
from actors.transport.nccl import Communicator, broadcast_from, nccl_group
from actors.transport.rendezvous import LOOPBACK
from quant.common.errors import DeviceError, StageLostError


class RankGroup:
    """The `degree` ranks of a stage, seen from number `rank` of them: 0 is the stage, the others
    follow it. As it is here, that of a stage which is not divided.

    All ranks call the same methods in the same order with tensors of the same shapes and types. An
    error of one rank, or its end, makes the calls of the others raise `StageLostError`.
    """

    rank = 0
    degree = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same on each; `tensor` may be overwritten."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0; those of the others are overwritten."""
        return tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The bytes of rank 0; the others give None."""
        assert data is not None, "rank 0 has what it sends"
        return data

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0 gets all ranks' `[rows, widths[rank]]` as `[rows, sum(widths)]`, others None."""
        return tensor

    def check(self) -> None:
        """Raise `StageLostError` where what was computed may lack the part of another rank."""

    def close(self) -> None:
        """Leave the others, whose calls fail from now on."""


ALONE = RankGroup()


@dataclass(frozen=True)
class Meeting:
    """A file in the `folder`, which only the user may read that the processes run as, and the
    `secret` by which the ranks know each other. No port listens for them, as a store of torch's
    that is asked over TCP would on all addresses.
    """

    folder: Path
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @classmethod
    def on_this_node(cls) -> Meeting:
        """A meeting in a new folder; `end` removes it."""
        return cls(Path(tempfile.mkdtemp(prefix="llmpq-ranks-")))

    def end(self) -> None:
        """Remove the folder; NCCL looks into its store for as long as its ranks are together."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def join(self, rank: int, degree: int, device: torch.device) -> DistributedGroup:
        """The group of this rank, once all of them have come; `DeviceError` where they do not."""
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(self.folder / "store"), degree)
        return DistributedGroup(Seat(rank, degree, device, secret=self.secret), store, self.folder)


_FOR_EVER = timedelta(days=365)
"""Ranks wait so long for the next order: a stage without requests is no fault. The end of a process
is noticed all the same, as its connection closes."""

_LOOK_S = 0.1
"""Ranks on GPUs look so often whether all are together."""


@dataclass(frozen=True)
class Seat:
    """The place of one rank: its number, that of all ranks, and the device that it computes on.

    Each call ends within `timeout_s`, but for waiting for the next order. By the `secret` the ranks
    know each other.
    """

    rank: int
    degree: int
    device: torch.device
    timeout_s: float = 600.0
    secret: bytes = field(default=b"", repr=False)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)


class DistributedGroup(RankGroup):
    """The group of the rank in `seat`, which meets the others at `store`.

    A rank that leaves removes the `folder` in which they have met. On GPUs the others look for it:
    NCCL's kernels would wait for the one that has left, and the host for them. Raises `DeviceError`
    when they do not connect in time, or one was not invited.
    """

    def __init__(self, seat: Seat, store: Any, folder: Path | None = None) -> None:
        self.rank, self.degree = seat.rank, seat.degree
        self._seat, self._folder = seat, folder
        self._on_gpu = seat.device.type != "cpu"
        try:
            distributed: Any = torch.distributed
            own_store = distributed.PrefixStore("gloo", store)
            self._host = gloo_group(own_store, seat.rank, seat.degree, LOOPBACK, seat.timeout)
            others = set(range(seat.degree)) - {seat.rank}
            check_invited(self._host, "rank", seat.rank, others, seat.secret, self._wait)
            self._nccl = self._communicator(store) if self._on_gpu else None
        except (RuntimeError, StageLostError, DeviceError) as error:
            raise DeviceError(
                f"rank {seat.rank} of {seat.degree} on {LOOPBACK} did not meet the others "
                f"within {seat.timeout_s:g} s: {error}"
            ) from error
        if self._on_gpu and folder is not None:
            Thread(target=self._watch, args=(folder,), daemon=True).start()

    def _communicator(self, store: Any) -> Communicator:
        seat = self._seat
        group = nccl_group(store, seat.rank, seat.degree, seat.device, seat.timeout)
        found = Communicator(group, self._lost)
        first = torch.zeros(1, device=seat.device)
        found.complete(lambda tensors: tensors.allreduce([first]), seat.timeout_s)
        return found

    def _watch(self, folder: Path) -> None:
        """End NCCL's calls once a rank has left, whatever waits for them then."""
        while folder.exists():
            time.sleep(_LOOK_S)
        if self._nccl is not None:
            self._nccl.abort()

    def check(self) -> None:
        if self._nccl is not None:
            self._nccl.check()

    def close(self) -> None:
        self._host = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._nccl is not None:
            self._nccl.abort()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        own = tensor if self._on_gpu else tensor.float()
        total = own.contiguous()
        self._on_device(lambda tensors: tensors.allreduce([total]))
        return total.to(tensor.dtype)

    def broadcast(self, tensor: Tensor) -> Tensor:
        sent = tensor.contiguous()
        if sent.numel():
            self._on_device(lambda tensors: tensors.broadcast([sent], broadcast_from(0)))
        return sent

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """By way of the host: their number, then they themselves."""
        length = torch.tensor([0 if data is None else len(data)])
        self._wait(self._host.broadcast([length], broadcast_from(0, _FOR_EVER)), _FOR_EVER)
        content = torch.empty(int(length), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if content.numel():
            self._wait(self._host.broadcast([content], broadcast_from(0)))
        return content.numpy().tobytes()

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        widest = max(widths)
        own = F.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()  # equal widths are sent
        parts = [torch.empty_like(own) for _ in widths] if self.rank == 0 else []
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._on_device(lambda tensors: tensors.gather([parts] if parts else [], [own], options))
        if not parts:
            return None
        return torch.cat([part[..., :w] for part, w in zip(parts, widths, strict=True)], -1)

    def _on_device(self, start: Callable[[Any], Any]) -> None:
        """Have what is computed next wait for the work on tensors that `start` begins."""
        if self._nccl is None:
            self._wait(start(self._host))
        else:
            self._nccl.begin(start)

    def _wait(self, work: Any, limit: timedelta | None = None) -> None:
        try:
            work.wait(limit or self._seat.timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: object) -> StageLostError:
        return StageLostError(f"rank {self.rank} of {self.degree} lost another one: {error}")

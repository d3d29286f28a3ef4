"""Where the ranks of a stage meet: a file of their node, and a secret.

No port listens for them, as a store of torch's that is asked over TCP would on all addresses.
"""

from __future__ import annotations

import hmac
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from quant.common.errors import DeviceError, StageLostError


@dataclass(frozen=True)
class Meeting:
    """The `folder`, which only the user may read that the processes run as, and the `secret` by
    which the ranks know each other.
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
    """The place of one rank: its number, that of all ranks, the device that it computes on, and the
    address on which it listens to the others. Each call ends within `timeout_s`, but for waiting
    for the next order. By the `secret` the ranks know each other.
    """

    rank: int
    degree: int
    device: torch.device
    address: str = "127.0.0.1"
    timeout_s: float = 600.0
    secret: bytes = field(default=b"", repr=False)

    def proof(self, source: int, target: int) -> bytes:
        """The bytes by which rank `source` shows rank `target` that it knows the secret."""
        return hmac.digest(self.secret, f"rank {source} to {target}".encode(), "sha256")


class DistributedGroup:
    """The group of the rank in `seat`, which meets the others at `store`.

    A rank that leaves removes the `folder` in which they have met. On GPUs the others look for it:
    NCCL's kernels would wait for the one that has left, and the host for them. Raises `DeviceError`
    when they do not connect in time, or one was not invited.
    """

    def __init__(self, seat: Seat, store: Any, folder: Path | None = None) -> None:
        self._seat, self._folder = seat, folder
        self._on_gpu = seat.device.type != "cpu"
        self._ending = Lock()
        try:
            self._host = _gloo(seat, store)
            self._check_others()
            self._nccl = _nccl(seat, store) if self._on_gpu else None
            first = torch.zeros(1, device=seat.device)
            self._wait((self._nccl or self._host).allreduce([first]))  # at which NCCL connects
        except (RuntimeError, StageLostError, DeviceError) as error:
            raise DeviceError(
                f"rank {seat.rank} of {seat.degree} on {seat.address} did not meet the others "
                f"within {seat.timeout_s:g} s: {error}"
            ) from error
        if self._on_gpu and folder is not None:
            Thread(target=self._watch, args=(folder,), daemon=True).start()

    def _watch(self, folder: Path) -> None:
        """End NCCL's calls once a rank has left, whatever waits for them then."""
        while folder.exists():
            time.sleep(_LOOK_S)
        self._abort()

    def _abort(self) -> None:
        with self._ending:
            nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()

    def check(self) -> None:
        """Raise `StageLostError` where a rank has left: NCCL's calls without it have ended too."""
        if self._on_gpu and self._nccl is None:
            raise self._lost("it has left")

    def _check_others(self) -> None:
        """Check that every other rank knows the secret."""
        seat = self._seat
        others = [rank for rank in range(seat.degree) if rank != seat.rank]
        shown = {each: _bytes(seat.proof(seat.rank, each)) for each in others}
        sending = [self._host.send([proof], each, 0) for each, proof in shown.items()]
        for other in others:
            expected = seat.proof(other, seat.rank)
            found = torch.zeros(len(expected), dtype=torch.uint8)
            self._wait(self._host.recv([found], other, 0))
            if not hmac.compare_digest(found.numpy().tobytes(), expected):
                raise DeviceError(f"who came as rank {other} is not the one that was invited")
        for work in sending:
            self._wait(work)

    def close(self) -> None:
        """Leave the others, whose calls fail from now on; it is not used again."""
        self._host = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._abort()

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._seat.rank

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self._seat.degree

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same on each, in the tensor's type."""
        own = tensor if self._on_gpu else tensor.float()
        total = own.contiguous()
        self._on_device(lambda tensors: tensors.allreduce([total]))
        return total.to(tensor.dtype)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0."""
        sent = tensor.contiguous()
        if sent.numel():
            self._on_device(lambda tensors: tensors.broadcast([sent], _from_rank_0()))
        return sent

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The bytes of rank 0, by way of the host: their number, then they themselves."""
        length = torch.tensor([0 if data is None else len(data)])
        self._wait(self._host.broadcast([length], _from_rank_0(_FOR_EVER)), _FOR_EVER)
        content = torch.empty(int(length), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if content.numel():
            self._wait(self._host.broadcast([content], _from_rank_0()))
        return content.numpy().tobytes()

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The tensors `[rows, widths[rank]]` of all ranks side by side on rank 0, sent with equal
        widths.
        """
        widest = max(widths)
        own = F.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths] if self.rank == 0 else []
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._on_device(lambda tensors: tensors.gather([parts] if parts else [], [own], options))
        if not parts:
            return None
        return torch.cat([part[..., :w] for part, w in zip(parts, widths, strict=True)], -1)

    def _on_device(self, start: Callable[[Any], Any]) -> None:
        """Have what is computed next wait for the work on tensors that `start` begins: a GPU's
        stream, without the host, which goes on to launch the next layer.

        Told a time, NCCL's work would hold up the host and look every millisecond whether it is
        done (`WorkNCCL::wait` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). The limit of
        its group holds without that: torch ends the process of a call that lasts longer.
        """
        if not self._on_gpu:
            self._wait(start(self._host))
            return
        nccl = self._nccl
        if nccl is None:
            raise self._lost("it has left")
        try:
            start(nccl).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, limit: timedelta | None = None) -> None:
        try:
            work.wait(limit or timedelta(seconds=self._seat.timeout_s))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: object) -> StageLostError:
        return StageLostError(f"rank {self.rank} of {self.degree} lost another one: {error}")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _gloo(seat: Seat, store: Any) -> Any:
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=seat.address)]
    options._timeout = timedelta(seconds=seat.timeout_s)
    own = distributed.PrefixStore("gloo", store)
    return distributed.ProcessGroupGloo(own, seat.rank, seat.degree, options)


def _nccl(seat: Seat, store: Any) -> Any:
    distributed: Any = torch.distributed
    if not distributed.is_nccl_available():
        raise DeviceError("this torch has no NCCL; give each stage one GPU")
    torch.cuda.set_device(seat.device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seat.timeout_s)
    own = distributed.PrefixStore("nccl", store)
    return distributed.ProcessGroupNCCL(own, seat.rank, seat.degree, options)


def _from_rank_0(limit: timedelta | None = None) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if limit is not None:
        options.timeout = limit
    return options

"""NCCL between processes of one node with a GPU each: calls that begin without the host's waiting,
and end when they are aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from quant.common.errors import DeviceError, StageLostError

_LOOK_S = 1e-4
_PROOF_NUMBERS = 2**20  # 4 MiB: more than NCCL takes before the other side begins


def has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def gpu_name(device: torch.device) -> str:
    """What tells a GPU that NCCL can use from others; empty for other devices."""
    if device.type != "cuda" or not has_nccl():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_group(store: Any, rank: int, ranks: int, device: torch.device, limit: timedelta) -> Any:
    """The group of one process, which meets others by `store`; `DeviceError` without NCCL."""
    if not has_nccl():
        raise DeviceError("this torch has no NCCL; give each stage one GPU")
    distributed: Any = torch.distributed
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    own = distributed.PrefixStore("nccl", store)
    return distributed.ProcessGroupNCCL(own, rank, ranks, options)


def broadcast_from(rank: int, limit: timedelta | None = None) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = rank
    options.rootTensor = 0
    if limit is not None:
        options.timeout = limit
    return options


class Communicator:
    """The calls of one process in a `group` of NCCL's, which all processes begin in the same order,
    until it is aborted: kernels would wait for ever for a process that is gone, and the host for
    them. `lost` makes the error of a call that failed.
    """

    def __init__(self, group: Any, lost: Callable[[object], StageLostError]) -> None:
        self._group, self._lost = group, lost
        self._ending = Lock()

    def begin(self, call: Callable[[Any], Any]) -> Any:
        """Begin `call` of the group, for which what is launched next waits: a GPU's stream, without
        the host. Returns its work.

        Told a time, NCCL's work would hold up the host and look every millisecond whether it is
        done (`WorkNCCL::wait` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
        """
        try:
            work = call(self._joined())
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return work

    def complete(self, call: Callable[[Any], Any], limit_s: float) -> None:
        """Run `call` to its end; DeviceError after `limit_s`, RuntimeError as NCCL raises it."""
        work = call(self._joined())
        ends_s = time.monotonic() + limit_s
        while not work.is_completed():
            if time.monotonic() > ends_s:
                raise DeviceError(f"NCCL did not connect within {limit_s:g} s")
            time.sleep(_LOOK_S)
        work.wait()

    def check(self) -> None:
        """Raise `StageLostError` where a call was aborted, which ends without the others' part."""
        self._joined()

    def abort(self) -> None:
        """End all calls, whatever waits for them; for any thread."""
        with self._ending:
            group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _joined(self) -> Any:
        group = self._group
        if group is None:
            raise self._lost("it has left")
        return group


class GpuLink(Communicator):
    """Hidden states between this process' `device` and that of another one, with which it is in a
    group of two. They have a stream of their own; it and that of the layers wait for each other by
    events.

    They are broadcast: for a send, torch would make a communicator beside that of the group.
    """

    def __init__(
        self, group: Any, rank: int, device: torch.device, lost: Callable[[object], StageLostError]
    ) -> None:
        super().__init__(group, lost)
        self._rank, self._device = rank, device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._sending: Any | None = None

    def prove(self, limit_s: float) -> None:
        """Connect, and have rank 0 send numbers that rank 1 knows."""
        numbers = torch.arange(_PROOF_NUMBERS, dtype=torch.int32, device=self._device)
        found = torch.zeros_like(numbers) if self._rank else numbers
        self.complete(lambda group: group.broadcast([found], broadcast_from(0)), limit_s)
        if not torch.equal(found, numbers):
            raise DeviceError("NCCL did not bring what was sent")

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` `[tokens, hidden_size]` once computed, after the one before has gone."""
        while not self._is_sent():
            self.check()
            time.sleep(_LOOK_S)
        self._sending = self._move(hidden.detach().contiguous(), self._rank)

    def _is_sent(self) -> bool:
        try:
            return self._sending is None or bool(self._sending.is_completed())
        except RuntimeError as error:  # of what was aborted
            raise self._lost(error) from error

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """What the other one sends, for what is launched next; `check` tells if it came."""
        hidden = torch.empty(rows, columns, dtype=dtype, device=self._device)
        self._move(hidden, 1 - self._rank)
        self._streams.current_stream().wait_stream(self._stream)
        return hidden

    def _move(self, hidden: Tensor, sender: int) -> Any:
        self._stream.wait_stream(self._streams.current_stream())
        content = hidden.view(torch.uint8)  # some GPUs have no bfloat16
        with self._streams.stream(self._stream):
            work = self.begin(lambda group: group.broadcast([content], broadcast_from(sender)))
        if hidden.is_cuda:
            hidden.record_stream(self._stream)  # its memory is not used again before
        return work

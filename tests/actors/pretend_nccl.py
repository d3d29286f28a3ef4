"""NCCL as a host sees it, among threads that stand for processes, with a CPU for each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from threading import Condition
from typing import Any

import torch
from torch import Tensor

WAIT_S = 120.0
Call = tuple[object, tuple[Tensor, ...]]  # what it is, and its tensor


class Wire:
    """Where the calls of all processes of a group meet: each process' first, then its second ...

    A call is over when all have begun it. Calls that do not match are never over.
    """

    def __init__(self, ranks: int) -> None:
        self.changed = Condition()
        self.calls: list[list[Call]] = [[] for _ in range(ranks)]
        self.done = 0

    def begin(self, rank: int, what: object, tensor: Tensor) -> int:
        with self.changed:
            self.calls[rank].append(((what, tensor.dtype, tensor.numel()), (tensor,)))
            while all(len(own) > self.done for own in self.calls):
                whats, tensors = zip(*(own[self.done] for own in self.calls), strict=True)
                if len(set(whats)) > 1:
                    break
                _compute(whats[0][0], [each for (each,) in tensors])
                self.done += 1
            self.changed.notify_all()
            return len(self.calls[rank])


def _compute(what: object, tensors: list[Tensor]) -> None:
    result = sum(tensors[1:], tensors[0]) if what == "sum" else tensors[what]  # type: ignore[call-overload]
    for each in tensors:
        if each is not result:
            each.copy_(result)


class PretendNccl:
    """The group of one process. A call begins without waiting, and ends when all take part, or this
    process' communicator is aborted; its tensor is what it was, then.
    """

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.aborted = wire, rank, False

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self._begin("sum", tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        return self._begin(options.rootRank, tensors)

    def _begin(self, what: object, tensors: list[Tensor]) -> Work:
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        return Work(self, self.wire.begin(self.rank, what, tensors[0]), what == self.rank)

    def abort(self) -> None:
        with self.wire.changed:
            self.aborted = True
            self.wire.changed.notify_all()


class Work:
    def __init__(self, group: PretendNccl, number: int, is_sent: bool) -> None:
        self._group, self._number, self._is_sent = group, number, is_sent

    def is_completed(self) -> bool:
        return self._group.aborted or self._group.wire.done >= self._number

    def wait(self) -> None:
        """As a stream waits: who sends goes on, and who needs the tensor has it."""
        if not self._is_sent:
            with self._group.wire.changed:
                assert self._group.wire.changed.wait_for(self.is_completed, WAIT_S)


class PretendGpus:
    """CPUs as GPUs that NCCL connects; `groups` are those that were made, `changed` may spoil
    them. Devices of type meta are no GPUs.
    """

    def __init__(self) -> None:
        self.groups: list[PretendNccl] = []
        self.changed: Callable[[PretendNccl], PretendNccl] = lambda group: group
        self.names: Iterator[str] = map("GPU {}".format, count())
        self._wires: dict[str, Wire] = {}

    def name(self, device: torch.device) -> str:
        return next(self.names) if device.type == "cpu" else ""

    def group(
        self, store: Any, rank: int, ranks: int, device: torch.device, limit: timedelta
    ) -> PretendNccl:
        made = PretendNccl(self._wires.setdefault(store.path, Wire(ranks)), rank)
        self.groups.append(made)
        return self.changed(made)

"""Stages in processes of their own that take their CPUs for GPUs, with gloo for NCCL."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from actors.processes.stage_actor import StageActor
from actors.transport import nccl_links
from actors.transport.gloo_links import gloo_group
from actors.transport.rendezvous import LOOPBACK

_LOOK_S = 0.001
_KEPT: list[Any] = []  # when it is freed, gloo's waits for those that are stopped


class GlooAsNccl:
    """A process' group, which waits for one that is gone until it is aborted, as NCCL does."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._group = gloo_group(store, rank, ranks, LOOPBACK, timedelta(days=1))
        self._rank, self.aborted = rank, Event()
        _KEPT.append(self._group)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        with suppress(RuntimeError):
            started = self._group.broadcast(tensors, options)
            return Work(self, started, is_sent=options.rootRank == self._rank)
        return Work(self, None, is_sent=False)

    def abort(self) -> None:
        self.aborted.set()


class Work:
    def __init__(self, group: GlooAsNccl, started: Any, is_sent: bool) -> None:
        self._group, self._started, self._is_sent = group, started, is_sent

    def is_completed(self) -> bool:
        """Also where the other one is gone, for gloo."""
        return bool(self._started is not None and self._started.is_completed())

    def wait(self) -> None:
        while not self._is_sent and not self._group.aborted.wait(_LOOK_S):
            if self.is_completed():
                with suppress(RuntimeError):  # the other one is gone
                    self._started.wait()
                    break


class GpuStageActor(StageActor):
    def __init__(self, *arguments: Any) -> None:
        def group(store: Any, rank: int, ranks: int, device: torch.device, limit: timedelta) -> Any:
            return GlooAsNccl(store, rank, ranks)

        nccl_links.nccl_group = group  # type: ignore[assignment]
        nccl_links.gpu_name = lambda device: str(os.getpid())
        super().__init__(*arguments)

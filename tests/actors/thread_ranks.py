"""Ranks of a stage as threads of this process, and a pipeline of stages that are divided so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import torch
from torch import Tensor

from actors.stage.ranks import follow
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from actors.transport.collectives import RankGroup
from quant.common.errors import StageLostError
from quant.scheme import Processor

_TIMEOUT_S = 120.0
END = b""
"""No order: a rank that follows takes rank 0 to be gone."""
_PLAIN = Processor(instruction_sets=frozenset())
"""A CPU without kernels of its own: 8 bit is rounded once, by rows."""


class Table:
    """Where the ranks of one stage lay down what the others take."""

    def __init__(self, degree: int) -> None:
        self.laid: list[Any] = [None] * degree
        self.barrier = Barrier(degree, timeout=_TIMEOUT_S)


class ThreadGroup(RankGroup):
    """The group of a rank that is a thread; `traffic` counts its calls by name."""

    def __init__(self, rank: int, degree: int, table: Table) -> None:
        self.rank, self.degree, self.table = rank, degree, table
        self.traffic: dict[str, int] = {}

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange("all_reduce", tensor)
        return torch.stack([part.float() for part in parts]).sum(0).to(tensor.dtype)

    def broadcast(self, tensor: Tensor) -> Tensor:
        first = self._exchange("broadcast", tensor)[0]
        assert (first.shape, first.dtype) == (tensor.shape, tensor.dtype)
        return tensor.copy_(first) if self.rank else tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert (data is None) == (self.rank > 0)
        found: bytes = self._exchange("broadcast_bytes", data)[0]
        return found

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        parts = self._exchange("gather", tensor)
        assert [part.shape[-1] for part in parts] == list(widths)
        return None if self.rank else torch.cat(parts, -1)

    def close(self) -> None:
        self.table.barrier.abort()

    def _exchange(self, what: str, given: Any) -> list[Any]:
        """What every rank gives, told to all of them; they wait until all have taken it."""
        self.traffic[what] = self.traffic.get(what, 0) + 1
        copied = given.clone() if isinstance(given, Tensor) else given
        self.table.laid[self.rank] = (what, copied)
        try:
            self.table.barrier.wait()
            laid = list(self.table.laid)
            self.table.barrier.wait()
        except BrokenBarrierError as error:
            raise StageLostError("another rank has ended") from error
        assert {name for name, _ in laid} == {what}, "ranks do the same"
        return [each for _, each in laid]


def thread_groups(degree: int) -> list[ThreadGroup]:
    """The groups of all ranks of one stage."""
    table = Table(degree)
    return [ThreadGroup(rank, degree, table) for rank in range(degree)]


@contextmanager
def divided(
    specs: Sequence[StageSpec], degrees: Sequence[int], folder: Path, **options: Any
) -> Iterator[list[Stage]]:
    """Rank 0 of each stage of `specs`, whose other ranks follow in threads until the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(following(load_ranks(spec, degree, folder, **options)))
            for spec, degree in zip(specs, degrees, strict=True)
        ]


@contextmanager
def following(ranks: Sequence[Stage]) -> Iterator[Stage]:
    """Rank 0 of a stage, which the others follow in threads until the end."""
    failed: list[BaseException] = []
    groups = thread_groups(len(ranks))
    for stage, group in zip(ranks, groups, strict=True):
        stage.join(group)
    members = zip(ranks[1:], groups[1:], strict=True)
    threads = [Thread(target=_following, args=(*each, failed), daemon=True) for each in members]
    for thread in threads:
        thread.start()
    try:
        yield ranks[0]
        groups[0].broadcast_bytes(END)
    except BaseException:
        groups[0].table.barrier.abort()
        raise
    for thread in threads:
        thread.join(_TIMEOUT_S)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)


def load_ranks(spec: StageSpec, degree: int, folder: Path, **options: Any) -> list[Stage]:
    """All ranks of a stage, which have not joined a group yet."""
    cpu = torch.device("cpu")
    options = {"processor": _PLAIN} | options
    return [
        Stage(replace(spec, rank=rank, degree=degree), folder, cpu, **options)
        for rank in range(degree)
    ]


def _following(stage: Stage, group: ThreadGroup, failed: list[BaseException]) -> None:
    try:
        follow(stage, group)
    except StageLostError as error:
        if group.table.laid[0] != ("broadcast_bytes", END):
            failed.append(error)
            group.table.barrier.abort()
    except BaseException as error:
        failed.append(error)
        group.table.barrier.abort()
        raise

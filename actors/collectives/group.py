"""The interface of a group of ranks, and the group of a stage that is not divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """The `degree` ranks of a stage, seen from one of them.

    All ranks call the same methods in the same order with tensors of the same shapes and types. An
    error of one rank, or its end, makes the calls of the others raise `StageLostError`.
    """

    @property
    def rank(self) -> int:
        """The number of this rank; 0 is the stage, the others follow it."""

    @property
    def degree(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same on each, in the tensor's type; `tensor` may be
        overwritten.
        """

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0; those of the others are overwritten."""

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The bytes of rank 0; the others give None."""

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 the tensors `[rows, widths[rank]]` of all ranks side by side, `[rows,
        sum(widths)]`; None on the others.
        """

    def check(self) -> None:
        """Raise `StageLostError` where what was computed may lack the part of another rank."""

    def close(self) -> None:
        """Leave the others, whose calls fail from now on."""


class UndividedGroup:
    """The group of a stage that is not divided."""

    rank = 0
    degree = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None, "rank 0 has what it sends"
        return data

    def gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        return tensor

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = UndividedGroup()

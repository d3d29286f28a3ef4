"""Timing the sums of a tensor-parallel group, among processes that compute as its ranks would."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from actors.processes.answers import get_answer, get_answers
from actors.processes.placement import Placement
from actors.profiling.together import median_and_spread, started_together
from quant.common.errors import DeviceError

SUMMED_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
GPU_SUMMED_BYTES = (*SUMMED_BYTES, 64 << 20)
"""Bytes of the tensors in 16 bits: from a token of a small model to thousands of a large one."""

_WARM_UP = 5
_GPU_SUMS_AT_ONCE = 10
"""A GPU's sums are started one after the other without waiting, as those of layers are."""
_MEETING_S = 60.0


@dataclass(frozen=True)
class TimedSum:
    """Median seconds of a sum; `spread` is the interquartile range over it."""

    summed_bytes: int
    seconds: float
    spread: float
    repetitions: int


class Rank:
    """One of the processes that sum, on a GPU where it has one."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        on_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._dtype = torch.float16 if on_gpu else torch.bfloat16
        self._folder: Path | None = None
        self._group: Any = None

    def open_folder(self) -> str:
        """A new folder of this node, in which the ranks meet; nobody else may read it."""
        self._folder = Path(tempfile.mkdtemp(prefix="llmpq-sums-"))
        return str(self._folder)

    def meet(self, folder: str, rank: int, degree: int) -> None:
        """Connect to the other ranks; raises `DeviceError` where that fails."""
        distributed: Any = torch.distributed
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if not getattr(distributed, f"is_{backend}_available")():
            raise DeviceError(f"this torch has no {backend}, by which groups of devices sum")
        store = distributed.FileStore(str(Path(folder) / "store"), degree)
        try:
            self._group = _GROUPS[backend](store, rank, degree)
            total = self._sum(torch.ones(1, dtype=self._dtype, device=self._device))
        except RuntimeError as error:
            raise DeviceError(f"{degree} processes did not meet over {backend}: {error}") from error
        assert total.item() == degree, "each has a one"

    def timed(self, turns: int) -> list[TimedSum]:
        """Time sums of every size in turns, as all ranks do at once."""
        on_gpu = self._device.type == "cuda"
        sizes = GPU_SUMMED_BYTES if on_gpu else SUMMED_BYTES
        at_once = _GPU_SUMS_AT_ONCE if on_gpu else 1
        seconds: list[list[float]] = [[] for _ in sizes]
        tensors = [torch.zeros(size // 2, dtype=self._dtype, device=self._device) for size in sizes]
        for _ in range(_WARM_UP + turns):
            for own, tensor in zip(seconds, tensors, strict=True):
                self._sum(tensor[:1])  # all ranks are here
                self._done()
                began = time.perf_counter()
                for _ in range(at_once):
                    self._sum(tensor)
                self._done()
                own.append((time.perf_counter() - began) / at_once)
        return [
            TimedSum(size, *median_and_spread(own[_WARM_UP:]), turns)
            for size, own in zip(sizes, seconds, strict=True)
        ]

    def close(self) -> None:
        """Remove the folder, once all ranks are done."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _sum(self, tensor: Tensor) -> Tensor:
        """The sum in the tensor's type; over gloo it is taken in float32, as that of ranks is."""
        total = tensor if self._device.type == "cuda" else tensor.float()
        self._group.allreduce([total]).wait()
        return total.to(tensor.dtype)

    def _done(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _gloo(store: Any, rank: int, degree: int) -> Any:
    """Processes of one host, which listen on the loopback address."""
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_MEETING_S)
    return distributed.ProcessGroupGloo(store, rank, degree, options)


def _nccl(store: Any, rank: int, degree: int) -> Any:
    distributed: Any = torch.distributed
    torch.cuda.set_device(0)  # Ray shows each process its own
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_MEETING_S)
    return distributed.ProcessGroupNCCL(store, rank, degree, options)


_GROUPS: dict[str, Callable[[Any, int, int], Any]] = {"gloo": _gloo, "nccl": _nccl}


def measure_sums(ranks: Sequence[Placement], turns: int = 30) -> tuple[TimedSum, ...]:
    """Time sums among processes with the devices of `ranks` on one node; what the first one saw.

    Needs an initialised Ray. Raises `DeviceError` where no node has so many, or they do not meet.
    """
    with started_together(Rank, ranks, "node") as actors:
        folder, degree = get_answer(actors[0].open_folder.remote()), len(actors)
        try:
            get_answers([each.meet.remote(folder, i, degree) for i, each in enumerate(actors)])
            found = get_answers([each.timed.remote(turns) for each in actors])
        finally:
            get_answer(actors[0].close.remote())
    return tuple(found[0])

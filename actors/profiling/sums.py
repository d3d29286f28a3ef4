"""Timing the sums of a tensor-parallel group, among processes that meet as ranks of a stage do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.collectives.distributed import DistributedGroup
from actors.collectives.meeting import Meeting
from actors.processes.answers import get_answer, get_answers
from actors.processes.device import device_here
from actors.processes.placement import Placement
from actors.profiling.together import median_and_spread, started_together

SUMMED_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
GPU_SUMMED_BYTES = (*SUMMED_BYTES, 64 << 20)
"""Bytes of the tensors in 16 bits: from a token of a small model to thousands of a large one."""

_WARM_UP = 5
_GPU_SUMS_AT_ONCE = 10
"""A GPU's sums are started one after the other without waiting, as those of layers are."""


@dataclass(frozen=True)
class TimedSum:
    """Median seconds of a sum; `spread` is the interquartile range over it."""

    summed_bytes: int
    seconds: float
    spread: float
    repetitions: int


class Rank:
    """One of the processes that sum, on a GPU or none."""

    def __init__(self, on_gpu: bool) -> None:
        torch.set_num_threads(1)
        self._device = device_here("cuda" if on_gpu else "cpu")
        self._dtype = torch.float16 if on_gpu else torch.bfloat16
        self._meeting: Meeting
        self._group: DistributedGroup

    def meeting(self) -> Meeting:
        """A meeting of all ranks on this node; the first rank ends it."""
        self._meeting = Meeting.on_this_node()
        return self._meeting

    def meet(self, meeting: Meeting, rank: int, degree: int) -> None:
        """Connect to the other ranks; raises `DeviceError` where that fails."""
        self._group = meeting.join(rank, degree, self._device)

    def timed(self, turns: int) -> list[TimedSum]:
        """Time sums of every size in turns, as all ranks do at once."""
        on_gpu = self._device.type == "cuda"
        sizes = GPU_SUMMED_BYTES if on_gpu else SUMMED_BYTES
        at_once = _GPU_SUMS_AT_ONCE if on_gpu else 1
        seconds: list[list[float]] = [[] for _ in sizes]
        tensors = [torch.zeros(size // 2, dtype=self._dtype, device=self._device) for size in sizes]
        for _ in range(_WARM_UP + turns):
            for own, tensor in zip(seconds, tensors, strict=True):
                self._group.all_reduce(tensor[:1])  # all ranks are here
                self._done()
                began = time.perf_counter()
                for _ in range(at_once):
                    self._group.all_reduce(tensor)
                self._done()
                own.append((time.perf_counter() - began) / at_once)
        return [
            TimedSum(size, *median_and_spread(own[_WARM_UP:]), turns)
            for size, own in zip(sizes, seconds, strict=True)
        ]

    def end(self) -> None:
        """Remove the folder of the meeting, once all ranks are done."""
        self._meeting.end()

    def _done(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_sums(ranks: Sequence[Placement], turns: int = 30) -> tuple[TimedSum, ...]:
    """Time sums among processes with the devices of `ranks` on one node; what the first one saw.

    Needs an initialised Ray. Raises `DeviceError` where no node has so many, or they do not meet.
    """
    with started_together(Rank, ranks, "node") as actors:
        meeting, degree = get_answer(actors[0].meeting.remote()), len(actors)
        try:
            get_answers([each.meet.remote(meeting, i, degree) for i, each in enumerate(actors)])
            found = get_answers([each.timed.remote(turns) for each in actors])
        finally:
            get_answer(actors[0].end.remote())
    return tuple(found[0])

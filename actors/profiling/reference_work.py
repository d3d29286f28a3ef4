"""A fixed piece of work whose time shows how fast this machine is at the moment.

Clocks, neighbours on a shared machine and heat make the same work take 10 to 20 % longer a few
seconds later. Reference work that is timed right before and after a measurement tells by how much:
a matrix product, as in prefill, and the sum of more memory than caches hold, as in decode.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from planner.scheduling import Phase

# Products of 1.4 ms on one core with AVX512-BF16, 2 ms on a T4; sums of 64 and 512 MiB, more than
# the caches of processors and of GPUs hold. In bfloat16 the product takes 1.5 s on a core with AVX2
# alone, which computes in float32 and takes 7 ms for it.
_CPU_ROWS, _CPU_WIDTH, _CPU_ELEMENTS = 256, 1024, 16 * 2**20
_GPU_ROWS, _GPU_WIDTH, _GPU_ELEMENTS = 2048, 4096, 128 * 2**20


@dataclass(frozen=True)
class ReferenceTimes:
    """Seconds of the two parts of the reference work."""

    compute_s: float
    memory_s: float

    def seconds(self, phase: Phase) -> float:
        """Seconds in proportion to which passes of `phase` become slower or faster.

        Decode is held up by memory as the sum is; prefill by both (on a shared machine whose
        memory became a quarter slower, prefill took an eighth longer).
        """
        if phase == "decode":
            return self.memory_s
        return math.sqrt(self.compute_s * self.memory_s)


class ReferenceWork:
    """The reference work on `device`, which also empties the device's caches of weights.

    A CPU that computes in `dtype` float32 multiplies in it here too.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._on_gpu = device.type == "cuda"
        rows, width, elements = (
            (_GPU_ROWS, _GPU_WIDTH, _GPU_ELEMENTS)
            if self._on_gpu
            else (_CPU_ROWS, _CPU_WIDTH, _CPU_ELEMENTS)
        )
        if self._on_gpu:
            dtype = torch.float16
        elif dtype != torch.float32:
            dtype = torch.bfloat16
        self._left = torch.full((rows, width), 0.5, dtype=dtype, device=device)
        self._right = torch.full((width, width), 0.5, dtype=dtype, device=device)
        self._memory = torch.ones(elements, device=device)

    def run(self) -> ReferenceTimes:
        """Do the reference work and time it."""
        began = self.now()
        torch.mm(self._left, self._right)
        between = self.now()
        self._memory.sum()
        return ReferenceTimes(between - began, self.now() - between)

    def now(self) -> float:
        """Seconds of the clock, once everything that was started on the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize(self._left.device)
        return time.perf_counter()

"""The cost of preempting a request: its keys and values are copied to host memory and back, or
computed again from its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.scheme import FULL_BITS

FloatArray = npt.NDArray[np.float64]

COPY_LAUNCH_S = 10e-6
"""Seconds of a copy beside its bytes: what a kernel or a DMA transfer takes to start on a GPU."""


@dataclass(frozen=True)
class HostCopies:
    """Copies of a stage's keys and values to host memory and back, in `tensors` tensors of the
    cache.
    """

    kv_bytes_per_token: float
    tensors: int
    host_link_bytes_per_s: float

    def one_way_s(self, tokens: int) -> float:
        bytes_s = tokens * self.kv_bytes_per_token / self.host_link_bytes_per_s
        return bytes_s + self.tensors * COPY_LAUNCH_S


def cache_tensors(kv_bits: int, layers: int) -> int:
    """Tensors that hold a request's keys and values in so many layers; codes come with scales."""
    return (2 if kv_bits == FULL_BITS else 4) * layers


@dataclass(frozen=True)
class PreemptedStage:
    """Copies, and `compute_s` [tokens] by which recomputing 1, 2, ... tokens lengthens a
    micro-batch.
    """

    copies: HostCopies
    compute_s: FloatArray

    @property
    def copy_s(self) -> FloatArray:
        """Seconds of copying 1, 2, 3, ... tokens there and back, `[tokens]`."""
        tokens = range(1, len(self.compute_s) + 1)
        return np.array([2 * self.copies.one_way_s(each) for each in tokens])


def park_tokens_from(stages: Sequence[PreemptedStage]) -> int:
    """The least number of tokens from which on copying is cheaper than computing on the slowest
    stage; 0 for never.
    """
    copy_s = np.max([stage.copy_s for stage in stages], axis=0)
    compute_s = np.max([stage.compute_s for stage in stages], axis=0)
    dearer = np.flatnonzero(copy_s >= compute_s)
    least = int(dearer[-1]) + 2 if len(dearer) else 1
    return least if least <= len(compute_s) else 0

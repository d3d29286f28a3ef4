"""Seconds of the sums (all-reduce) and exchanges among the ranks of a tensor-parallel group.

A ring sends every byte nearly twice in 2 (k - 1) short steps, a tree in 2 log2(k) steps of whole
messages; libraries take the faster one, as here. Beside its steps a sum waits for the last of k
processes to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster.device import Device, MeasuredSum

_NVLINK_STEP_S = 3e-6
_HOST_LINK_STEP_S = 8e-6
"""A step's latency over NVLink, and over PCI Express by way of the host (NCCL's own model of its
latencies has 0.6 to 4 us and 1 to 6 us without the kernel that copies)."""

_GLOO_STEP_S = 7e-5
"""The same among processes of a host, whose sums go through gloo."""

# LLaMA-2-70B on 2 and 8 A100 (splitwise-sim's measurements): a decode step takes 0.12 and 0.4 ms a
# layer beyond its memory traffic, and 80 layers have two sums each. BLOOM on 8 A100 tells 1.3e-5,
# LLaMA on 8 H100 1.2e-5 (docs/scale.md).
_GPU_RANK_S = 1.5e-5
"""What each rank adds to a sum: launches, and waiting for the last rank."""

_LINK_SHARE = 0.75
"""The share of a link's rate that sums of large tensors reach (NCCL on A100: 230 of 300 GB/s)."""


@dataclass(frozen=True)
class Collectives:
    """Seconds of operations among a group's ranks, by latency and rate of a message, and what one
    takes beside.
    """

    degree: int
    step_s: float
    bytes_per_s: float
    wait_s: float = 0.0
    measured: MeasuredSum | None = None

    @classmethod
    def of(cls, group: Device, sums: Sequence[MeasuredSum] = ()) -> Collectives:
        name, degree = group.accelerator.name, group.degree
        found = next((s for s in sums if (s.accelerator, s.degree) == (name, degree)), None)
        if group.accelerator.is_cpu:
            return cls(degree, _GLOO_STEP_S, group.link_bytes_per_s, 0.0, found)
        has_nvlink = group.link_bytes_per_s > group.host_link_bytes_per_s
        step_s = _NVLINK_STEP_S if has_nvlink else _HOST_LINK_STEP_S
        rate = _LINK_SHARE * group.link_bytes_per_s
        return cls(degree, step_s, rate, degree * _GPU_RANK_S, found)

    def sum_s(self, summed_bytes: float) -> float:
        """Seconds of summing a tensor of so many bytes over all ranks, each of which gets it."""
        if self.degree == 1:
            return 0.0
        if self.measured is not None:
            return self.measured.seconds(summed_bytes)
        return self.wait_s + min(self.ring_s(summed_bytes), self.tree_s(summed_bytes))

    def ring_s(self, summed_bytes: float) -> float:
        """Seconds of a ring, in which the parts of the tensor go round twice."""
        steps = 2 * (self.degree - 1)
        return steps * (self.step_s + summed_bytes / self.degree / self.bytes_per_s)

    def tree_s(self, summed_bytes: float) -> float:
        """Seconds of a tree, up to the root and down again."""
        return 2 * self._levels * (self.step_s + summed_bytes / self.bytes_per_s)

    def broadcast_s(self, sent_bytes: float) -> float:
        latency_s, per_byte_s = self.broadcast_terms
        return latency_s + sent_bytes * per_byte_s

    @property
    def broadcast_terms(self) -> tuple[float, float]:
        """Seconds of a broadcast without bytes, and those of a byte."""
        return self._levels * self.step_s, self._levels / self.bytes_per_s

    def gather_s(self, gathered_bytes: float) -> float:
        """Seconds in which the first rank gets the other parts of a tensor."""
        if self.degree == 1:
            return 0.0
        received = gathered_bytes * (self.degree - 1) / self.degree
        return self.wait_s + self.step_s + received / self.bytes_per_s

    @property
    def _levels(self) -> int:
        return math.ceil(math.log2(self.degree))

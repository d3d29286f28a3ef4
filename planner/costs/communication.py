"""Seconds of moving bytes: sums within groups, hops between stages, copies to host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from planner.cluster.device import Device, MeasuredSum
from planner.cluster.spec import ClusterSpec
from planner.lengths import FloatArray
from planner.model.shape import ModelShape
from quant.scheme import DTYPE_BYTES, FULL_BITS

_NVLINK_STEP_S = 3e-6
_HOST_LINK_STEP_S = 8e-6
"""A step's latency over NVLink, and over PCI Express by way of the host (NCCL's own model of its
latencies has 0.6 to 4 us and 1 to 6 us without the kernel that copies)."""

_GLOO_STEP_S = 7e-5
"""The same among processes of a host, whose sums go through gloo."""

# LLaMA-2-70B on 2 and 8 A100 (splitwise-sim's measurements): a decode step takes 0.12 and 0.4 ms a
# layer beyond its memory traffic, and 80 layers have two sums each. BLOOM on 8 A100 tells 1.3e-5,
# LLaMA on 8 H100 1.2e-5 (docs/measurements/scale.md).
_GPU_RANK_S = 1.5e-5
"""What each rank adds to a sum: launches, and waiting for the last rank."""

_LINK_SHARE = 0.75
"""The share of a link's rate that sums of large tensors reach (NCCL on A100: 230 of 300 GB/s)."""


@dataclass(frozen=True)
class Collectives:
    """Seconds of operations among a group's ranks, by a message's latency and rate."""

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


TOKEN_ID_BYTES = 4


def hidden_bytes(shape: ModelShape, tokens: float, dtype: str) -> float:
    return tokens * shape.message_width * DTYPE_BYTES[dtype]


def transfer_terms(cluster: ClusterSpec, sender: Device, receiver: Device) -> tuple[float, float]:
    """Seconds of a hop without bytes, and of a byte; a group's first rank hands on to others."""
    latency_s, per_byte_s = Collectives.of(receiver).broadcast_terms
    latency_s += cluster.link_latency_s(sender, receiver)
    return latency_s, per_byte_s + 1 / cluster.link_bytes_per_s(sender, receiver)


def handover_terms(cluster: ClusterSpec, sender: Device, receiver: Device) -> tuple[float, float]:
    """Seconds of an empty message, and of a byte, between hosts, without copies; 0 in a node."""
    if sender.node == receiver.node:
        return 0.0, 0.0
    return cluster.link_latency_s(sender, receiver), 1 / cluster.link_bytes_per_s(sender, receiver)


@dataclass(frozen=True)
class Transfers:
    """Hops for micro-batches of `requests` (prefill, decode), which may be means. With
    `head_on_first` the last stage sends back hidden states in place of token ids.
    """

    cluster: ClusterSpec
    shape: ModelShape
    requests: tuple[float, float]
    prompt_length: float
    head_on_first: bool = False

    def onward_s(self, sender: Device, receiver: Device, dtype: str) -> tuple[float, float]:
        """Seconds per prefill and decode micro-batch onward (LLM-PQ eq. 7), in the sent type."""
        latency_s, per_byte_s = transfer_terms(self.cluster, sender, receiver)
        prefill, decode = (
            latency_s + hidden_bytes(self.shape, tokens, dtype) * per_byte_s
            for tokens in (self.requests[0] * self.prompt_length, self.requests[1])
        )
        return prefill, decode

    def back_s(self, last: Device, first: Device, dtype: str) -> tuple[float, float]:
        """Seconds per prefill and decode micro-batch from the last stage to the first."""
        each = TOKEN_ID_BYTES
        if self.head_on_first:
            each = self.shape.word_embedding_size * DTYPE_BYTES[dtype]
        latency_s, per_byte_s = transfer_terms(self.cluster, last, first)
        prefill, decode = (latency_s + requests * each * per_byte_s for requests in self.requests)
        return prefill, decode

    def of_order(
        self, devices: Sequence[Device], dtypes: Sequence[str]
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of all hops per prefill and decode micro-batch [N]; the last is the way back."""
        hops = [
            self.onward_s(sender, receiver, dtype)
            for (sender, receiver), dtype in zip(pairwise(devices), dtypes[:-1], strict=True)
        ]
        hops.append(self.back_s(devices[-1], devices[0], dtypes[-1]))
        prefill, decode = np.array(hops).T
        return prefill, decode


_Tokens = TypeVar("_Tokens", float, FloatArray)

COPY_LAUNCH_S = 10e-6
"""Seconds of a copy beside its bytes: what a kernel or a DMA transfer takes to start on a GPU."""


@dataclass(frozen=True)
class HostCopies:
    """Copies of keys, values and states to host memory and back, in `tensors` of the cache."""

    kv_bytes_per_token: float
    tensors: int
    host_link_bytes_per_s: float
    state_bytes: float = 0.0

    def one_way_s(self, tokens: _Tokens) -> _Tokens:
        moved = tokens * self.kv_bytes_per_token + self.state_bytes
        return moved / self.host_link_bytes_per_s + self.tensors * COPY_LAUNCH_S


def cache_tensors(kv_bits: int, layers: Sequence[ModelShape]) -> int:
    """Tensors that hold what a request keeps in these layers: keys and values, of latents one for
    both, codes with scales; constant states of all layers lie in two.
    """
    held = sum((2 if each.latent is None else 1) * (each.kv_width > 0) for each in layers)
    states = 2 * any(each.delta is not None for each in layers)
    return held * (1 if kv_bits == FULL_BITS else 2) + states


def park_tokens_from(copies: Sequence[HostCopies], compute_s: Sequence[FloatArray]) -> int:
    """Tokens from which copying beats computing, `compute_s` [stages] by tokens; 0: never."""
    longest = len(compute_s[0])
    tokens = np.arange(1.0, longest + 1)
    copy_s = np.max([2 * each.one_way_s(tokens) for each in copies], axis=0)
    dearer = np.flatnonzero(copy_s >= np.max(compute_s, axis=0))
    least = int(dearer[-1]) + 2 if len(dearer) else 1
    return least if least <= longest else 0

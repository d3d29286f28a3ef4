"""The time of hops: hidden states from stage to stage, and token ids from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.collectives import Collectives
from planner.model.finding import ModelShape
from quant.scheme import DTYPE_BYTES

TOKEN_ID_BYTES = 4

Vector = npt.NDArray[np.float64]


def hidden_bytes(shape: ModelShape, tokens: float, dtype: str) -> float:
    return tokens * shape.hidden_size * DTYPE_BYTES[dtype]


def transfer_terms(cluster: ClusterSpec, sender: Device, receiver: Device) -> tuple[float, float]:
    """Seconds of a hop without bytes, and of a byte; the first rank of a group hands on to the
    others.
    """
    latency_s, per_byte_s = Collectives.of(receiver).broadcast_terms
    latency_s += cluster.link_latency_s(sender, receiver)
    return latency_s, per_byte_s + 1 / cluster.link_bytes_per_s(sender, receiver)


def handover_terms(cluster: ClusterSpec, sender: Device, receiver: Device) -> tuple[float, float]:
    """Seconds of a message without bytes, and of a byte, between hosts: 0 within a node. Copies
    from and to devices are not counted.
    """
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
        """Seconds per prefill and decode micro-batch to the next stage (LLM-PQ eq. 7) in the
        sender's type.
        """
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

    def of_order(self, devices: Sequence[Device], dtypes: Sequence[str]) -> tuple[Vector, Vector]:
        """Seconds of all hops per prefill and per decode micro-batch, each [N]; the last is the way
        back.
        """
        hops = [
            self.onward_s(sender, receiver, dtype)
            for (sender, receiver), dtype in zip(pairwise(devices), dtypes[:-1], strict=True)
        ]
        hops.append(self.back_s(devices[-1], devices[0], dtypes[-1]))
        prefill, decode = np.array(hops).T
        return prefill, decode

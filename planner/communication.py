"""Seconds that hidden states take from stage to stage, and token ids from the last to the first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.cluster import ClusterSpec
from planner.device import Device
from planner.micro_batches import MicroBatches
from planner.model_shape import ModelShape
from planner.workload import Workload
from quant.scheme import DTYPE_BYTES

TOKEN_ID_BYTES = 4

Vector = npt.NDArray[np.float64]


def hidden_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Hidden states of `tokens` tokens in the sender's compute type."""
    return tokens * shape.hidden_size * DTYPE_BYTES[dtype]


def transfer_s(cluster: ClusterSpec, sender: Device, receiver: Device, payload_bytes: int) -> float:
    """Latency of the link and bytes over its rate; nothing from a device to itself."""
    rate = cluster.link_bytes_per_s(sender, receiver)
    return cluster.link_latency_s(sender, receiver) + payload_bytes / rate


def transfers_s(
    cluster: ClusterSpec,
    devices: Sequence[Device],
    shape: ModelShape,
    workload: Workload,
    sizes: MicroBatches,
    dtypes: Sequence[str],
    head_on_first: bool = False,
) -> tuple[Vector, Vector]:
    """Seconds per prefill and per decode micro-batch to the next stage (LLM-PQ eq. 7: P / f).

    `devices` [N] in stage order with their compute types; both results are [N], and their last
    entry is the way back to the first stage: one token id a request, or with `head_on_first` the
    final hidden state of its last token.
    """

    def along(requests: int, tokens: int) -> Vector:
        onward = [
            transfer_s(cluster, sender, receiver, hidden_bytes(shape, tokens, dtype))
            for (sender, receiver), dtype in zip(pairwise(devices), dtypes[:-1], strict=True)
        ]
        returned = requests * TOKEN_ID_BYTES
        if head_on_first:
            returned = requests * shape.word_embedding_size * DTYPE_BYTES[dtypes[-1]]
        back = transfer_s(cluster, devices[-1], devices[0], returned)
        return np.array([*onward, back])

    prefill = along(sizes.prefill, sizes.prefill * workload.prompt_length)
    return prefill, along(sizes.decode, sizes.decode)

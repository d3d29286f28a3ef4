"""What rank 0 orders the other ranks of its stage to do, so that they compute along with it.

An order is its kind and, where one comes with it, a micro-batch in the bytes that go between
stages: nothing in it is ever run. What is computed follows as a tensor, whose shape and type every
rank knows.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from actors.collectives.group import RankGroup
from actors.messages import MicroBatch, Sampled
from actors.transport.message_format import decode, encode
from quant.common.errors import StageLostError


class Order(IntEnum):
    """The kinds of orders."""

    STEP = 0
    FINISH = 1
    FORGET_PARKED = 2
    END = 3


class Follower(Protocol):
    """The part of a stage that follows orders."""

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """Compute a micro-batch."""

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """Compute the rank's part of the LM head."""

    def forget_parked(self) -> None:
        """Free what is parked in host memory."""

    def empty_inputs(self, batch: MicroBatch, order: Order) -> Tensor:
        """Memory for what rank 0 computes `batch` from."""


def send(group: RankGroup, order: Order, batch: MicroBatch | None = None) -> None:
    """Order the other ranks to do something with `batch`; does nothing where there are none."""
    if group.degree == 1:
        return
    message = b""
    if batch is not None:
        message = encode(batch, torch.empty(_rows(batch, order), 0)).numpy().tobytes()
    group.broadcast_bytes(bytes([order]) + message)


def receive(group: RankGroup) -> tuple[Order, MicroBatch | None]:
    """The next order of rank 0; `StageLostError` for what it does not send."""
    data = group.broadcast_bytes(None)
    if not data or data[0] not in Order._value2member_map_:
        raise StageLostError("rank 0 of a stage sends what is no order; its version is another one")
    order = Order(data[0])
    if order not in (Order.STEP, Order.FINISH):
        return order, None
    try:
        decoded = decode(torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8))
    except (ValueError, struct.error) as error:  # too short for any message
        raise StageLostError("rank 0 of a stage sends a part of an order") from error
    if isinstance(decoded, Sampled):
        raise StageLostError("rank 0 of a stage sends tokens; its version is another one")
    return order, decoded[0]


def follow(stage: Follower, group: RankGroup) -> None:
    """Do what rank 0 orders until it ends; the work of every other rank.

    Errors are those of the stage, and `StageLostError` where another rank is lost.
    """
    while True:
        order, batch = receive(group)
        if order == Order.END:
            return
        if order == Order.FORGET_PARKED:
            stage.forget_parked()
            continue
        assert batch is not None, "these orders bring one"
        inputs = stage.empty_inputs(batch, order)
        if order == Order.STEP:
            stage.step(batch, inputs)
        else:
            stage.finish(batch, inputs)


def _rows(batch: MicroBatch, order: Order) -> int:
    """Rows of the tensor that follows."""
    return len(batch.sampled_rows) if order == Order.FINISH else int(batch.counts.sum())

"""Messages of two small requests, and what a plan of them allows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from actors.messages import (
    Admission,
    MicroBatch,
    Move,
    Sampling,
    TokenRange,
)
from actors.schedule.scheduler import QueueSizes
from actors.transport.message_format import encode
from tests.actors.batches import batch_in_ranges

ROOM = 16


LIMITS = QueueSizes(8, 2, 4, ROOM).limits(ROOM, 8 * ROOM, columns=6)


def a_batch() -> MicroBatch:
    """Two requests of three tokens, one of them admitted, and a move."""
    admitted = (Admission(5, "a", 9, Sampling(), room=TokenRange(5 * ROOM, ROOM)),)
    batch = batch_in_ranges([5, 2], [0, 4], [3, 3], admitted, ROOM)
    return replace(batch, moves=(Move(0, 2 * ROOM, 4),))


def a_message(batch: MicroBatch | None = None, rows: int = 6, columns: int = 6) -> Tensor:
    return encode(batch or a_batch(), torch.ones(rows, columns))

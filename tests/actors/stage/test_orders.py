"""Orders of rank 0: they arrive as they were sent, and what is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.messages import (
    NOTHING_SAMPLED,
    Admission,
    MicroBatch,
    Move,
    Park,
    Sampled,
    Sampling,
    TokenRange,
)
from actors.stage.ranks import Order, follow, send
from actors.transport.collectives import ALONE
from actors.transport.message_format import encode
from quant.common.errors import StageLostError
from tests.actors.batches import batch_in_ranges
from tests.actors.thread_ranks import END, ThreadGroup, thread_groups

ADMITTED = Admission(1, "a", 4, Sampling(temperature=0.5, stop=("é",)), room=TokenRange(64, 64))
BATCH = replace(
    batch_in_ranges([0, 1], [5, 0], [1, 9], [ADMITTED]),
    samples=np.array([True, False]),
    moves=(Move(200, 128, 7),),
    parks=(Park(3, 0, 2),),
    restores=(Park(2, 0, 2),),
    drops=(1,),
)


@dataclass
class Recorder:
    """A stage that only notes what it is asked to do."""

    asked: list[object] = field(default_factory=list)

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        self.asked += ["step", batch, len(inputs)]
        return inputs

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        self.asked += ["finish", batch, len(last_hidden)]
        return NOTHING_SAMPLED

    def forget_parked(self) -> None:
        self.asked.append("forget")

    def empty_inputs(self, batch: MicroBatch, order: Order) -> Tensor:
        rows = batch.sampled_rows if order == Order.FINISH else batch.positions
        return torch.zeros(len(rows))


def followed(work: Callable[[ThreadGroup], None]) -> list[object]:
    """What the second rank does while the first one does `work`, which ends with no order."""
    groups, stage = thread_groups(2), Recorder()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(follow, stage, groups[1])
        work(groups[0])
        with pytest.raises(StageLostError):
            end.result(10)
    return stage.asked


def test_orders_arrive_as_they_were_sent() -> None:
    def work(group: ThreadGroup) -> None:
        send(group, Order.STEP, BATCH)
        send(group, Order.FORGET_PARKED)
        send(group, Order.FINISH, BATCH)
        group.broadcast_bytes(END)

    step, batch, tokens, forget, finish, same, sampled = followed(work)
    assert (step, tokens, forget, finish, sampled) == ("step", 10, "forget", "finish", 1)
    for found in (batch, same):
        assert isinstance(found, MicroBatch)
        for name in ("slots", "starts", "counts", "begins", "samples"):
            assert np.array_equal(getattr(found, name), getattr(BATCH, name)), name
        for name in ("admitted", "moves", "parks", "restores", "drops"):
            assert getattr(found, name) == getattr(BATCH, name), name


def test_a_stage_that_is_not_divided_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes | None] = []
    monkeypatch.setattr(type(ALONE), "broadcast_bytes", lambda self, data: sent.append(data))
    send(ALONE, Order.STEP, BATCH)
    assert sent == []


TOKENS = encode(BATCH, Sampled(np.array([3]), (None,))).numpy().tobytes()


@pytest.mark.parametrize(
    "message",
    [b"", b"\x09", b"\x00", b"\x00abc", b"\x00" + bytes(64), b"\x01" + TOKENS],
    ids=["nothing", "no order", "no batch", "short", "no message", "tokens"],
)
def test_what_is_no_order_is_refused(message: bytes) -> None:
    assert followed(lambda group: group.broadcast_bytes(message) and None) == []

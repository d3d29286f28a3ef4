"""Rows of a weight on their way to a GPU while it works on those before.

Copies from ordinary memory stop the host until they are done. Here rows go through two buffers of
pinned memory and a stream of their own: while the GPU quantizes one block, the next is copied, and
the host reads the one after that from its file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_BUFFERS = 2


@dataclass(frozen=True)
class Sent:
    """A copy that was begun: the tensor on the device, and the event of its end."""

    tensor: torch.Tensor
    done: Any


class Lane(Protocol):
    """Copies to a device that go on by themselves."""

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory `[elements]` to send from."""
        ...

    def send(self, host: torch.Tensor) -> Sent:
        """Begin to copy a part of a buffer."""
        ...

    def receive(self, sent: Sent) -> torch.Tensor:
        """The copy, for work that is queued from now on."""
        ...

    def wait(self, sent: Sent) -> None:
        """Return when the copy is over, so that its host memory may change."""
        ...


class CudaLane:
    """A side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Lane`."""
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def send(self, host: torch.Tensor) -> Sent:
        """See `Lane`."""
        # Memory of the stream that computes, where work on its last tenant may still be queued.
        # That stream waits for the copy in `receive`: the allocator need not know of the other one.
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return Sent(tensor, done)

    def receive(self, sent: Sent) -> torch.Tensor:
        """See `Lane`."""
        torch.cuda.current_stream(self._device).wait_event(sent.done)
        return sent.tensor

    def wait(self, sent: Sent) -> None:
        """See `Lane`."""
        sent.done.synchronize()


def moved_blocks(
    weight: torch.Tensor, blocks: Iterable[slice], device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Each of `blocks`, ranges of rows of `weight`, with these rows on `device` as they are stored.

    On the host they are views.
    """
    if device.type == "cuda" and weight.device.type == "cpu":
        yield from staged_blocks(weight, list(blocks), CudaLane(device))
        return
    for block in blocks:
        yield block, weight[block].to(device)


def staged_blocks(
    weight: torch.Tensor, blocks: Sequence[slice], lane: Lane
) -> Iterator[tuple[slice, torch.Tensor]]:
    """`moved_blocks` over a `lane`; the copy of each block begins before the one before is used."""
    elements = max((weight[block].numel() for block in blocks), default=0)
    buffers = [lane.buffer(elements, weight.dtype) for _ in blocks[:_BUFFERS]]
    sent: deque[Sent] = deque(maxlen=_BUFFERS)
    try:
        for number, block in enumerate(blocks):
            if number >= _BUFFERS:
                lane.wait(sent[0])
            rows = weight[block]
            host = buffers[number % _BUFFERS][: rows.numel()].view(rows.shape)
            sent.append(lane.send(host.copy_(rows)))
            if number:
                yield blocks[number - 1], lane.receive(sent[0])
        if sent:
            yield blocks[-1], lane.receive(sent[-1])
    finally:  # nobody may get this memory while it is being written
        for each in sent:
            lane.wait(each)

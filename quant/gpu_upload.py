"""Copying rows of a weight to a GPU while it works on the rows before.

Copies from ordinary memory block the host until they are done. Here rows go through two buffers of
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
    """A copy that was started: the tensor on the device, and the event that marks its end."""

    tensor: torch.Tensor
    done: Any


class CopyStream(Protocol):
    """Asynchronous copies to a device."""

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory `[elements]` to send from."""
        ...

    def send(self, host: torch.Tensor) -> Sent:
        """Start to copy a part of a buffer."""
        ...

    def receive(self, sent: Sent) -> torch.Tensor:
        """The copied tensor, for work that is queued from now on."""
        ...

    def wait(self, sent: Sent) -> None:
        """Wait until the copy is done, so that its host memory may change."""
        ...


class CudaCopyStream:
    """Copies on a stream of their own of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def send(self, host: torch.Tensor) -> Sent:
        # The memory belongs to the stream that computes, where work on its last user may be queued.
        # That stream waits for the copy in `receive`, so the allocator need not know this one.
        tensor = torch.empty_like(host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return Sent(tensor, done)

    def receive(self, sent: Sent) -> torch.Tensor:
        torch.cuda.current_stream(self._device).wait_event(sent.done)
        return sent.tensor

    def wait(self, sent: Sent) -> None:
        sent.done.synchronize()


def moved_blocks(
    weight: torch.Tensor, blocks: Iterable[slice], device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield each of `blocks`, ranges of rows of `weight`, with these rows on `device`.

    The rows keep their type; on the host they are views.
    """
    if device.type == "cuda" and weight.device.type == "cpu":
        yield from staged_blocks(weight, list(blocks), CudaCopyStream(device))
        return
    for block in blocks:
        yield block, weight[block].to(device)


def staged_blocks(
    weight: torch.Tensor, blocks: Sequence[slice], stream: CopyStream
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield what `moved_blocks` does, copied by `stream` while the block before is in use."""
    elements = max((weight[block].numel() for block in blocks), default=0)
    buffers = [stream.buffer(elements, weight.dtype) for _ in blocks[:_BUFFERS]]
    sent: deque[Sent] = deque(maxlen=_BUFFERS)
    try:
        for number, block in enumerate(blocks):
            if number >= _BUFFERS:
                stream.wait(sent[0])
            rows = weight[block]
            host = buffers[number % _BUFFERS][: rows.numel()].view(rows.shape)
            sent.append(stream.send(host.copy_(rows)))
            if number:
                yield blocks[number - 1], stream.receive(sent[0])
        if sent:
            yield blocks[-1], stream.receive(sent[-1])
    finally:  # the memory must not be reused while it is written
        for each in sent:
            stream.wait(each)

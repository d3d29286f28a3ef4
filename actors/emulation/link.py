"""An emulated link: each message ends with the time at which it arrives, and is held until then."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor

from actors.emulation.clock import EmulatedClock
from actors.emulation.times import ScaledTimes
from actors.messages import MicroBatch, Sampled
from actors.transport.message_format import PlainCodec

_ARRIVAL = struct.Struct("<d")


class EmulatedLink:
    """A codec whose messages take the modelled time of the link from a stage to the next one.

    A result leaves when its stage has computed it and the link is free, while the stage goes on.
    """

    def __init__(self, codec: PlainCodec, times: ScaledTimes, clock: EmulatedClock) -> None:
        self._codec = codec
        self._times = times
        self._clock = clock
        self._free_s = 0.0

    def encode(self, batch: MicroBatch, result: Tensor | Sampled) -> Tensor:
        """The message of what the clock's stage has just computed, and its time of arrival."""
        sent_s = max(self._clock.reached_s, self._free_s)
        self._free_s = sent_s + self._times.transfer_s(batch)
        arrival = torch.frombuffer(bytearray(_ARRIVAL.pack(self._free_s)), dtype=torch.uint8)
        return torch.cat([self._codec.encode(batch, result), arrival])

    def decode(self, message: Tensor) -> tuple[MicroBatch, Tensor] | Sampled:
        """The content of `message`, once the link before this stage has brought it."""
        found = self._codec.decode(message[: -_ARRIVAL.size])
        (arrival_s,) = _ARRIVAL.unpack(message[-_ARRIVAL.size :].numpy().data)
        self._clock.wait_until(arrival_s)
        return found

    def message_bytes(self, first_frame: Tensor) -> int:
        """Length of the message that begins with `first_frame`."""
        size = self._codec.message_bytes(first_frame)
        return size + _ARRIVAL.size if size else 0


class EmulatedHandover:
    """The link by which a stage's host gives keys and values away, one message after the other, by
    a clock that all processes of the machine share.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._free_s = 0.0

    def arrival_s(self, seconds: float) -> float:
        """When a message arrives that is ready now and travels for so many `seconds`."""
        self._free_s = max(self._now_s(), self._free_s) + seconds
        return self._free_s

"""An emulated device: the clock that its stage and its link share."""

from __future__ import annotations

from actors.emulation.clock import EmulatedClock
from actors.emulation.link import EmulatedLink
from actors.emulation.stage import EmulatedStage, warm_up
from actors.emulation.times import ScaledTimes
from actors.stage.stage import Stage
from actors.transport.message_format import PlainCodec


class EmulatedDevice:
    """Puts a stage and the messages that it sends and receives under one modelled time."""

    def __init__(self, times: ScaledTimes) -> None:
        self._times = times
        self._clock = EmulatedClock()

    def stage(self, stage: Stage) -> EmulatedStage:
        """`stage`, warmed up, and held to its modelled times."""
        warm_up(stage, self._times.times)
        return EmulatedStage(stage, self._times, self._clock)

    def link(self, codec: PlainCodec) -> EmulatedLink:
        """Messages of `codec` that take their modelled times."""
        return EmulatedLink(codec, self._times, self._clock)

    @property
    def is_waiting(self) -> bool:
        """Whether the process waits, as the model asks; for any thread."""
        return self._clock.is_waiting

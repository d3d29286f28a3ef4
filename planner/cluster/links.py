"""Links between devices whose latency and rate were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.cluster.device import Device

Place = Literal["node", "network"]
"""Where a hop lies: between two devices of one node, or of two."""

Way = Literal["gloo", "ray"]


@dataclass(frozen=True)
class MeasuredLink:
    """What hops between such accelerators take: `latency_s` and bytes over `bytes_per_s`.

    `source` names the file.
    """

    one: str
    other: str
    place: Place
    way: Way
    latency_s: float
    bytes_per_s: float
    source: str = ""

    def joins(self, sender: Device, receiver: Device) -> bool:
        """Whether it lies between devices like these."""
        place = "node" if sender.node == receiver.node else "network"
        names = sorted((sender.accelerator.name, receiver.accelerator.name))
        return (names, place) == ([self.one, self.other], self.place)

    def faster(self, times: float) -> MeasuredLink:
        """The same at `times` its rate."""
        return replace(self, bytes_per_s=self.bytes_per_s * times)

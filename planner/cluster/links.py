"""Links between devices whose latency and rate were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.cluster.device import Device

Place = Literal["node", "network"]
"""Whether a hop is between two devices of one node, or of two nodes."""

Way = Literal["gloo", "ray"]


@dataclass(frozen=True)
class MeasuredLink:
    """A link measured between two types of accelerators, with its latency and rate.

    `source` names the file of the measurements.
    """

    one: str
    other: str
    place: Place
    way: Way
    latency_s: float
    bytes_per_s: float
    source: str = ""

    def joins(self, sender: Device, receiver: Device) -> bool:
        """Whether this is the link between devices of these types and places."""
        place = "node" if sender.node == receiver.node else "network"
        names = sorted((sender.accelerator.name, receiver.accelerator.name))
        return (names, place) == ([self.one, self.other], self.place)

    def faster(self, times: float) -> MeasuredLink:
        """This link with `times` the rate."""
        return replace(self, bytes_per_s=self.bytes_per_s * times)


@dataclass(frozen=True)
class MeasuredSum:
    """A measured all-reduce among `degree` devices of a type: its latency, and seconds per byte of
    the tensor that is summed.

    `source` names the file of the measurements.
    """

    accelerator: str
    degree: int
    latency_s: float
    s_per_byte: float
    source: str = ""

    def seconds(self, summed_bytes: float) -> float:
        """Seconds of summing a tensor of so many bytes."""
        return self.latency_s + summed_bytes * self.s_per_byte

"""Where the stages of a run meet to be linked, as drivers know it: without torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

CONTROL = "control"  # an actor's own thread for calls that must not wait for its work
HANDOVER = "handover"  # and for keys and values
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
"""GPUs may take so long to connect; the driver waits for two neighbours."""


@dataclass(frozen=True)
class Rendezvous:
    """The node address of each end, the seconds within which they must connect, and the `secret`
    by which they know each other. `nccl`: hidden states go from GPU to GPU where they can.
    """

    hosts: tuple[str, ...]
    timeout_s: float
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    nccl: bool = False

    def address(self, index: int) -> str:
        """The address on which end `index` listens: loopback where all ends are on one machine."""
        return self.hosts[index] if len(set(self.hosts)) > 1 else LOOPBACK

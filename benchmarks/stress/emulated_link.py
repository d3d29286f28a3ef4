"""A wire between two network namespaces with delay, loss and a rate, in a process of its own.

    python -m benchmarks.stress.emulated_link NAMESPACE NAMESPACE [--delay_ms 1] [--loss 0] ...

It forwards packets between two TUN devices, as kernels are often built without netem. Lines on
standard input switch it: `down` loses every packet, `up` ends that; it ends with its input. Needs
root and Linux's TUN devices.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

ADDRESSES = ("10.77.9.1", "10.77.9.2")
MTU = 9000
QUEUE_S = 0.1
"""Of packets that wait for their turn; more are lost, as at a switch."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


@dataclass
class Wire:
    """One direction: when each packet of `packets` is due at the device `to`."""

    to: int
    delay_s: float
    bytes_per_s: float
    loss: float
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0

    def take(self, packet: bytes, now: float) -> None:
        begins = max(now, self.free_at)
        if begins - now > QUEUE_S or random.random() < self.loss:
            return
        self.free_at = begins + len(packet) / self.bytes_per_s
        self.packets.append((self.free_at + self.delay_s, packet))

    def give(self, now: float) -> None:
        while self.packets and self.packets[0][0] <= now:
            os.write(self.to, self.packets.popleft()[1])


def tun(name: str) -> int:
    """A new TUN device, which the process keeps wherever it is moved."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def plug(number: int, namespace: str) -> int:
    """End `number` of the wire in `namespace`."""
    name = f"wire{os.getpid()}"
    device = tun(name)
    here, there = ADDRESSES[number], ADDRESSES[1 - number]
    for words in (
        f"link set {name} netns {namespace} mtu {MTU}",
        f"-n {namespace} address add {here} peer {there} dev {name}",
        f"-n {namespace} link set {name} up",
        f"-n {namespace} link set lo up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def forward(wires: dict[int, Wire]) -> None:
    """Until standard input ends; `wires` by the device whose packets they take."""
    is_up, selector = True, selectors.DefaultSelector()
    for device in (*wires, sys.stdin.fileno()):
        selector.register(device, selectors.EVENT_READ)
    while True:
        due = [wire.packets[0][0] for wire in wires.values() if wire.packets]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in selector.select(wait):
            if key.fd not in wires:
                line = os.read(key.fd, 64)
                if not line:
                    return
                is_up = line.strip() != b"down"
                continue
            packet = os.read(key.fd, 65536)
            if is_up:
                wires[key.fd].take(packet, time.monotonic())
        for wire in wires.values():
            wire.give(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--delay_ms", type=float, default=1.0, help="in one direction")
    parser.add_argument("--rate_mbit", type=float, default=1000.0)
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    given = parser.parse_args()
    one, other = (plug(number, name) for number, name in enumerate(given.namespaces))
    each = (given.delay_ms / 1e3, given.rate_mbit * 1e6 / 8, given.loss)
    print("ready", flush=True)
    forward({one: Wire(other, *each), other: Wire(one, *each)})


if __name__ == "__main__":
    main()

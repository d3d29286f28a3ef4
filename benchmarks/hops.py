"""Time of a micro-batch from one stage's process to the next, by Ray references and by gloo.

    python -m benchmarks.hops [--turns 300]

Half of a round trip between two actors of one node, packing and unpacking included.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from actors.messages import MicroBatch
from actors.transport.links import Links, Meeting, MeetingPlace
from actors.transport.packed import PackedTensor, pack, unpack
from actors.transport.wire import decode, encode
from benchmarks.machine import processor_name
from llmpq.session import ray_session

HOST = "127.0.0.1"
ROWS = 16
SIZES_BYTES = (32 << 10, 1 << 20)
WARM_UP = 10
TIMEOUT_S = 60.0


class End:
    """One of two processes."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._links: Links
        self._place: MeetingPlace

    def open(self) -> Meeting:
        """Listen for the other."""
        self._place = MeetingPlace(HOST, 2, TIMEOUT_S)
        return self._place.meeting

    def connect(self, meeting: Meeting, index: int) -> None:
        """Link both."""
        self._links = Links(meeting, index, 2, HOST)

    def echo(self, batch: MicroBatch, hidden: PackedTensor) -> PackedTensor:
        """Unpack and pack, as a stage does."""
        return pack(unpack(hidden))

    def serve(self) -> None:
        """Send back what comes."""
        receiver, sender = self._links.receiver(0), self._links.sender(0)
        while True:
            message: Any = decode(receiver.receive())
            sender.send(encode(*message))

    def by_ray(self, other: Any, size_bytes: int, turns: int) -> list[float]:
        """Seconds of each round trip."""
        batch, hidden = _message(size_bytes)
        return _timed(lambda: unpack(ray.get(other.echo.remote(batch, pack(hidden)))), turns)

    def by_gloo(self, sizes_bytes: tuple[int, ...], turns: int) -> list[list[float]]:
        """Seconds of each round trip, by size."""
        down, back = self._links.sender(1), self._links.receiver(1, TIMEOUT_S)
        found = []
        for size_bytes in sizes_bytes:
            batch, hidden = _message(size_bytes)

            def there_and_back(batch: MicroBatch = batch, hidden: Tensor = hidden) -> object:
                down.send(encode(batch, hidden))
                return decode(back.receive())

            found.append(_timed(there_and_back, turns))
        return found


def _message(size_bytes: int) -> tuple[MicroBatch, Tensor]:
    batch = MicroBatch(np.arange(ROWS), np.full(ROWS, 9), np.ones(ROWS, dtype=np.int64))
    return batch, torch.randn(ROWS, size_bytes // 2 // ROWS).half()


def _timed(work: Any, turns: int) -> list[float]:
    times = []
    for _ in range(turns + WARM_UP):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=300)
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}, Ray {ray.__version__}\n")
    print("| payload | way | ms at 10 % | median | at 90 % |\n|---|---|---|---|---|")
    with ray_session("local"):
        remote: Any = ray.remote(End).options(
            num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}
        )
        first, second = remote.remote(), remote.remote()
        meeting = ray.get(first.open.remote())
        ray.get([first.connect.remote(meeting, 0), second.connect.remote(meeting, 1)])
        rows = [ray.get(first.by_ray.remote(second, size, options.turns)) for size in SIZES_BYTES]
        second.serve.remote()
        linked = ray.get(first.by_gloo.remote(SIZES_BYTES, options.turns))
    for way, found in (("Ray references", rows), ("gloo", linked)):
        for size, times in zip(SIZES_BYTES, found, strict=True):
            low, middle, high = np.percentile(np.array(times) / 2 * 1e3, [10, 50, 90])
            print(f"| {size >> 10} KiB | {way} | {low:.2f} | {middle:.2f} | {high:.2f} |")


if __name__ == "__main__":
    main()

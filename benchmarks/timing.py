"""Times of work on a device, and work recorded as a CUDA graph; a CPU stands in for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

EVICTING_BYTES = 1 << 28
"""Five times the 50 MB of an H100, which keeps more than any other GPU so far."""

_WARM_UPS = 3
"""Before a capture: libraries make their handles and workspaces at first calls."""


@dataclass(frozen=True)
class Captured:
    """Recorded work: `replay` does it again on the same memory; `output` is what it returned."""

    replay: Callable[[], object]
    output: Any


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of `work` from an idle device on: launches count as far as the device waits for them.

    On a GPU the time between two events on the current stream.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(device: torch.device, work: Callable[[], Any]) -> Captured:
    """`work`, warmed up and recorded as a CUDA graph on a side stream; on a CPU `work` itself.

    `work` reads and writes the same tensors each time. RuntimeError where it waits for the device
    or copies from pageable host memory, which a graph cannot hold.
    """
    if device.type != "cuda":
        return Captured(work, work())
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # whose handles and workspaces are there now
        output = work()
    return Captured(graph.replay, output)


def evictor(device: torch.device) -> Callable[[], object]:
    """Work that leaves nothing else in a GPU's cache; none on a CPU."""
    if device.type != "cuda":
        return lambda: None
    return torch.empty(EVICTING_BYTES, dtype=torch.uint8, device=device).zero_

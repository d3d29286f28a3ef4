"""Timing a part of layers, such as attention, where it runs in a pass."""

from __future__ import annotations

import time

import torch


class AttentionTimer:
    """Times attention, or experts, where they run in a pass, with the caches as the rest of a layer
    leaves them.

    Entered before that part of each layer. On a GPU events in its stream are timed, which hold up
    what starts kernels by some microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._began_s = self._seconds = 0.0

    def __enter__(self) -> None:
        if self._on_gpu:
            self._record()
        else:
            self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            self._record()
        else:
            self._seconds += time.perf_counter() - self._began_s

    def take_s(self) -> float:
        """Seconds of the part since the last call, in all layers; waits for the GPU."""
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds += sum(began.elapsed_time(ended) for began, ended in pairs) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

"""How a stage is: what it computes, what it failed at, and what its scheduler has so far."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from actors.messages import MicroBatch
from planner.phases import Phase
from quant.common.errors import LlmpqError

_SHORT_OF_MEMORY = ("can't allocate", "out of memory", "bad allocation", "std::bad_alloc")
_BROKEN_DEVICE = ("CUDA error", "HIP error", "device-side assert")
_ASKED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class BatchFailure:
    """What a stage could not compute: a micro-batch of `slots`, and why.

    `asked_bytes` is 0 where the message does not say it. `is_broken`: the process cannot use its
    device again.
    """

    phase: Phase
    slots: tuple[int, ...]
    text: str
    short_of_memory: bool = False
    asked_bytes: int = 0
    held_bytes: int = 0
    is_broken: bool = False


@dataclass(frozen=True, eq=False)
class SoFar:
    """By KV slot, what the first stage has there in a `run`: a request and its new tokens."""

    run: int | None
    slots: Mapping[int, tuple[str, npt.NDArray[np.int64]]]


@dataclass(frozen=True)
class Pulse:
    """A living stage's answer: micro-batches done, seconds spent on the present one (0: none), and
    on the first stage the tokens so far. `is_held`: it waits for its modelled time to be over.
    """

    done: int
    computing_s: float
    so_far: SoFar | None = None
    is_held: bool = False


@dataclass(frozen=True)
class Settled:
    """What a stage that left a broken run has to say about it."""

    failure: BatchFailure | None
    so_far: SoFar | None


class Health:
    """Kept by the thread that computes; other threads may read at any time."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._failure: BatchFailure | None = None
        self._done = 0
        self._batch: MicroBatch | None = None
        self._began_s: float | None = None

    def computing(self, batch: MicroBatch) -> Self:
        """A context around the computation of `batch`, which keeps why that failed."""
        self._batch = batch
        return self

    def __enter__(self) -> None:
        """Computing begins."""
        self._began_s = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It ended; an error of the user's is none of the micro-batch's."""
        self._began_s = None
        if error is None:
            self._done += 1
        elif self._batch is not None and not isinstance(error, LlmpqError):
            self._failure = _failure(self._batch, error, self.device)

    def pulse(self, so_far: SoFar | None) -> Pulse:
        """Now."""
        began_s = self._began_s
        computing_s = 0.0 if began_s is None else time.monotonic() - began_s
        return Pulse(self._done, computing_s, so_far)

    def take_failure(self) -> BatchFailure | None:
        """The last failure, which is forgotten; memory that nobody uses is given back."""
        failure, self._failure = self._failure, None
        if failure is not None and failure.short_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return failure


def _failure(batch: MicroBatch, error: BaseException, device: torch.device | None) -> BatchFailure:
    text = str(error)
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in _SHORT_OF_MEMORY
    )
    found = _ASKED.search(text)
    return BatchFailure(
        phase="decode" if batch.is_decode else "prefill",
        slots=tuple(batch.slots.tolist()),
        text=f"{type(error).__name__}: {text}",
        short_of_memory=short,
        asked_bytes=int(float(found[1]) * _UNITS[found[2]]) if found else 0,
        held_bytes=held_bytes(device) if short else 0,
        is_broken=not short and any(words in text for words in _BROKEN_DEVICE),
    )


def held_bytes(device: torch.device | None) -> int:
    """Bytes that torch holds on a GPU, or that this process has in memory (0: not known)."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) * 2**10 if found else 0

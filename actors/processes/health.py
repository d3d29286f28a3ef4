"""What a stage tells of its own health: what it computes, what it failed at, and its heartbeat."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.messages import BatchKind, MicroBatch, SlotTokens
from quant.common.errors import LlmpqError, StageLostError

if TYPE_CHECKING:  # drivers know of failures without torch
    import torch

_SHORT_OF_MEMORY = (
    "can't allocate",
    "out of memory",
    "bad allocation",
    "std::bad_alloc",
    "STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN and cuSPARSE
)
_BROKEN_DEVICE = ("CUDA error", "CUDA driver error", "HIP error", "device-side assert")
_ASKED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


FailureKind = Literal["failed", "memory", "device"]
"""Why a micro-batch failed: an error of its computation, too little memory, or a device that the
process cannot use again."""


@dataclass(frozen=True)
class BatchFailure:
    """A micro-batch of `slots` that a stage could not compute; `text` is the error.

    Where memory was short, `asked_bytes` could not be had (0: the error does not say it) beside the
    `held_bytes`.
    """

    kind: FailureKind
    batch_kind: BatchKind
    slots: tuple[int, ...]
    text: str
    asked_bytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True)
class RankSigns:
    """Signs of life of the ranks that follow rank 0 of a stage: one that has `died`, and one that
    has given none since it was asked `silent_s` ago, the longest.
    """

    died: int | None = None
    silent: int | None = None
    silent_s: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """A living stage's answer: micro-batches done, seconds spent on the present one (0: none), and
    on the first stage the tokens of its slots. `is_held`: it waits for its modelled time to be
    over. `ranks`: what is known of its other ranks.
    """

    done: int
    computing_s: float
    tokens: SlotTokens | None = None
    is_held: bool = False
    ranks: RankSigns = RankSigns()


@dataclass(frozen=True)
class RunReport:
    """Report of a stage that has left a broken run; `tokens` on the first stage only."""

    failure: BatchFailure | None
    tokens: SlotTokens | None


class Health:
    """A stage's record of its micro-batches, kept by the thread that computes, read by any."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._failure: BatchFailure | None = None
        self._done = 0
        self._began_s: float | None = None

    @contextmanager
    def computing(self, batch: MicroBatch) -> Iterator[None]:
        """Note that `batch` is computed, and why that fails through no mistake or lost rank."""
        self._began_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, LlmpqError | StageLostError):
                self._failure = _failure(batch, error, self.device)
            raise
        else:
            self._done += 1
        finally:
            self._began_s = None

    def heartbeat(self, tokens: SlotTokens | None) -> Heartbeat:
        began_s = self._began_s
        computing_s = 0.0 if began_s is None else time.monotonic() - began_s
        return Heartbeat(self._done, computing_s, tokens)

    def take_failure(self) -> BatchFailure | None:
        """Return the last failure and forget it; after one of memory, free what is not used."""
        failure, self._failure = self._failure, None
        on_gpu = self.device is not None and self.device.type == "cuda"
        if failure is not None and failure.kind == "memory" and on_gpu:
            import torch

            torch.cuda.empty_cache()
        return failure


def _failure(batch: MicroBatch, error: BaseException, device: torch.device | None) -> BatchFailure:
    text = str(error)
    kind = _kind_of(error, text)
    asked = _ASKED.search(text)
    return BatchFailure(
        kind,
        batch_kind=batch.kind,
        slots=tuple(batch.slots.tolist()),
        text=f"{type(error).__name__}: {text}",
        asked_bytes=int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0,
        held_bytes=held_bytes(device) if kind == "memory" else 0,
    )


def _kind_of(error: BaseException, text: str) -> FailureKind:
    """Classify an error of torch's, which has no types for most of its own."""
    import torch

    is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_short or any(words in text for words in _SHORT_OF_MEMORY):
        return "memory"
    return "device" if any(words in text for words in _BROKEN_DEVICE) else "failed"


def held_bytes(device: torch.device | None) -> int:
    """Return the bytes that torch holds on a GPU, or else this process in memory (0: not known)."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) * 2**10 if found else 0

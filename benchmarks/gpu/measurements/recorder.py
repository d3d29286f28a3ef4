"""Records CUDA graphs for a part until one cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.lab import Captured, captured


class Recorder:
    """Says in `findings` what cannot be recorded, and why; then it records no more.

    torch's allocator may not notice that a broken capture has ended, and refuses the next one.
    """

    def __init__(self, findings: Findings, device: torch.device) -> None:
        self._findings = findings
        self._device = device
        self._broken = False

    def record(self, what: str, work: Callable[[], Any]) -> Captured | None:
        """`work` as a graph; None where that is not possible."""
        if self._broken:
            return None
        try:
            return captured(self._device, work)
        except RuntimeError as error:
            self._broken = True
            reason = str(error).partition("\n")[0]
            self._findings.note(
                f"{what} cannot be recorded as a graph: {reason}; nothing is recorded after it"
            )
            return None

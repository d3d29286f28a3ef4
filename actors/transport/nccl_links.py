"""Links of stages of which neighbours on one node have a GPU each: hidden states go from GPU to GPU
by NCCL, and everything else as over `gloo_links`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from actors.transport.collectives import Meeting
from actors.transport.gloo_links import Board, Links, lost
from actors.transport.nccl import GpuLink, gpu_name, nccl_group
from actors.transport.rendezvous import CONNECT_S, Rendezvous
from quant.common.errors import DeviceError, StageLostError

_LONGEST = timedelta(hours=1)
"""Until a receiver is ready for what was sent, micro-batches before it are computed. Torch ends the
process of a sender that waits longer."""

_WORDS = 2  # the tag of what neighbours tell each other; messages have 0, proofs 1
_WORDS_BYTES = 2048


class NcclLinks(Links):
    """Links of stage `index`, which computes on `device`. Where NCCL cannot connect it to a
    neighbour on the same node with another GPU, it warns, and hidden states go in messages.
    """

    def __init__(
        self, rendezvous: Rendezvous, index: int, board: Board, device: torch.device
    ) -> None:
        super().__init__(rendezvous, index, board)
        self._device = device
        self._timeout = timedelta(seconds=rendezvous.timeout_s + 2 * CONNECT_S)
        self._gpu_links: dict[int, GpuLink] = {}
        self._meetings: list[Meeting] = []
        hosts = rendezvous.hosts
        pairs = [lower for lower in (index - 1, index) if 0 <= lower < self.stages - 1]
        try:
            for lower in sorted(pairs, key=lambda lower: lower % 2):  # all even ones at once
                if rendezvous.nccl and hosts[lower] == hosts[lower + 1]:
                    self._link_gpus(2 * lower + 1 - index)
        except BaseException:
            self.close()
            raise

    def gpu_link(self, other: int) -> GpuLink | None:
        return self._gpu_links.get(other)

    def stop(self) -> None:
        super().stop()
        self.close()

    def close(self) -> None:
        """End all transfers between GPUs, whatever waits for them; for any thread."""
        for link in self._gpu_links.values():
            link.abort()
        for meeting in self._meetings:
            meeting.end()

    def _link_gpus(self, other: int) -> None:
        """Link to the GPU of stage `other`, which does the same at the same time."""
        own = gpu_name(self._device)
        theirs = self._exchange(other, own)
        if not own or not theirs or own == theirs:
            return
        rank = int(other < self.index)
        if not rank:
            self._meetings.append(Meeting.on_this_node())
        own = "" if rank else str(self._meetings[-1].folder)
        folder = Path(self._exchange(other, own) or own)
        try:
            self._both(other, lambda: self._join(other, rank, folder))
            self._both(other, lambda: self._gpu_links[other].prove(CONNECT_S))
        except DeviceError as error:
            failed = self._gpu_links.pop(other, None)
            if failed is not None:
                failed.abort()
            if not rank:  # it says so for both
                warnings.warn(
                    f"NCCL does not link the GPUs of stages {self.index} and {other}: {error}; "
                    "their hidden states go through host memory, which takes longer",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _join(self, other: int, rank: int, folder: Path) -> None:
        if not folder.is_dir():
            raise DeviceError(f"{folder} is not there, the stages do not share files")
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(folder / "store"), 2)
        group = nccl_group(store, rank, 2, self._device, _LONGEST)
        self._gpu_links[other] = GpuLink(group, rank, self._device, partial(lost, other))

    def _both(self, other: int, action: Callable[[], None]) -> None:
        """Run `action` here and there; raises `DeviceError` on both sides where it fails on one."""
        problem = ""
        try:
            action()
        except (RuntimeError, DeviceError, StageLostError) as error:
            problem = str(error) or type(error).__name__
        problems = dict.fromkeys((problem, self._exchange(other, problem)))
        if any(problems):
            raise DeviceError("; ".join(filter(None, problems)))

    def _exchange(self, other: int, words: str) -> str:
        """Tell `words` to stage `other`, and return what it tells."""
        said, heard = (torch.zeros(_WORDS_BYTES, dtype=torch.uint8) for _ in range(2))
        content = words.encode()[:_WORDS_BYTES]
        said.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        try:
            sending = self._group.send([said], other, _WORDS)
            self._group.recv([heard], other, _WORDS).wait(self._timeout)
            sending.wait(self._timeout)
        except RuntimeError as error:
            raise lost(other, error) from error
        return heard.numpy().tobytes().rstrip(b"\0").decode(errors="replace")

"""Where the ranks of a stage meet: a file of their node, and a secret.

No port listens for them, as a store of torch's that is asked over TCP would on all addresses.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed

from actors.collectives.distributed import DistributedGroup, Seat


@dataclass(frozen=True)
class Meeting:
    """The `folder`, which only the user may read that the processes run as, and the `secret` by
    which the ranks know each other.
    """

    folder: Path
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @classmethod
    def on_this_node(cls) -> Meeting:
        """A meeting in a new folder; `end` removes it."""
        return cls(Path(tempfile.mkdtemp(prefix="llmpq-ranks-")))

    def end(self) -> None:
        """Remove the folder; NCCL looks into its store for as long as its ranks are together."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def join(self, rank: int, degree: int, device: torch.device) -> DistributedGroup:
        """The group of this rank, once all of them have come; `DeviceError` where they do not."""
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(self.folder / "store"), degree)
        return DistributedGroup(Seat(rank, degree, device, secret=self.secret), store, self.folder)

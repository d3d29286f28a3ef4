"""The place where a part runs: a GPU, or in a dry run the CPU with small sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """`folder` is shared by all parts of a run: models that one has written serve the others.

    `kept`: beside the report, for what parts of a later run may use.
    """

    folder: Path
    kept: Path
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        """The device to compute on."""
        import torch

        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    def size(self, full: _T, dry: _T) -> _T:
        """`full` on a GPU, `dry` in a dry run."""
        return dry if self.dry_run else full

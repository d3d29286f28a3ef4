"""Options of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.option_rules import refuse_not_finite
from quant.common.errors import SpecError
from quant.common.units import GIB, MIB

FOLDER_SUFFIX = ".batches"
"""Ending of the folder beside a plan file."""


@dataclass(frozen=True)
class BatchOptions:
    """Folder and limits of files and batches; raises `SpecError` for values out of range.

    `file_limit_mib`: most MiB of a file that is sent, OpenAI's 200 by default.
    `batch_dir_limit_gib`: most GiB of all files, beyond which none is taken; results are written in
    any case.
    """

    batch_dir: Path
    file_limit_mib: float = 200.0
    batch_dir_limit_gib: float = 10.0

    def __post_init__(self) -> None:
        """Check ranges."""
        refuse_not_finite(self)
        for name in ("file_limit_mib", "batch_dir_limit_gib"):
            if getattr(self, name) <= 0:
                raise SpecError(f"{name} is {getattr(self, name)!r}; give a number above 0")

    @property
    def file_limit_bytes(self) -> int:
        """Most bytes of a file that is sent."""
        return int(self.file_limit_mib * MIB)

    @property
    def store_limit_bytes(self) -> int:
        """Most bytes of all files."""
        return int(self.batch_dir_limit_gib * GIB)

"""Importance that is kept: in memory for a process, and in a folder for later ones.

Whoever loads the same model again, on other devices or after a fault, then rounds by the same
numbers and gets the same codes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quant.common.errors import CheckpointError, InputError
from quant.importance.file import Importance, load_importance, save_importance
from quant.importance.header import SUFFIX
from quant.importance.statistics import LayerImportance

_KEPT_FILES = 64
"""Most files kept, the ones used last: a 70B model has 30 MB."""


class ImportanceStore:
    """The importance of one model.

    `folder` keeps it for later processes (None: nothing is kept); `model` identifies the checkpoint
    there; `shape` is the fingerprint of the model's shape. `known`: what is used in any case.
    `turn`: the lock of who finds or measures it, so that who loads meanwhile finds the same.
    """

    def __init__(
        self,
        folder: Path | None = None,
        model: str = "",
        shape: str = "",
        known: Importance | None = None,
    ) -> None:
        self._folder = folder
        self._model = model
        self._shape = shape
        self.known = known
        self.turn = threading.Lock()

    def find(self, seen: str) -> Importance | None:
        """What is known, or was kept of the same model and of what was `seen`.

        A damaged file counts as missing, with a warning.
        """
        if self.known is None and self._folder is not None:
            path = self._path(seen)
            try:
                if path.is_file():
                    self.known = _of_shape(load_importance(path), self._shape, path)
                    with suppress(OSError):  # a folder that may only be read
                        os.utime(path)
            except (CheckpointError, OSError) as error:
                warnings.warn(f"{error} (it is measured again now)", RuntimeWarning, stacklevel=3)
        return self.known

    def keep(self, layers: Sequence[LayerImportance], seen: str) -> Importance:
        """Keep what was measured of all `layers`; where it cannot be written, warn."""
        self.known = Importance(tuple(layers), seen, self._shape)
        if self._folder is not None:
            try:
                keep_file(self._folder, self._path(seen), self.known)
            except InputError as error:
                warnings.warn(
                    f"{error}; it is measured again at the next start", RuntimeWarning, stacklevel=3
                )
        return self.known

    def _path(self, seen: str) -> Path:
        assert self._folder is not None, "nothing is kept without a folder"
        what = hashlib.sha256(f"{self._model} {seen}".encode()).hexdigest()[:32]
        return self._folder / f"{what}{SUFFIX}"


def keep_file(folder: Path, path: Path, importance: Importance) -> None:
    """Write `path` in `folder`, which is created; the files used least recently make room."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {folder} ({error.strerror})") from error
    save_importance(path, importance)
    with suppress(OSError):
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime_ns)
        for old in files[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)


def _of_shape(found: Importance, shape: str, path: Path) -> Importance:
    if shape and found.shape != shape:
        raise CheckpointError(f"{path} belongs to a model of shape {found.shape}, not {shape}")
    return found

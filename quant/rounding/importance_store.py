"""Where the importance of a model is found, or kept when it is measured; torch comes with it."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quant.common.errors import CheckpointError, InputError
from quant.rounding.importance_header import SUFFIX

if TYPE_CHECKING:
    from quant.rounding.importance import Importance, LayerImportance


class ImportanceStore:
    """The importance of one model: `known`, else kept in `folder`, so that whoever loads the model
    again, on other devices or after a fault, rounds by the same numbers and gets the same codes.
    `turn` is the lock of who finds or measures it, so that who loads meanwhile finds the same.
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

    def place_of(self, seen: str) -> tuple[Path, str, str] | None:
        """The arguments of a store that finds in a file what this one has not read yet; None where
        it has, or there is no file.
        """
        folder = self._folder
        if self.known is not None or folder is None or not self._path(seen).is_file():
            return None
        return folder, self._model, self._shape

    def find(self, seen: str) -> Importance | None:
        """What is known or kept of `seen`; a damaged file counts as missing, with a warning."""
        if self.known is None and self._folder is not None:
            path = self._path(seen)
            try:
                if path.is_file():
                    from quant.rounding.importance import load_importance

                    self.known = self._checked(load_importance(path), path)
                    with suppress(OSError):  # a folder that may only be read
                        os.utime(path)
            except (CheckpointError, OSError) as error:
                warnings.warn(f"{error} (it is measured again now)", RuntimeWarning, stacklevel=3)
        return self.known

    def keep(self, layers: Sequence[LayerImportance], seen: str) -> Importance:
        from quant.rounding.importance import Importance, keep_file

        self.known = Importance(tuple(layers), seen, self._shape)
        if self._folder is not None:
            try:
                keep_file(self._folder, self._path(seen), self.known)
            except InputError as error:
                warnings.warn(
                    f"{error}; it is measured again at the next start", RuntimeWarning, stacklevel=3
                )
        return self.known

    def _checked(self, found: Importance, path: Path) -> Importance:
        if self._shape and found.shape != self._shape:
            raise CheckpointError(
                f"{path} belongs to a model of shape {found.shape}, not {self._shape}"
            )
        return found

    def _path(self, seen: str) -> Path:
        assert self._folder is not None, "nothing is kept without a folder"
        what = hashlib.sha256(f"{self._model} {seen}".encode()).hexdigest()[:32]
        return self._folder / f"{what}{SUFFIX}"

"""The tensors in a folder of safetensors files, each mapped when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.checkpoint.stored_tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    missing_in_hub_cache,
    read_index,
    shard_path,
    unreadable,
)
from quant.checkpoint.tensor_files.read_ahead import FileRange
from quant.checkpoint.tensor_files.tensor_header import DamagedFileError, TensorPlace, read_header
from quant.checkpoint.weight_files import unread_weights
from quant.common.errors import CheckpointError


class SafetensorsFiles:
    """The tensors of `folder`. `before_open` is told a file's name before its content is looked at.

    `CheckpointError` if there are no weights to read.
    """

    def __init__(self, folder: Path, before_open: Callable[[str], object]) -> None:
        self._folder, self._before_open = folder, before_open
        self._opened: dict[str, Any] = {}
        self._places: dict[str, Mapping[str, TensorPlace]] = {}
        self.file_of = self._list_tensors()

    def check(self) -> None:
        """Open every file's header; CheckpointError names one that is missing or damaged."""
        for file in dict.fromkeys(self.file_of.values()):
            self._open(file)

    def read(self, name: str) -> torch.Tensor:
        """Map the tensor `name`; errors as in `Checkpoint.read`."""
        handle = self._handle(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, OSError) as error:  # TypeError: a shape
            raise unreadable(self._folder / self.file_of[name], error) from error
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, from its file's header; errors as in `read`."""
        try:
            return tuple(self._handle(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise unreadable(self._folder / self.file_of[name], error) from error

    def range_of(self, name: str) -> FileRange:
        """The file and bytes of the tensor `name`; errors as in `read`."""
        self._handle(name)
        file = self.file_of[name]
        if file not in self._places:
            path = self._folder / file
            try:
                with path.open("rb") as opened:
                    self._places[file] = read_header(opened).places
            except (DamagedFileError, OSError) as error:
                raise unreadable(self._folder / file, error) from error
        place = self._places[file][name]
        return FileRange(self._folder / file, place.start, place.stop)

    def _handle(self, name: str) -> Any:
        """The open file that holds `name`."""
        file = self.file_of[name]
        handle = self._open(file)
        if name not in handle.keys():  # noqa: SIM118  (the handle is no mapping)
            raise CheckpointError(
                f"{self._folder / INDEX_FILE} places tensor {name} in {file}, which lacks it; "
                "download the checkpoint again"
            )
        return handle

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = shard_path(self._folder, file)
            self._before_open(file)
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except (SafetensorError, RuntimeError, OSError) as error:
                raise unreadable(self._folder / file, error) from error
        return self._opened[file]

    def _list_tensors(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self._folder / SINGLE_FILE).is_file():  # before an index, as `stored_tensors` has it
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        if (self._folder / INDEX_FILE).is_file():
            return read_index(self._folder / INDEX_FILE)
        unread = unread_weights(self._folder)
        if unread is not None:
            raise CheckpointError(unread)
        raise CheckpointError(
            missing_in_hub_cache(self._folder)
            or f"{self._folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "give the folder that holds the weights"
        )

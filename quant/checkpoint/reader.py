"""Reading the weights of a model one tensor at a time from safetensors files.

Files are mapped, not read: a tensor is a view of the file until it is copied, so that a stage never
holds more of a checkpoint in memory than what it keeps. With `reading_ahead` another thread brings
the tensors that are needed next into the system's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quant.checkpoint.gptq_config import GptqConfig, read_gptq_config
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.read_ahead import READ_AHEAD_BYTES, FileRange, ReadAhead
from quant.checkpoint.stored_tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    read_index,
    shard_path,
    spellings,
    unreadable,
)
from quant.checkpoint.tensor_header import DamagedFileError, TensorPlace, read_header
from quant.checkpoint.weight_files import unread_weights
from quant.common.errors import CheckpointError
from quant.common.file_identity import FileIdentity

_SETTINGS_FILES = ("config.json", "quantize_config.json")
"""Files that say how the stored tensors have to be read."""


class Checkpoint:
    """The tensors of a local folder of safetensors files, or of a model on the hub.

    `path` is a folder, or a hub id such as `facebook/opt-125m` (taken from the local cache where
    the hub cannot be reached). CheckpointError if there are no weights to read.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = resolve(path)
        self._files: dict[str, Any] = {}
        self._places: dict[str, Mapping[str, TensorPlace]] = {}
        self._identities: dict[str, FileIdentity] = {}
        self._ahead: ReadAhead | None = None
        self._file_of = self._list_tensors()

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def check_files(self) -> None:
        """Open every file's header; CheckpointError names one that is missing or damaged."""
        for file in dict.fromkeys(self._file_of.values()):
            self._open(file)

    def read(self, name: str) -> torch.Tensor:
        """Map the tensor `name` as a view of its file; copy it to keep it, and do not write to it.

        CheckpointError if it is missing or its file is missing or damaged.
        """
        handle = self._handle(name)
        try:
            if self._ahead is not None:
                self._ahead.wait_for(self.range_of(name))
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, OSError) as error:  # TypeError: a shape
            raise unreadable(self.folder / self._file_of[name], error) from error
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, from its file's header; errors as in `read`."""
        try:
            return tuple(self._handle(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise unreadable(self.folder / self._file_of[name], error) from error

    def range_of(self, name: str) -> FileRange:
        """The file and bytes of the tensor `name`; errors as in `read`."""
        self._handle(name)
        file = self._file_of[name]
        if file not in self._places:
            path = self.folder / file
            try:
                with path.open("rb") as opened:
                    self._places[file] = read_header(opened).places
            except (DamagedFileError, OSError) as error:
                raise unreadable(self.folder / file, error) from error
        place = self._places[file][name]
        return FileRange(self.folder / file, place.start, place.stop)

    @contextmanager
    def reading_ahead(
        self, ranges: Sequence[FileRange], window_bytes: int = READ_AHEAD_BYTES
    ) -> Iterator[ReadAhead]:
        """Bring `ranges` into memory in that order, `window_bytes` ahead, inside this context.

        The ranges may be of other files too. `read` waits for its tensor.
        """
        with ReadAhead(ranges, window_bytes) as ahead:
            self._ahead = ahead
            try:
                yield ahead
            finally:
                self._ahead = None

    def names_below(self, name_prefix: str) -> list[str]:
        """The stored names of the tensors of the module `name_prefix`, in any spelling, sorted."""
        base, _, rest = name_prefix.partition(".")
        prefixes = (f"{name_prefix}.", f"{rest}.", f"{base}.{name_prefix}.")
        return sorted(name for name in self._file_of if name.startswith(prefixes))

    def fingerprint(self, name_prefix: str) -> str:
        """A digest that differs for other tensors below `name_prefix`, made without reading them.

        It depends on the names, on the files that hold them (path, inode, size, and the times of
        the last change to the content and to anything, the latter of which no program can set), and
        on the files that say how tensors are read. It waits until the last change is a clock tick
        ago, so that a later one is noticed. CheckpointError if a file is missing.
        """
        file_of = {name: self._file_of[name] for name in self.names_below(name_prefix)}
        files = {file: self._identity(file) for file in sorted(set(file_of.values()))}
        for identity in files.values():
            identity.settle()
        settings = [self.folder / file for file in _SETTINGS_FILES]
        content = [path.read_text("utf-8", "replace") for path in settings if path.is_file()]
        identities = {file: astuple(identity) for file, identity in files.items()}
        return hashlib.sha256(json.dumps([file_of, identities, content]).encode()).hexdigest()

    def is_unchanged(self, name_prefix: str) -> bool:
        """Whether the files with tensors below `name_prefix` did not change since `fingerprint`."""
        files = {self._file_of[name] for name in self.names_below(name_prefix)}
        try:
            return all(FileIdentity.of(self.folder / f) == self._identity(f) for f in files)
        except OSError:  # removed, or no longer readable
            return False

    def find(self, name: str, prefix: str = "") -> str:
        """Find the name under which a tensor is stored.

        Tries `prefix.name`, `name`, and `name` without `prefix`: checkpoints are saved with or
        without the base model's prefix (OPT's lack `model.`, BLOOM's `transformer.`).
        CheckpointError names the tensor if none is there.
        """
        candidates = spellings(name, prefix)
        for candidate in candidates:
            if candidate in self._file_of:
                return candidate
        raise CheckpointError(
            f"{self.folder} has no tensor {name} (tried {', '.join(dict.fromkeys(candidates))}) "
            f"among its {len(self._file_of)}; it is incomplete or of another model"
        )

    def has(self, name: str, prefix: str = "") -> bool:
        return any(candidate in self._file_of for candidate in spellings(name, prefix))

    @cached_property
    def gptq(self) -> GptqConfig | None:
        """The storage of quantized linears; None for plain weights, SpecError if unknown."""
        return read_gptq_config(self.folder)

    def _handle(self, name: str) -> Any:
        """The open file that holds `name`."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name} among its {len(self._file_of)}; "
                "it is incomplete or of another model"
            )
        handle = self._open(file)
        if name not in handle.keys():  # noqa: SIM118  (the handle is no mapping)
            raise CheckpointError(
                f"{self.folder / INDEX_FILE} places tensor {name} in {file}, which lacks it; "
                "download the checkpoint again"
            )
        return handle

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = shard_path(self.folder, file)
            self._identity(file)  # before its content
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, RuntimeError, OSError) as error:
                raise unreadable(self.folder / file, error) from error
        return self._files[file]

    def _identity(self, file: str) -> FileIdentity:
        if file not in self._identities:
            self._identities[file] = FileIdentity.of(shard_path(self.folder, file))
        return self._identities[file]

    def _list_tensors(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.folder / INDEX_FILE).is_file():
            return read_index(self.folder / INDEX_FILE)
        if (self.folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        unread = unread_weights(self.folder)
        if unread is not None:
            raise CheckpointError(unread)
        raise CheckpointError(
            f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "give the folder that holds the weights"
        )

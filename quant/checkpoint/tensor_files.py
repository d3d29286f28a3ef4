"""Safetensors files, tensor by tensor: reading, writing, those of a whole checkpoint.

`safetensors` itself maps whole files and saves only what is in memory all at once. Here tensors are
read into their own memory, with checksums, and a file grows tensor by tensor: its header, whose
size is not known before, is put in front at the end.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from quant.checkpoint.read_ahead import FileRange
from quant.checkpoint.stored_tensors import (
    INDEX_FILE,
    LENGTH_BYTES,
    MALFORMED,
    SINGLE_FILE,
    DamagedFileError,
    Header,
    StoredTensor,
    TensorPlace,
    described,
    missing_in_hub_cache,
    read_header,
    read_index,
    shard_path,
    unread_weights,
    unreadable,
)
from quant.common.errors import CheckpointError
from quant.common.json_text import loads

_RESERVED_BYTES = 1 << 16
"""Bytes reserved for the header of a written file, which is padded with spaces as the format
allows: a decoder layer has about 50 tensors of at most 200 characters each."""

_HEADER_CRC32 = "header_crc32"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_tensor(file: BinaryIO, place: TensorPlace, crc32: int) -> torch.Tensor:
    """Read into memory of its own; DamagedFileError for another size, shape or checksum."""
    if place.dtype not in _DTYPES or any(size < 0 for size in place.shape):
        raise DamagedFileError(f"a tensor claims type {place.dtype} and shape {place.shape}")
    dtype = _DTYPES[place.dtype]
    elements = math.prod(place.shape)  # before torch allocates what the header claims
    if elements * dtype.itemsize != place.stop - place.start:
        raise DamagedFileError(
            f"{list(place.shape)} x {place.dtype} is not {place.stop - place.start} bytes"
        )
    tensor = torch.empty(place.shape, dtype=dtype)
    view = _bytes_of(tensor)
    file.seek(place.start)
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]  # BinaryIO lacks it
        if not count:
            raise DamagedFileError(f"it ends {len(view) - filled} bytes early")
        filled += count
    if zlib.crc32(view) != crc32:
        raise DamagedFileError("its checksum is wrong")
    return tensor


class TensorWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, TensorPlace] = {}
        self._crc32: dict[str, int] = {}
        self._stop = _RESERVED_BYTES
        file.seek(_RESERVED_BYTES)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        on_host = tensor.detach().cpu().contiguous()
        view = _bytes_of(on_host)
        self._file.write(view)
        start, self._stop = self._stop, self._stop + len(view)
        shape = tuple(tensor.shape)
        self._places[name] = TensorPlace(_NAMES[tensor.dtype], shape, start, self._stop)
        self._crc32[name] = zlib.crc32(view)

    def finish(self, metadata: Mapping[str, str]) -> None:
        notes = {**metadata, "crc32": json.dumps(self._crc32)}
        notes[_HEADER_CRC32] = str(_header_crc32(Header(self._places, notes)))
        entries = {
            name: {
                "dtype": place.dtype,
                "shape": place.shape,
                "data_offsets": [place.start - _RESERVED_BYTES, place.stop - _RESERVED_BYTES],
            }
            for name, place in self._places.items()
        }
        header = json.dumps({"__metadata__": notes, **entries}).encode()
        room = _RESERVED_BYTES - LENGTH_BYTES
        if len(header) > room:
            raise ValueError(f"a header of {len(header)} bytes exceeds the {room} set aside")
        self._file.truncate(self._stop)
        self._file.seek(0)
        self._file.write(room.to_bytes(LENGTH_BYTES, "little") + header.ljust(room))
        self._file.flush()
        os.fsync(self._file.fileno())


def reserved_bytes(data_bytes: int) -> int:
    return _RESERVED_BYTES + data_bytes


def checksums(header: Header) -> dict[str, int]:
    """The CRC-32 of every tensor that `TensorWriter` wrote; DamagedFileError if one is missing."""
    try:
        found = loads(header.metadata["crc32"])
        of_tensors = {name: int(found[name]) for name in header.places}
        is_right = int(header.metadata[_HEADER_CRC32]) == _header_crc32(header)
    except MALFORMED as error:
        raise DamagedFileError("its checksums are missing") from error
    if not is_right:
        raise DamagedFileError("its header's checksum is wrong")
    return of_tensors


def _header_crc32(header: Header) -> int:
    places = {name: asdict(place) for name, place in header.places.items()}
    notes = {name: note for name, note in header.metadata.items() if name != _HEADER_CRC32}
    return zlib.crc32(json.dumps([places, notes], sort_keys=True).encode())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class SafetensorsFiles:
    """The tensors of `folder`; `before_open` is told a file's name before it is looked at."""

    def __init__(self, folder: Path, before_open: Callable[[str], object]) -> None:
        self._folder, self._before_open = folder, before_open
        self._opened: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._places: dict[str, Mapping[str, TensorPlace]] = {}
        self.file_of = self._list_tensors()

    def check(self) -> None:
        for file in dict.fromkeys(self.file_of.values()):
            self._open(file)

    def read(self, name: str) -> torch.Tensor:
        handle = self._handle(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, OSError) as error:  # TypeError: a shape
            raise unreadable(self._folder / self.file_of[name], error) from error
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape or ()

    def stored(self, name: str) -> StoredTensor:
        """The type and shape of a tensor."""
        try:
            return described(self.file_of[name], self._handle(name).get_slice(name))
        except SafetensorError as error:
            raise unreadable(self._folder / self.file_of[name], error) from error

    def range_of(self, name: str) -> FileRange:
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
        file = self.file_of[name]
        handle = self._open(file)
        if name not in self._names[file]:
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
                self._names[file] = frozenset(self._opened[file].keys())
            except (SafetensorError, RuntimeError, OSError) as error:
                raise unreadable(self._folder / file, error) from error
        return self._opened[file]

    def _list_tensors(self) -> dict[str, str]:
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

"""Reading and writing safetensors files tensor by tensor, with checksums.

`safetensors` itself maps whole files and saves only what is in memory all at once. Here a header
says byte ranges (for reading ahead), tensors are read directly into their own memory, and a file
grows tensor by tensor: its header, whose size is not known before, is put in front at the end.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

import torch

from quant.checkpoint.tensor_files.tensor_header import (
    LENGTH_BYTES,
    MALFORMED,
    DamagedFileError,
    Header,
    TensorPlace,
)

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
    """Read the tensor at `place` into memory of its own, on the CPU.

    DamagedFileError if the bytes are missing, do not make up that shape or have another checksum.
    """
    if place.dtype not in _DTYPES or any(size < 0 for size in place.shape):
        raise DamagedFileError(f"a tensor claims type {place.dtype} and shape {place.shape}")
    dtype = _DTYPES[place.dtype]
    elements = 1
    for size in place.shape:  # computed before torch allocates what the header claims
        elements *= size
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
    """A writer of tensors into an empty file, one by one; `finish` makes it a safetensors file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, TensorPlace] = {}
        self._crc32: dict[str, int] = {}
        self._stop = _RESERVED_BYTES
        file.seek(_RESERVED_BYTES)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append `tensor`, from whatever device; OSError where the disk refuses."""
        on_host = tensor.detach().cpu().contiguous()
        view = _bytes_of(on_host)
        self._file.write(view)
        start, self._stop = self._stop, self._stop + len(view)
        shape = tuple(tensor.shape)
        self._places[name] = TensorPlace(_NAMES[tensor.dtype], shape, start, self._stop)
        self._crc32[name] = zlib.crc32(view)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header in front, with `metadata` and checksums, and flush the file to disk."""
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
    """Size of a file with tensors of `data_bytes` in all."""
    return _RESERVED_BYTES + data_bytes


def checksums(header: Header) -> dict[str, int]:
    """The CRC-32 of every tensor in a file that `TensorWriter` wrote.

    DamagedFileError if one is missing, or if that of the header is wrong.
    """
    try:
        found = json.loads(header.metadata["crc32"])
        of_tensors = {name: int(found[name]) for name in header.places}
        is_right = int(header.metadata[_HEADER_CRC32]) == _header_crc32(header)
    except MALFORMED as error:
        raise DamagedFileError("its checksums are missing") from error
    if not is_right:
        raise DamagedFileError("its header's checksum is wrong")
    return of_tensors


def _header_crc32(header: Header) -> int:
    """The CRC-32 of all that a header says but this number: types, shapes, places and notes."""
    places = {name: asdict(place) for name, place in header.places.items()}
    notes = {name: note for name, note in header.metadata.items() if name != _HEADER_CRC32}
    return zlib.crc32(json.dumps([places, notes], sort_keys=True).encode())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)

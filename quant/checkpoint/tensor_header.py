"""The header of a safetensors file: names, types, shapes and byte ranges of its tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000
"""The largest header that the `safetensors` library accepts."""


MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors of parsing JSON of any content, and of taking out of it what should be there."""


class DamagedFileError(Exception):
    pass


@dataclass(frozen=True)
class TensorPlace:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]


def read_header(file: BinaryIO) -> Header:
    file_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    data_start = LENGTH_BYTES + header_bytes
    if not 0 < header_bytes <= _HEADER_BYTES_MAX or data_start > file_bytes:
        raise DamagedFileError(f"its header claims {header_bytes} of {file_bytes} bytes")
    try:
        entries = json.loads(file.read(header_bytes))
        metadata = dict(entries.pop("__metadata__", {}))
        places = {name: _place(entry, data_start) for name, entry in entries.items()}
    except MALFORMED as error:
        raise DamagedFileError(f"its header is malformed ({type(error).__name__})") from error
    end = max((place.stop for place in places.values()), default=data_start)
    if end > file_bytes:
        raise DamagedFileError(f"it has {file_bytes} of {end} bytes")
    return Header(places, metadata)


def _place(entry: Mapping[str, Any], data_start: int) -> TensorPlace:
    start, stop = map(int, entry["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"byte range {start} to {stop}")
    shape = tuple(int(size) for size in entry["shape"])
    return TensorPlace(str(entry["dtype"]), shape, data_start + start, data_start + stop)

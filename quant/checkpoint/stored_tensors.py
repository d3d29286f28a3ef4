"""Which tensors a folder of safetensors files holds, from its index and headers, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quant.common.errors import CheckpointError
from quant.common.json_file import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, safetensors' name of its type, and shape; the latter two are None where the
    file is not here.
    """

    file: str
    dtype: str | None
    shape: tuple[int, ...] | None


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """The tensors of `folder` by name; none where it holds neither file nor index of safetensors.

    CheckpointError names a file that is missing, cut or damaged. The shards of a snapshot in the
    hub's cache may be missing: they are brought when they are needed.
    """
    if (folder / INDEX_FILE).is_file():
        file_of = read_index(folder / INDEX_FILE)
    elif (folder / SINGLE_FILE).is_file():
        return _in_file(folder, SINGLE_FILE)
    else:
        return {}
    files = dict.fromkeys(file_of.values())
    here = {file: None if _comes_later(folder, file) else _in_file(folder, file) for file in files}
    return {name: _placed(folder, name, file, here[file]) for name, file in file_of.items()}


def _placed(
    folder: Path, name: str, file: str, in_file: Mapping[str, StoredTensor] | None
) -> StoredTensor:
    """The tensor `name` of the index, among those of its file, or None where that comes later."""
    if in_file is None:
        return StoredTensor(file, None, None)
    if name not in in_file:
        raise CheckpointError(
            f"{folder / INDEX_FILE} places tensor {name} in {file}, which lacks it; "
            "download the checkpoint again"
        )
    return in_file[name]


def read_index(path: Path) -> dict[str, str]:
    """File name of each tensor, from an index of shards; CheckpointError if it is malformed."""
    values = read_json_object(path, "download it again", CheckpointError, "index of shards")
    weight_map = values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} lists no tensors in its weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path} places tensor {name:.200} in {file!r:.200}, which is no file name; "
                "download it again"
            )
    return weight_map


def spellings(name: str, prefix: str) -> list[str]:
    """Names under which the tensor `name` may be stored, in order: checkpoints are saved with or
    without the base model's `prefix` (OPT's lack `model.`, BLOOM's `transformer.`).
    """
    if not prefix:
        return [name]
    return [f"{prefix}.{name}", name, name.removeprefix(f"{prefix}.")]


def shard_path(folder: Path, file: str) -> Path:
    """Where a file of weights lies; CheckpointError where it does not."""
    path = folder / file
    if not os.path.isfile(path):  # not Path.is_file, which raises where a name is too long
        raise CheckpointError(
            f"{folder} lacks {file}, which its index names; download the missing shard"
        )
    return path


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """An error: the file at `path` cannot be used; its size is told."""
    size = path.stat().st_size if path.is_file() else 0
    return CheckpointError(
        f"{path} ({size} bytes) is truncated or damaged: {error}; download it again"
    )


def _comes_later(folder: Path, file: str) -> bool:
    """Whether `file` is missing where that means nothing: in the hub's cache."""
    in_cache = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return in_cache and not os.path.isfile(folder / file)


def _in_file(folder: Path, file: str) -> dict[str, StoredTensor]:
    path = shard_path(folder, file)
    try:
        with safe_open(path, framework="np") as opened:
            return {name: _stored(file, opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, RuntimeError, TypeError, OSError) as error:  # TypeError: a shape
        raise unreadable(path, error) from error


def _stored(file: str, place: Any) -> StoredTensor:
    return StoredTensor(file, str(place.get_dtype()), tuple(place.get_shape()))

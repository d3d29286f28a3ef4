"""Turning PyTorch `.bin` checkpoints into safetensors, one shard in memory at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises for anything but tensors

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quant.checkpoint.model_folder import copy_settings, new_folder, overlap, write_index
from quant.checkpoint.stored_tensors import INDEX_FILE, SINGLE_FILE, read_index
from quant.common.errors import CheckpointError
from quant.common.files import read_json_object

_BIN_FILE = "pytorch_model.bin"
_BIN_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class ConvertSummary:
    """`aliases` are (left out, kept) tensors that share memory; `copied` settings' files."""

    target: Path
    shards: int
    tensors: int
    tensor_bytes: int
    aliases: tuple[tuple[str, str], ...]
    copied: tuple[str, ...]


@dataclass(frozen=True)
class _Shard:
    file: str
    tensor_bytes: dict[str, int]
    aliases: tuple[tuple[str, str], ...]


def convert(
    source: Path, target: Path, progress: Callable[[int, int], None] | None = None
) -> ConvertSummary:
    """Write the `.bin` checkpoint as safetensors into the new folder `target`. Tensors that share
    memory are written once, unless `config.json` says that embeddings are not tied. CheckpointError
    leaves nothing behind; `progress` gets files done and all.
    """
    try:
        if target.exists():
            raise CheckpointError(f"{target} exists already; name a new folder or remove it first")
        if overlap(source, target):
            raise CheckpointError(
                f"cannot convert {source} into {target}, which lies in it; name another folder"
            )
        files = _bin_files(source)
        tied = _ties_embeddings(source)
        with new_folder(target) as staging:
            shards = _convert_files(source, files, staging, tied, progress)
            copied = copy_settings(source, staging)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot convert {source} into {target} ({error}); "
            "choose folders that can be read and written, with space for the weights"
        ) from error
    return ConvertSummary(
        target=target,
        shards=len(shards),
        tensors=sum(len(shard.tensor_bytes) for shard in shards),
        tensor_bytes=sum(sum(shard.tensor_bytes.values()) for shard in shards),
        aliases=tuple(alias for shard in shards for alias in shard.aliases),
        copied=copied,
    )


def _convert_files(
    source: Path,
    files: list[str],
    target: Path,
    tied: bool,
    progress: Callable[[int, int], None] | None,
) -> list[_Shard]:
    shards: list[_Shard] = []
    for number, file in enumerate(files, start=1):
        several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = SINGLE_FILE if len(files) == 1 else several
        shards.append(_convert_file(source / file, target / name, tied))
        if progress is not None:
            progress(number, len(files))
    if len(files) > 1:
        total = sum(sum(shard.tensor_bytes.values()) for shard in shards)
        file_of = {name: shard.file for shard in shards for name in shard.tensor_bytes}
        write_index(target / INDEX_FILE, file_of, total)
    return shards


def _bin_files(source: Path) -> list[str]:
    if not source.is_dir():
        raise CheckpointError(
            f"there is no folder {source}; give the one that holds the .bin files"
        )
    if (source / _BIN_INDEX).is_file():
        files = sorted(set(read_index(source / _BIN_INDEX).values()))
    elif (source / _BIN_FILE).is_file():
        files = [_BIN_FILE]
    elif (source / INDEX_FILE).is_file() or (source / SINGLE_FILE).is_file():
        raise CheckpointError(f"{source} holds safetensors already; use it as it is")
    else:
        raise CheckpointError(f"{source} has neither {_BIN_FILE} nor {_BIN_INDEX}")
    missing = [file for file in files if not (source / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{source} lacks {len(missing)} of {len(files)} shards, {missing[0]} first; "
            "download them"
        )
    return files


def _ties_embeddings(source: Path) -> bool:
    path = source / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{source} has no config.json, without which nothing can load it")
    values = read_json_object(path, "download it again", CheckpointError)
    return bool(values.get("tie_word_embeddings", True))


def _convert_file(source: Path, target: Path, tied: bool) -> _Shard:
    tensors = _load_tensors(source)
    aliases = _aliases(tensors)
    kept: dict[str, torch.Tensor] = {}
    owned: set[int] = set()
    for name, tensor in tensors.items():
        if tied and name in aliases:
            continue
        # safetensors refuses tensors that share a storage, as parts of a fused one do.
        storage = tensor.untyped_storage().data_ptr()
        if storage in owned or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        kept[name] = tensor
        owned.add(storage)
    left_out = aliases if tied else {}
    save_file(kept, target, metadata={"format": "pt", **left_out})
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in kept.items()}
    return _Shard(target.name, sizes, tuple(left_out.items()))


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        mappable = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is damaged or holds more than tensors "
            f"({reason}); download it again"
        ) from error
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors")
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{path} holds {len(others)} entries that are no tensors, {others[0]!r} first; "
            "save model.state_dict() alone"
        )
    return dict(state)


def _aliases(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    first_name: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and first_name.setdefault(place, name) != name:
            aliases[name] = first_name[place]
    return aliases

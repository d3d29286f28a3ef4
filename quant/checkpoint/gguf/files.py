"""Which files hold a model in GGUF: one, or the parts of a split one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quant.checkpoint.gguf.architectures import RowOrder
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, can_dequantize
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import FileIdentity

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_LISTED = 4
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json",
                  "adapter_config.json")  # fmt: skip


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def gguf_files(path: Path) -> tuple[Path, ...]:
    """List the files of a GGUF model, none for other files and folders; SpecError for several
    models, CheckpointError for a missing part.
    """
    if is_gguf(path):
        return _parts(path)
    if not path.is_dir() or any(any(path.glob(each)) for each in _OTHER_WEIGHTS):
        return ()
    found = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file())
    models = {model_name(each): each for each in reversed(found)}
    if len(models) > 1:
        names = sorted(each.name for each in models.values())
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise SpecError(
            f"model folder {path} holds {len(names)} GGUF models; give the file of one of them: "
            f"{', '.join(names[:_LISTED])}{more}"
        )
    return tuple(part for each in models.values() for part in _parts(each))


def model_name(path: Path) -> str:
    match = _PART.match(path.name)
    return match["stem"] if match else path.stem


def _parts(path: Path) -> tuple[Path, ...]:
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    parts = tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}")
        for number in range(1, count + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} parts of {match['stem']}, "
            f"{missing[0]} first; download them"
        )
    return parts


GGUF_INDEX_FILE = "gguf.index.json"
_FLOAT = "F32"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in part number `part`; its rows lie in `order`, in `groups` heads."""

    stored_name: str
    part: int
    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    order: RowOrder
    groups: int

    @property
    def dtype(self) -> str:
        if self.type_name in UNPACKED or self.type_name == BFLOAT16:
            return self.type_name
        return _FLOAT if can_dequantize(self.type_name) else self.type_name


@dataclass(frozen=True)
class GgufIndex:
    """The files as they were when indexed, llama.cpp's architecture, tensors by transformers'
    names.
    """

    files: tuple[FileIdentity, ...]
    paths: tuple[Path, ...]
    architecture: str
    tensors: Mapping[str, GgufTensor]

    def check_unchanged(self) -> None:
        for path, identity in zip(self.paths, self.files, strict=True):
            try:
                found = FileIdentity.of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if found != identity:
                raise CheckpointError(
                    f"{path} was changed while it was in use; run the same command again"
                )


def write_index(folder: Path, index: GgufIndex) -> None:
    content = {
        "architecture": index.architecture,
        "paths": [str(path) for path in index.paths],
        "files": [list(vars(identity).values()) for identity in index.files],
        "tensors": {name: list(vars(tensor).values()) for name, tensor in index.tensors.items()},
    }
    (folder / GGUF_INDEX_FILE).write_text(json.dumps(content), encoding="utf-8")


def gguf_index(folder: Path) -> GgufIndex | None:
    path = folder / GGUF_INDEX_FILE
    return _read(path, FileIdentity.of(path)) if path.is_file() else None


@lru_cache(maxsize=4)
def _read(path: Path, identity: FileIdentity) -> GgufIndex:
    del identity  # part of the key
    content = json.loads(path.read_text(encoding="utf-8"))
    tensors = {}
    for name, (stored, part, kind, shape, *place) in content["tensors"].items():
        tensors[name] = GgufTensor(stored, part, kind, tuple(shape), *place)
    return GgufIndex(
        files=tuple(FileIdentity(*each) for each in content["files"]),
        paths=tuple(map(Path, content["paths"])),
        architecture=content["architecture"],
        tensors=tensors,
    )


def model_place(folder: Path) -> Path:
    index = gguf_index(folder)
    return folder if index is None else index.paths[0]


def settings_place(folder: Path, file: str) -> str:
    index = gguf_index(folder)
    return str(folder / file) if index is None else f"{index.paths[0]} (its metadata as {file})"

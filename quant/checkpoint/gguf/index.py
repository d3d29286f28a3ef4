"""The index in the folder of a GGUF model: where in which file each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quant.checkpoint.gguf.architectures import RowOrder
from quant.checkpoint.gguf.library import BFLOAT16, UNPACKED, can_dequantize
from quant.common.errors import CheckpointError
from quant.common.files import FileIdentity

GGUF_INDEX_FILE = "gguf.index.json"
_FLOAT = "F32"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor, which the file calls `stored_name`: its type, shape and place in part number `part`
    of the model, and in which order its rows lie, in `groups` heads.
    """

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
        """The type as it is read, as safetensors names it; llama.cpp's name where it cannot be."""
        if self.type_name in UNPACKED or self.type_name == BFLOAT16:
            return self.type_name
        return _FLOAT if can_dequantize(self.type_name) else self.type_name


@dataclass(frozen=True)
class GgufIndex:
    """The files of a model as they were when they were indexed, its architecture in llama.cpp, and
    its tensors by their names in transformers.
    """

    files: tuple[FileIdentity, ...]
    paths: tuple[Path, ...]
    architecture: str
    tensors: Mapping[str, GgufTensor]

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` where a file is gone, or is not what it was."""
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
    """Write `index` into `folder`."""
    content = {
        "architecture": index.architecture,
        "paths": [str(path) for path in index.paths],
        "files": [list(vars(identity).values()) for identity in index.files],
        "tensors": {name: list(vars(tensor).values()) for name, tensor in index.tensors.items()},
    }
    (folder / GGUF_INDEX_FILE).write_text(json.dumps(content), encoding="utf-8")


def gguf_index(folder: Path) -> GgufIndex | None:
    """The index in `folder`; None where it is not that of a GGUF model."""
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
    """What messages call the model in `folder`: the GGUF file that it describes, or itself."""
    index = gguf_index(folder)
    return folder if index is None else index.paths[0]


def settings_place(folder: Path, file: str) -> str:
    """What messages call the settings `file` in `folder`: the metadata of the GGUF file where they
    come from there.
    """
    index = gguf_index(folder)
    return str(folder / file) if index is None else f"{index.paths[0]} (its metadata as {file})"

"""GGUF models: which files hold one, and the folder in the user's cache that describes it for all
that wants a Hugging Face folder: `config.json`, tokenizer and an index of tensors.

The weights stay in the file. The folder is made once for each state of the file, as parsing a
vocabulary takes a second, and every stage asks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.configuration import generation_entries, model_entries, vocabulary
from quant.checkpoint.gguf.header import (
    BFLOAT16,
    UNPACKED,
    Entries,
    StoredBlocks,
    can_dequantize,
    read_gguf_header,
)
from quant.checkpoint.gguf.names import GgufArchitecture, layer_of
from quant.checkpoint.gguf.orders import (
    Change,
    RowOrder,
    changed_shape,
    joined_shape,
    order_numbers,
)
from quant.checkpoint.gguf.rotary import ROTARY_TENSORS, Factors
from quant.checkpoint.gguf.tokenizer import tokenizer_files
from quant.checkpoint.model_folder import new_folder
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import FileIdentity, user_cache_folder

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
class StoredPart:
    """A tensor in part number `part` of the files, of `shape` there."""

    stored_name: str
    part: int
    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        if self.type_name in UNPACKED or self.type_name == BFLOAT16:
            return self.type_name
        return _FLOAT if can_dequantize(self.type_name) else self.type_name


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of transformers in one of the file, or in several whose rows follow each other. Its
    rows lie in `order`, by the sizes `numbers`, and its numbers are a `change` of transformers'
    (`quant.checkpoint.gguf.orders`).
    """

    sources: tuple[StoredPart, ...]
    shape: tuple[int, ...]
    order: RowOrder = "as stored"
    change: Change = "none"
    numbers: tuple[int, ...] = ()

    @property
    def part(self) -> int:
        return self.sources[0].part

    @property
    def dtype(self) -> str:
        types = [source.dtype for source in self.sources]
        unread = next((each for each in types if each not in (*UNPACKED, BFLOAT16)), None)
        return unread or (types[0] if len(types) == 1 else _FLOAT)


@dataclass(frozen=True, eq=False)
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
        "tensors": {name: astuple(tensor) for name, tensor in index.tensors.items()},
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
    for name, (sources, shape, order, change, numbers) in content["tensors"].items():
        parts = tuple(
            StoredPart(stored, part, kind, tuple(own), *place)
            for stored, part, kind, own, *place in sources
        )
        tensors[name] = GgufTensor(parts, tuple(shape), order, change, tuple(numbers))
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


_NAME_CHARACTERS = 80
_DIGEST_BYTES = 8


def folder_of_gguf(path: Path) -> Path | None:
    """The folder of the GGUF model at `path`; None if it is none. SpecError for a model that is not
    run, CheckpointError for files that are missing or damaged.
    """
    files = tuple(each.absolute() for each in gguf_files(path))
    if not files:
        return None
    try:
        identities = tuple(FileIdentity.of(each) for each in files)
    except OSError as error:
        raise CheckpointError(f"{files[0]} cannot be read: {error.strerror}") from error
    target = _cache() / f"{model_name(files[0])[:_NAME_CHARACTERS]}-{_digest(files, identities)}"
    if not target.is_dir():
        for identity in identities:
            identity.settle()
        made = _Described(files)
        _write(target, made, _index(files, identities, made))
    return target


class _Described:
    def __init__(self, files: Sequence[Path]) -> None:
        headers = [read_gguf_header(each) for each in files]
        values, _ = headers[0]
        count = values.get("split.count", 1)
        if count not in (0, 1, len(files)):
            raise CheckpointError(
                f"{files[0]} is part 1 of {count} by its metadata, but not by its name; give its "
                "parts the names that they had "
                f"({model_name(files[0])}-00001-of-{count:05d}.gguf)"
            )
        self.stored = [(part, each) for part, (_, own) in enumerate(headers) for each in own]
        self.by_name: Mapping[str, StoredBlocks] = {each.name: each for _, each in self.stored}
        self.architecture = _architecture(files[0], values.get("general.architecture"))
        name = str(values["general.architecture"])
        self.entries = Entries(files[0], values, name)
        factors = {
            each.name: _read_factors(files[part], each)
            for part, each in self.stored
            if each.name in ROTARY_TENSORS
        }
        self.config = model_entries(self.entries, self.by_name, factors)


def _architecture(file: Path, name: Any) -> GgufArchitecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise SpecError(
            f"{file}: general.architecture is {name!r:.60}, which is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def _read_factors(file: Path, stored: StoredBlocks) -> Factors:
    if stored.type_name not in UNPACKED:
        raise SpecError(f"{file}: {stored.name} is {stored.type_name}; it must be F32")
    with file.open("rb") as opened:
        opened.seek(stored.start)
        content = opened.read(stored.stop - stored.start)
    values: Factors = np.frombuffer(content, UNPACKED[stored.type_name]).astype(np.float64)
    return values


def _index(
    files: tuple[Path, ...], identities: tuple[FileIdentity, ...], made: _Described
) -> GgufIndex:
    names, tensors = made.architecture, dict[str, GgufTensor]()
    joined: dict[str, dict[str, StoredPart]] = {}
    for part, each in made.stored:
        if each.name in ROTARY_TENSORS or _is_ahead(made, each.name):
            continue  # in config.json, or not run
        source = StoredPart(each.name, part, each.type_name, each.shape, each.start, each.stop)
        whole = names.joined_name(each.name)
        if whole is not None:
            joined.setdefault(whole, {})[each.name] = source
            continue
        experts = _experts(names, source)
        tensors |= experts or {names.full_name(each.name): _tensor(made, source)}
    for whole, parts in joined.items():
        if whole not in tensors:  # some files have it both as it was and in parts
            tensors[whole] = _joined(made, whole, parts)
    return GgufIndex(identities, files, made.entries.architecture, tensors)


def _is_ahead(made: _Described, stored: str) -> bool:
    """Whether a tensor is of a layer that predicts tokens further ahead, and is not run."""
    layer = layer_of(stored)
    is_behind = layer is not None and layer >= made.config.get("num_hidden_layers", layer + 1)
    return is_behind and bool(made.entries.of_architecture("nextn_predict_layers"))


def _experts(names: GgufArchitecture, source: StoredPart) -> dict[str, GgufTensor]:
    """Each expert of a tensor that holds all of a layer's, as a range of it; none for others."""
    found = names.expert_names(source.stored_name, source.shape[0])
    rows = source.shape[1] * source.shape[0] if len(source.shape) > 1 else 0
    if not found or rows % len(found):
        return {}
    size = (source.stop - source.start) // len(found)
    shape = (rows // len(found), *source.shape[2:])
    own = {}
    for number, name in enumerate(found):
        start = source.start + number * size
        place = replace(source, shape=shape, start=start, stop=start + size)
        own[name] = GgufTensor((place,), shape)
    return own


def _tensor(made: _Described, source: StoredPart) -> GgufTensor:
    names = made.architecture
    order, change = names.order(source.stored_name), names.change(source.stored_name)
    sized_by = "tiled heads" if change == "tiled columns" else order
    numbers = order_numbers(sized_by, made.config, is_key=".attn_k." in source.stored_name)
    return GgufTensor((source,), changed_shape(source.shape, change), order, change, numbers)


def _joined(made: _Described, whole: str, parts: Mapping[str, StoredPart]) -> GgufTensor:
    """A tensor whose rows are those of several in the file; with as many rows as there are parts,
    so that one that is missing is noticed by the shape.
    """
    stored = made.architecture.parts_of(whole)
    sources = tuple(parts[name] for name in stored if name in parts)
    order = made.architecture.order(whole.split(".", 3)[-1])
    shape = joined_shape(order, [each.shape for each in sources])
    return GgufTensor(sources, shape, order, "none", order_numbers(order, made.config, False))


def _write(target: Path, made: _Described, index: GgufIndex) -> None:
    vocabulary_size = vocabulary(made.entries, made.by_name)
    content: dict[str, Mapping[str, Any]] = {
        "config.json": made.config,
        **tokenizer_files(made.entries, vocabulary_size),
        "generation_config.json": generation_entries(made.entries, vocabulary_size),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(target) as folder:
            for name, values in content.items():
                text = json.dumps(values, ensure_ascii=False)
                (folder / name).write_text(text, encoding="utf-8")
            write_index(folder, index)
    except OSError as error:
        if target.is_dir():  # another process was first
            return
        raise CheckpointError(
            f"{target}, which describes {index.paths[0]}, cannot be written: {error.strerror}; "
            "name a folder that can be in XDG_CACHE_HOME"
        ) from error


def _cache() -> Path:
    try:
        return user_cache_folder() / "gguf"
    except RuntimeError as error:
        raise CheckpointError(
            "no home folder is known to keep settings of GGUF files in; name one in XDG_CACHE_HOME"
        ) from error


def _digest(files: Sequence[Path], identities: Sequence[FileIdentity]) -> str:
    state = json.dumps([[str(f), *astuple(i)] for f, i in zip(files, identities, strict=True)])
    return hashlib.blake2b(state.encode() + _code().encode(), digest_size=_DIGEST_BYTES).hexdigest()


@cache
def _code() -> str:
    files = resources.files(__package__).iterdir()
    content = b"".join(sorted(f.read_bytes() for f in files if f.name.endswith(".py")))
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()

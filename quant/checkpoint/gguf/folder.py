"""A GGUF model as a folder in the user's cache: `config.json`, tokenizer and an index of tensors;
the weights stay in the file. It is made once for each state of the file, as parsing a vocabulary
takes a second, and every stage asks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from quant.checkpoint.gguf.architectures import ARCHITECTURES, GgufArchitecture
from quant.checkpoint.gguf.configuration import (
    FACTORS,
    Factors,
    generation_entries,
    model_entries,
    vocabulary,
)
from quant.checkpoint.gguf.files import GgufIndex, GgufTensor, gguf_files, model_name, write_index
from quant.checkpoint.gguf.header import (
    UNPACKED,
    Entries,
    GgufHeader,
    StoredBlocks,
    read_gguf_header,
)
from quant.checkpoint.gguf.tokenizer import tokenizer_files
from quant.checkpoint.model_folder import new_folder
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import FileIdentity, user_cache_folder

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
        made = _describe(files)
        _write(target, made, _index(files, identities, made))
    return target


class _Described:
    def __init__(self, files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
        self.stored = [
            (part, each) for part, header in enumerate(headers) for each in header.tensors
        ]
        self.by_name: Mapping[str, StoredBlocks] = {each.name: each for _, each in self.stored}
        values = headers[0].metadata
        self.architecture = _architecture(files[0], values.get("general.architecture"))
        name = str(values["general.architecture"])
        self.entries = Entries(files[0], values, name)
        factors = next(((files[p], each) for p, each in self.stored if each.name == FACTORS), None)
        self.config = model_entries(
            self.entries, self.by_name, None if factors is None else _read_factors(*factors)
        )


def _describe(files: Sequence[Path]) -> _Described:
    headers = [read_gguf_header(each) for each in files]
    count = headers[0].metadata.get("split.count", 1)
    if count not in (0, 1, len(files)):
        raise CheckpointError(
            f"{files[0]} is part 1 of {count} by its metadata, but not by its name; give its parts "
            f"the names that they had ({model_name(files[0])}-00001-of-{count:05d}.gguf)"
        )
    return _Described(files, headers)


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
    heads = made.config.get("num_attention_heads") or made.config.get("n_head", 1)
    key_heads = made.config.get("num_key_value_heads", heads)
    names = made.architecture
    tensors = {}
    for part, each in made.stored:
        if each.name == FACTORS:
            continue  # in config.json
        is_key = bool(names.keys) and f".{names.keys}." in each.name
        tensors[names.full_name(each.name)] = GgufTensor(
            each.name, part, each.type_name, _squeezed(each.shape), each.start, each.stop,
            names.order(each.name), key_heads if is_key else heads,
        )  # fmt: skip
    return GgufIndex(identities, files, made.entries.architecture, tensors)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


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

"""What stored weights tell beside the configuration: how linears are quantized, an untied head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.gptq_config import GptqConfig, StoredLinear, bits_of_words
from quant.checkpoint.stored_tensors import (
    DamagedFileError,
    StoredTensor,
    TensorPlace,
    read_header,
    spellings,
    stored_tensors,
    unreadable,
)
from quant.common.files import FileIdentity
from quant.scheme import FULL_BITS, LinearShape


def as_configured(config: GptqConfig, shape: ModelShape) -> GptqConfig:
    if not config.modules:
        return config
    given = [
        any(f".{module}".endswith(f".{name}") for module in config.modules)
        for name in _linear_names(shape)
    ]
    size = config.group_size
    linears = [StoredLinear(config.bits if each else FULL_BITS, size) for each in given]
    return _of_linears(config, shape, linears)


def as_stored(config: GptqConfig, shape: ModelShape, folder: Path) -> GptqConfig:
    """Return `config` with bits and groups of the weights in `folder`, as rules (`dynamic`) may
    change them; `mixed` where layers differ.
    """
    tensors = stored_tensors(folder)
    if not tensors:
        return config
    names = FAMILIES[shape.model_type].architecture
    linears = list(zip(_linear_names(shape), shape.layer_linears(), strict=True))
    layers = list[list[StoredLinear]]()
    for index in range(shape.layers):
        layer = f"{names.layers_path}.{index}"
        found = [
            _stored(linear, *_parts(f"{layer}.{name}", names.base, tensors))
            for name, linear in linears
        ]
        layers.append([each for each in found if each is not None])
        if len(layers[-1]) < len(linears):  # not here yet, or damaged, as checking them will tell
            return config
    if len({tuple(linear.bits for linear in layer) for layer in layers}) > 1:
        return replace(config, mixed=True)
    finest = [min(place, key=lambda each: each.group_size) for place in zip(*layers, strict=True)]
    return _of_linears(replace(config, mixed=False), shape, finest)


def _linear_names(shape: ModelShape) -> tuple[str, ...]:
    names = FAMILIES[shape.model_type].architecture
    return (*names.attention, *names.mlp)


def _parts(
    module: str, base: str, tensors: Mapping[str, StoredTensor]
) -> tuple[StoredTensor | None, StoredTensor | None]:
    words, scales = (
        next((tensors[n] for n in spellings(f"{module}.{part}", base) if n in tensors), None)
        for part in ("qweight", "scales")
    )
    return words, scales


def _stored(
    linear: LinearShape, words: StoredTensor | None, scales: StoredTensor | None
) -> StoredLinear | None:
    if words is None:
        return StoredLinear(FULL_BITS, linear.in_features)
    if not words.shape or scales is None or not scales.shape:
        return None
    bits = bits_of_words(words.shape[0], linear.in_features)
    size = -(-linear.in_features // max(1, scales.shape[0]))
    return None if bits is None else StoredLinear(bits, size)


def _of_linears(
    config: GptqConfig, shape: ModelShape, linears: Sequence[StoredLinear]
) -> GptqConfig:
    """Return `config` with what differs in `linears`; its bits are then those of most weights."""
    weights = Counter[int]()
    for stored, linear in zip(linears, shape.layer_linears(), strict=True):
        weights[stored.bits] += linear.parameters
    usual = config.bits if config.bits in weights else weights.most_common(1)[0][0]
    plain = replace(config, bits=usual, linears=())
    made = replace(plain, linears=tuple(linears))
    shapes = [replace(shape, stored=each).layer_linears() for each in (plain, made)]
    return plain if shapes[0] == shapes[1] else made


_BLOCK_BYTES = 1 << 24


def has_own_head(folder: Path, model_type: str) -> bool:
    """Whether `folder` has a head that differs from its embedding; False where unknown. As in
    transformers 5 it is used, whatever `tie_word_embeddings` says. Both are read until they differ.
    """
    names = FAMILIES[model_type].architecture
    stored = stored_tensors(folder)
    head = next((n for n in (f"{name}.weight" for name in names.head_names) if n in stored), None)
    spelt = spellings(f"{names.embedding_path}.weight", names.base)
    embedding = next((name for name in spelt if name in stored), None)
    if head is None or embedding is None:
        return False
    parts = [(name, stored[name]) for name in (embedding, head)]
    if any(tensor.shape is None for _, tensor in parts):
        return False
    (_, first), (_, second) = parts
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    try:
        identities = [FileIdentity.of(folder / tensor.file) for _, tensor in parts]
        places = [_place(folder, name, tensor) for name, tensor in parts]
    except OSError as error:
        raise unreadable(folder / first.file, error) from error
    return _differ(*identities, *places)


def _place(folder: Path, name: str, tensor: StoredTensor) -> TensorPlace:
    path = folder / tensor.file
    try:
        with path.open("rb") as file:
            return read_header(file).places[name]
    except DamagedFileError as error:
        raise unreadable(path, error) from error


@lru_cache(maxsize=8)
def _differ(
    first: FileIdentity, second: FileIdentity, one: TensorPlace, other: TensorPlace
) -> bool:
    if one.stop - one.start != other.stop - other.start:
        return True
    left, right = (np.memmap(each.path, np.uint8, "r") for each in (first, second))
    return any(
        not np.array_equal(
            left[one.start + at : min(one.start + at + _BLOCK_BYTES, one.stop)],
            right[other.start + at : min(other.start + at + _BLOCK_BYTES, other.stop)],
        )
        for at in range(0, one.stop - one.start, _BLOCK_BYTES)
    )

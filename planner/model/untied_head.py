"""Finding LM heads that are stored although the configuration ties them to the embedding.

As in transformers 5, a stored head that differs from the stored embedding is used, whatever
`tie_word_embeddings` says.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from planner.model.families.table import FAMILIES
from quant.checkpoint.stored_tensors import StoredTensor, spellings, stored_tensors, unreadable
from quant.checkpoint.tensor_files.tensor_header import DamagedFileError, TensorPlace, read_header
from quant.common.files import FileIdentity

_BLOCK_BYTES = 1 << 24


def has_own_head(folder: Path, model_type: str) -> bool:
    """Whether `folder` has an LM head that differs from its embedding; False where it is unknown.

    Both are read until they differ. CheckpointError for damaged files.
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
    """Whether the bytes at two places of two files differ, as the files are now."""
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

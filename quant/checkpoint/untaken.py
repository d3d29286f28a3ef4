"""Tensors of a checkpoint that no part of its model takes: which may be left out, which may not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path

from quant.checkpoint.tensor_files.tensor_header import DamagedFileError, read_header

_HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|"
    r"(^|\.)(attention|attn|self_attn)\.(bias|masked_bias)$|"
    r"^(model\.)?(mtp|visual|vision_tower|vision_model|multi_modal_projector)[._]"
)
"""Tensors that may be ignored: tables that are computed, masks
(`_keys_to_ignore_on_load_unexpected` of transformers), and parts of other models that were saved
with this one."""

_NORM = re.compile(r"norm[^.]*\.weight$")
_ADAPTER = re.compile(r"(^|\.)lora_")
_LISTED = 3
_ZEROS_BYTES = 1 << 24
"""The largest bias that is looked at for zeros; that of a real model has a hundredth of it."""


def is_harmless(name: str) -> bool:
    """Whether the tensor `name` belongs to no computation of the decoder, by its name alone."""
    return _HARMLESS.search(name) is not None


def is_bias(name: str, modules: Container[str]) -> bool:
    """Whether `name` is the bias of one of `modules`: left out, it changes results unless zero."""
    module, _, part = name.rpartition(".")
    return part == "bias" and module in modules


def is_adapter(name: str) -> bool:
    """Whether `name` belongs to a low-rank adapter that was never merged into the weights."""
    return _ADAPTER.search(name) is not None


def is_norm(name: str) -> bool:
    """Whether `name` is the weight of a norm, of which a layer may have more than its family's."""
    return _NORM.search(name) is not None


def patterns(names: Iterable[str]) -> str:
    """Write `names` for a message, numbers as `*` with a count: `layers.*.q_proj.bias (12)`."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    listed = [
        f"{pattern:.100}{f' ({count})' if count > 1 else ''}"
        for pattern, count in list(counts.items())[:_LISTED]
    ]
    left = sum(counts.values()) - sum(list(counts.values())[:_LISTED])
    return ", ".join(listed) + (f" and {left} more" if left else "")


def has_only_zeros(path: Path, name: str) -> bool:
    """Whether the tensor `name` of the safetensors file `path` is of zeros, as auto-gptq writes
    biases that a model lacks; False where it cannot be told.
    """
    try:
        with path.open("rb") as file:
            place = read_header(file).places[name]
            size = place.stop - place.start
            file.seek(place.start)
            return size <= _ZEROS_BYTES and not any(file.read(size))
    except (DamagedFileError, OSError, KeyError):
        return False

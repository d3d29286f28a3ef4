"""Writing checkpoints of integer codes: the counterpart of `quant.checkpoint.decoding`. A method is
an entry of `_TENSORS`, and of `quant.checkpoint.formats.writing.METHODS`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.checkpoint.codes import GroupCodes, pack_words
from quant.checkpoint.decoding import AWQ_ORDER
from quant.checkpoint.formats.tensors import NARROW_PART
from quant.checkpoint.formats.writing import ANY_EXPERT, METHODS, WrittenLayout, fills_words
from quant.checkpoint.model_folder import write_index
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_config import (
    AWQ,
    COMPRESSED,
    CONFIG_FILE,
    CONFIG_KEY,
    GPTQ_CONFIG_FILE,
    GPTQ_METHOD,
    WORD_BITS,
)
from quant.checkpoint.stored_tensors import INDEX_FILE, other_parts, text_name
from quant.checkpoint.text_part import text_entries
from quant.devices import row_blocks
from quant.narrow import encode


class Writer:
    """Writes into the folder `target` one file a layer and one for the rest, so that only one layer
    is in memory; what is not quantized comes from `checkpoint`. OSError or SafetensorError where
    the folder cannot be written.
    """

    def __init__(self, target: Path, checkpoint: Checkpoint, layout: WrittenLayout) -> None:
        self.total_bytes = 0
        self._target = target
        self._checkpoint = checkpoint
        self._layout = layout
        self._file_of: dict[str, str] = {}
        self._plain: set[tuple[int, str]] = set()

    def write_layer(
        self, index: int, weights: Mapping[str, GroupCodes], replaced: Container[str] = ()
    ) -> None:
        """Write a layer whose `weights` stand in place of those of their names and of the stored
        ones that are `replaced`.
        """
        prefix, written = f"{self._layout.layers_name}.{index}.", dict[str, Tensor]()
        for stored in self._checkpoint.names_below(prefix.removesuffix(".")):
            own = self._full_name(stored).removeprefix(prefix)
            module = own.removesuffix(".weight")
            if (module not in weights or module == own) and stored not in replaced:
                written[prefix + own] = self._checkpoint.read_as_stored(stored)
                if module != own and written[prefix + own].dim() == 2:
                    parts = (ANY_EXPERT if part.isdigit() else part for part in module.split("."))
                    self._plain.add((index, ".".join(parts)))
        for name, weight in weights.items():
            for part, tensor in self._tensors(weight).items():
                written[f"{prefix}{name}.{part}"] = tensor
        self._save(written, index + 1)

    def _tensors(self, weight: GroupCodes) -> dict[str, Tensor]:
        method, symmetric = self._layout.method, self._layout.options.symmetric
        if METHODS[method].one_group:
            weight = in_groups_of(weight, self._layout.one_group)
        return _TENSORS[method](weight, symmetric)

    def finish(self) -> None:
        layers = f"{self._layout.layers_name}."
        text = (stored for stored in self._checkpoint.names() if not other_parts((stored,)))
        full = {self._full_name(stored): stored for stored in text}
        rest = {name: stored for name, stored in full.items() if not name.startswith(layers)}
        self._save(
            {name: self._checkpoint.read_as_stored(stored) for name, stored in rest.items()}, 0
        )
        write_index(self._target / INDEX_FILE, self._file_of, self.total_bytes)
        method, path = self._layout.method, self._target / CONFIG_FILE
        settings = {"quant_method": method, **self._layout.settings(self._plain)}
        config = text_entries(json.loads(path.read_text(encoding="utf-8")), str(path))
        _write_json(path, {**config, CONFIG_KEY: settings})
        if method == GPTQ_METHOD:
            _write_json(self._target / GPTQ_CONFIG_FILE, settings)

    def _full_name(self, stored: str) -> str:
        name, base = text_name(stored), self._layout.layers_name.partition(".")[0]
        is_full = name.startswith(tuple(f"{each}." for each in (base, *self._layout.head_names)))
        return name if is_full else f"{base}.{name}"

    def _save(self, tensors: dict[str, Tensor], number: int) -> None:
        last = len(self._layout.bitwidths)
        file = f"model-{number + 1:05d}-of-{last + 1:05d}.safetensors"
        save_file(tensors, self._target / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read; stages may run as other users.
        shutil.copymode(self._target / CONFIG_FILE, self._target / file)
        self._file_of |= dict.fromkeys(tensors, file)
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def in_groups_of(weight: GroupCodes, size: int) -> GroupCodes:
    """The same weight with a scale and a zero for `size` columns, which divide its groups."""
    parts = weight.codes.shape[1] // weight.scale.shape[1] // size
    return replace(
        weight,
        scale=weight.scale.repeat_interleave(parts, 1),
        zero=weight.zero.repeat_interleave(parts, 1),
        group_of_column=torch.arange(weight.codes.shape[1], dtype=torch.int32) // size,
    )


def gptq_tensors(weight: GroupCodes, zero_offset: int) -> dict[str, Tensor]:
    """The tensors of a module by the last part of their name; `weight` has to fulfil `fills_words`,
    `zero_offset` is as in `StoredConfig`.
    """
    assert not zero_offset or bool(weight.zero.all()), "format gptq cannot hold a zero of 0"
    if weight.narrow:
        assert weight.low is not None, "a zero between codes"
        words = _packed_rows(weight).t().contiguous()
        return {"qweight": words, NARROW_PART: encode(weight.scale, weight.low, weight.bits)}
    return {
        "qweight": _packed_rows(weight).t().contiguous(),
        "qzeros": pack_words(weight.zero.t() - zero_offset, weight.bits),
        "scales": weight.scale.t().contiguous(),
        "g_idx": weight.group_of_column.int(),
    }


def _compressed(weight: GroupCodes, symmetric: bool) -> dict[str, Tensor]:
    zeros = {"weight_zero_point": pack_words(weight.zero.t(), weight.bits).t().contiguous()}
    return {
        "weight_packed": _packed_rows(weight),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.codes.shape),
        **({} if symmetric else zeros),
    }


def _awq(weight: GroupCodes, symmetric: bool) -> dict[str, Tensor]:
    return {
        "qweight": _awq_words(weight.codes.t()),
        "qzeros": _awq_words(weight.zero.t()),
        "scales": weight.scale.t().contiguous(),
    }


def _awq_words(codes: Tensor) -> Tensor:
    """Pack `[n, out]` to int32 `[n, out / 8]`."""
    words = torch.empty(len(codes), codes.shape[1] // len(AWQ_ORDER), dtype=torch.int32)
    for block in row_blocks(len(codes), codes.shape[1], words.device):
        ordered = codes[block].unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER]
        words[block] = pack_words(ordered.flatten(1), 4)
    return words


_TENSORS: Mapping[str, Callable[[GroupCodes, bool], dict[str, Tensor]]] = {
    GPTQ_METHOD: lambda weight, symmetric: gptq_tensors(weight, int(symmetric)),
    COMPRESSED: _compressed,
    AWQ: _awq,
}
"""The tensors of a module by the last part of their name."""


def _packed_rows(weight: GroupCodes) -> Tensor:
    rows, columns = weight.codes.shape
    assert fills_words(rows, columns, weight.bits), "checked before anything is computed"
    packed = torch.empty(rows, columns * weight.bits // WORD_BITS, dtype=torch.int32)
    for block in row_blocks(rows, columns, packed.device):
        packed[block] = pack_words(weight.codes[block], weight.bits)
    return packed

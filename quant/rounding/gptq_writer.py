"""Writing checkpoints in the format of GPTQ weights (`quant.rounding.gptq_format`)."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.model_folder import write_index
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_config import CONFIG_FILE, CONFIG_KEY, GPTQ_CONFIG_FILE, WHOLE_ROW
from quant.checkpoint.stored_tensors import INDEX_FILE, other_parts, text_name
from quant.checkpoint.text_part import text_entries
from quant.common.errors import SpecError
from quant.rounding.gptq_format import fills_words, gptq_tensors
from quant.scheme import FULL_BITS, GROUP_SIZES, GptqOptions, group_size

ANY_EXPERT = "*"
"""In names of linears, in place of the number of an expert."""

_SMALL = 16
"""Linears of so many times fewer weights than the largest one of a layer are small."""


@dataclass(frozen=True)
class GptqLayout:
    """How decoder layers are written. `layers_name`: full name of their list; `linears`: of each
    layer `[out, in]` by name within it, those of all experts as one; `expert_bitwidths`: of each
    layer those of its experts; `head_names`: those that the LM head may be stored under. SpecError
    where nothing is to be quantized, or the format cannot hold a linear.
    """

    layers_name: str
    bitwidths: Sequence[int]
    expert_bitwidths: Sequence[int]
    linears: Sequence[Mapping[str, tuple[int, int]]]
    head_names: Sequence[str]

    def __post_init__(self) -> None:
        below = [
            (index, name, shape, bits)
            for index, linears in enumerate(self.linears)
            for name, shape in linears.items()
            if (bits := self.bits_of(index, name)) != FULL_BITS
        ]
        if not below:
            raise SpecError("all layers have 16 bits: there is nothing to quantize; use the model")
        for index, name, (rows, columns), bits in below:
            if not fills_words(rows, columns, bits):
                raise SpecError(
                    f"{self.layers_name}.{index}.{name} of {rows} x {columns} does not fill "
                    f"whole words at {bits} bits, as the GPTQ format asks; plan with other "
                    "--bits for this model (3 needs multiples of 32, 4 of 8, 8 of 4)"
                )

    def bits_of(self, index: int, name: str) -> int:
        """The bits of a linear of layer `index`; small ones stay in 16 that the format cannot hold,
        such as the rates of a mixer's heads.
        """
        is_expert, linears = ANY_EXPERT in name.split("."), self.linears[index]
        bits = (self.expert_bitwidths if is_expert else self.bitwidths)[index]
        rows, columns = linears[name]
        if bits == FULL_BITS or fills_words(rows, columns, bits):
            return bits
        largest = max(one * other for one, other in linears.values())
        return FULL_BITS if rows * columns * _SMALL < largest else bits

    def configuration(self, options: GptqOptions) -> dict[str, Any]:
        every = [
            (index, name, shape)
            for index, linears in enumerate(self.linears)
            for name, shape in linears.items()
        ]
        bits = Counter(self.bits_of(index, name) for index, name, _ in every)
        del bits[FULL_BITS]
        usual_bits = bits.most_common(1)[0][0]
        usual_group = Counter(_format_group(shape[1]) for *_, shape in every).most_common(1)[0][0]
        rules: dict[str, dict[str, int]] = {}
        for index in range(len(self.bitwidths)):
            rules |= self._rules(index, usual_bits, usual_group)
        layout = "gptq" if options.symmetric else "gptq_v2"
        return {
            "quant_method": "gptq",
            "bits": usual_bits,
            "group_size": usual_group,
            "sym": options.symmetric,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": layout,
            "format": layout,
            "pack_dtype": "int32",
            "dynamic": rules,
            "meta": {"quantizer": ["llmpq"], "damp_percent": options.damping},
        }

    def _rules(self, index: int, usual_bits: int, usual_group: int) -> dict[str, dict[str, int]]:
        """What a layer has that is not as usual, single linears first."""
        layer, rules = re.escape(f"{self.layers_name}.{index}."), dict[str, dict[str, int]]()
        own_bits = {name: self.bits_of(index, name) for name in self.linears[index]}
        if {*own_bits.values()} <= {FULL_BITS}:
            return {f"-:{layer}.*": {}}
        for name, bits in own_bits.items():
            pattern = layer + re.escape(name).replace(re.escape(ANY_EXPERT), r"\d+")
            group = _format_group(self.linears[index][name][1])
            if bits == FULL_BITS:
                rules[f"-:{pattern}"] = {}
            elif group != usual_group or bits != self.bitwidths[index]:
                other_bits = {} if bits == usual_bits else {"bits": bits}
                other_group = {} if group == usual_group else {"group_size": group}
                if other_bits or other_group:
                    rules[f"+:{pattern}"] = other_bits | other_group
        if self.bitwidths[index] not in (usual_bits, FULL_BITS):
            rules[f"+:{layer}.*"] = {"bits": self.bitwidths[index]}
        return rules


class GptqWriter:
    """Writes into the folder `target` one file a layer and one for the rest, so that only one layer
    is in memory; what is not quantized comes from `checkpoint`. Modules with other bits than most,
    or with 16, are `dynamic` rules of the configuration: patterns of names, of which the first
    match decides. OSError or SafetensorError where the folder cannot be written.
    """

    def __init__(
        self, target: Path, checkpoint: Checkpoint, layout: GptqLayout, options: GptqOptions
    ) -> None:
        self.total_bytes = 0
        self._target = target
        self._checkpoint = checkpoint
        self._layout = layout
        self._options = options
        self._file_of: dict[str, str] = {}

    def write_layer(
        self, index: int, weights: Mapping[str, GroupCodes], replaced: Container[str] = ()
    ) -> None:
        """Write a layer whose `weights` stand in place of those of their names and of the stored
        ones that are `replaced`.
        """
        prefix = f"{self._layout.layers_name}.{index}."
        kept: dict[str, torch.Tensor] = {}
        for stored in self._checkpoint.names_below(prefix.removesuffix(".")):
            own = self._full_name(stored).removeprefix(prefix)
            is_plain = own.removesuffix(".weight") not in weights or not own.endswith(".weight")
            if is_plain and stored not in replaced:
                kept[prefix + own] = self._checkpoint.read_as_stored(stored)
        for name, weight in weights.items():
            for part, tensor in gptq_tensors(weight, int(self._options.symmetric)).items():
                kept[f"{prefix}{name}.{part}"] = tensor
        self._save(kept, index + 1)

    def finish(self) -> None:
        layers = f"{self._layout.layers_name}."
        text = (stored for stored in self._checkpoint.names() if not other_parts((stored,)))
        full = {self._full_name(stored): stored for stored in text}
        rest = {name: stored for name, stored in full.items() if not name.startswith(layers)}
        self._save(
            {name: self._checkpoint.read_as_stored(stored) for name, stored in rest.items()}, 0
        )
        write_index(self._target / INDEX_FILE, self._file_of, self.total_bytes)
        path, quantization = self._target / CONFIG_FILE, self._layout.configuration(self._options)
        config = text_entries(json.loads(path.read_text(encoding="utf-8")), str(path))
        _write_json(path, {**config, CONFIG_KEY: quantization})
        _write_json(self._target / GPTQ_CONFIG_FILE, quantization)

    def _full_name(self, stored: str) -> str:
        name, base = text_name(stored), self._layout.layers_name.partition(".")[0]
        is_full = name.startswith(tuple(f"{each}." for each in (base, *self._layout.head_names)))
        return name if is_full else f"{base}.{name}"

    def _save(self, tensors: dict[str, torch.Tensor], number: int) -> None:
        last = len(self._layout.bitwidths)
        file = f"model-{number + 1:05d}-of-{last + 1:05d}.safetensors"
        save_file(tensors, self._target / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read; stages may run as other users.
        shutil.copymode(self._target / CONFIG_FILE, self._target / file)
        self._file_of |= dict.fromkeys(tensors, file)
        self.total_bytes += sum(tensor.nbytes for tensor in tensors.values())


def _format_group(columns: int) -> int:
    group = group_size(columns)
    return group if group in GROUP_SIZES else WHOLE_ROW


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

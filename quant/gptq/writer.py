"""Writing a checkpoint of mixed bitwidths in GPTQModel's format, one file a layer and one for the
rest, so that only one layer is in memory. Modules with other bits than most, or 16, are `dynamic`
rules: patterns of names, of which the first match decides.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quant.checkpoint.gptq_config import CONFIG_FILE, CONFIG_KEY, GPTQ_CONFIG_FILE, WHOLE_ROW
from quant.checkpoint.model_folder import write_index
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import INDEX_FILE
from quant.common.errors import SpecError
from quant.gptq.format import GptqWeight, fills_words, gptq_tensors
from quant.gptq.options import GptqOptions
from quant.scheme import FULL_BITS, GROUP_SIZES, group_size


@dataclass(frozen=True)
class GptqLayout:
    """`layers_name`: full name of their list; `linears`: `[out, in]` by name within a layer."""

    layers_name: str
    bitwidths: Sequence[int]
    linears: Mapping[str, tuple[int, int]]
    head_names: Sequence[str]

    def __post_init__(self) -> None:
        below = [(i, bits) for i, bits in enumerate(self.bitwidths) if bits != FULL_BITS]
        if not below:
            raise SpecError("all layers have 16 bits: there is nothing to quantize; use the model")
        for index, bits in below:
            for name, (rows, columns) in self.linears.items():
                if not fills_words(rows, columns, bits):
                    raise SpecError(
                        f"{self.layers_name}.{index}.{name} of {rows} x {columns} does not fill "
                        f"whole words at {bits} bits, as the GPTQ format asks; plan with other "
                        "--bits for this model (3 needs multiples of 32, 4 of 8, 8 of 4)"
                    )

    def configuration(self, options: GptqOptions) -> dict[str, Any]:
        usual_bits = Counter(b for b in self.bitwidths if b != FULL_BITS).most_common(1)[0][0]
        groups = {name: _format_group(shape[1]) for name, shape in self.linears.items()}
        usual_group = Counter(groups.values()).most_common(1)[0][0]
        rules: dict[str, dict[str, int]] = {}
        for index, bits in enumerate(self.bitwidths):
            layer = re.escape(f"{self.layers_name}.{index}.")
            if bits == FULL_BITS:
                rules[f"-:{layer}.*"] = {}
                continue
            other_bits = {} if bits == usual_bits else {"bits": bits}
            for name, group in groups.items():
                if group != usual_group:
                    rules[f"+:{layer}{re.escape(name)}"] = {**other_bits, "group_size": group}
            if other_bits:
                rules[f"+:{layer}.*"] = other_bits
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


class GptqWriter:
    """Writes into `target`; what is not quantized comes from `checkpoint`. OSError or
    SafetensorError.
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

    def write_layer(self, index: int, weights: Mapping[str, GptqWeight]) -> None:
        prefix = f"{self._layout.layers_name}.{index}."
        kept: dict[str, torch.Tensor] = {}
        for stored in self._checkpoint.names_below(prefix.removesuffix(".")):
            own = self._full_name(stored).removeprefix(prefix)
            if own.removesuffix(".weight") not in weights or not own.endswith(".weight"):
                kept[prefix + own] = self._checkpoint.read(stored)
        offset = 1 if self._options.symmetric else 0
        for name, weight in weights.items():
            for part, tensor in gptq_tensors(weight, offset).items():
                kept[f"{prefix}{name}.{part}"] = tensor
        self._save(kept, index + 1)

    def finish(self) -> None:
        layers = f"{self._layout.layers_name}."
        names = {stored: self._full_name(stored) for stored in self._checkpoint.names()}
        rest = {full: stored for stored, full in names.items() if not full.startswith(layers)}
        self._save({full: self._checkpoint.read(stored) for full, stored in rest.items()}, 0)
        write_index(self._target / INDEX_FILE, self._file_of, self.total_bytes)
        quantization = self._layout.configuration(self._options)
        path = self._target / CONFIG_FILE
        config = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, {**config, CONFIG_KEY: quantization})
        _write_json(self._target / GPTQ_CONFIG_FILE, quantization)

    def _full_name(self, stored: str) -> str:
        base = self._layout.layers_name.partition(".")[0]
        if stored.startswith(tuple(f"{known}." for known in (base, *self._layout.head_names))):
            return stored
        return f"{base}.{stored}"

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

"""Checking the weights in a model's folder against its configuration: tensors and their shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from planner.model.expected_tensors import Shapes, end_tensors, layer_tensors
from planner.model.families.table import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.gptq_config import STORED_BITS
from quant.checkpoint.stored_tensors import StoredTensor, spellings, stored_tensors
from quant.common.errors import CheckpointError

_WORD_BITS = 32
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_PACKED = ("qweight", "qzeros", "scales")
_PACKED_EXTRAS = ("g_idx", "bias")
"""Other tensors of GPTQ: auto-gptq writes a bias of zeros too, where the model has none."""

_HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|"
    r"(^|\.)(attention|attn|self_attn)\.(bias|masked_bias)$|"
    r"^(model\.)?(mtp|visual|vision_tower|vision_model|multi_modal_projector)[._]"
)
"""Tensors that may be ignored: tables that are computed, masks
(`_keys_to_ignore_on_load_unexpected` of transformers), and parts of other models that were saved
with this one."""

_LISTED = 3
_REMEDY = "correct config.json, or take the weights of this model"


def check_weights(folder: Path, shape: ModelShape) -> str | None:
    """Check the weights in `folder`; returns a warning about tensors that nothing takes.

    Nothing is checked where there are no safetensors files yet. CheckpointError naming file, tensor
    and remedy for a tensor that is missing, of another shape or no float, and for layers beyond
    those of the configuration.
    """
    stored = stored_tensors(folder)
    if not stored:
        return None
    weights = _Weights(folder, shape, stored)
    weights.check_layer_count()
    weights.check_all(end_tensors(shape))
    weights.check_head()
    weights.check_layers()
    return weights.warning()


class _Weights:
    """The tensors `stored` in `folder`, and the names of those that belong to `shape`."""

    def __init__(self, folder: Path, shape: ModelShape, stored: Mapping[str, StoredTensor]) -> None:
        self.folder, self.shape, self.stored = folder, shape, stored
        self.names = FAMILIES[shape.model_type].architecture
        self.known: set[str] = set()

    def check_layer_count(self) -> None:
        """Check that there are as many layers as config.json says: more would be ignored."""
        stacks = spellings(self.names.layers_path, self.names.base)
        of_layer = re.compile(rf"(?:{'|'.join(map(re.escape, stacks))})\.(\d{{1,9}})\.")
        found = {int(match[1]) for match in map(of_layer.match, self.stored) if match}
        layers = max(found, default=-1) + 1
        if layers != self.shape.layers:
            raise CheckpointError(
                f"{self.folder}: config.json says {self.shape.layers} layers (num_hidden_layers, "
                f"or n_layer), but the weights have {layers}; {_REMEDY}"
            )

    def check_all(self, tensors: Shapes) -> None:
        """Check that all `tensors`, by full names, are there."""
        for name, size in tensors.items():
            self._check(name, size)

    def check_head(self) -> None:
        """Check that an untied LM head is there; a tied one may be there."""
        size = (self.shape.vocab_size, self.shape.word_embedding_size)
        heads = [f"{name}.weight" for name in self.names.head_names]
        stored = [name for name in heads if name in self.stored]
        for name in stored or ([] if self.shape.tied_embeddings else heads[:1]):
            self._check(name, size)

    def check_layers(self) -> None:
        """Check every tensor of every decoder layer; packed ones stand in place of the weight."""
        tensors = layer_tensors(self.shape)
        linears = {f"{name}.weight" for name in (*self.names.attention, *self.names.mlp)}
        for index in range(self.shape.layers):
            for name, size in tensors.items():
                full = f"{self.names.layers_path}.{index}.{name}"
                is_linear = self.shape.stored is not None and name in linears
                if not (is_linear and self._check_packed(full.removesuffix(".weight"), size)):
                    self._check(full, size)

    def warning(self) -> str | None:
        """A warning about tensors that nothing takes; None where there are none that matter."""
        left = [n for n in self.stored if n not in self.known and not _HARMLESS.search(n)]
        if not left:
            return None
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        return (
            f"{self.folder}: no part of a {self.shape.model_type} model takes "
            f"{', '.join(f'{name:.100}' for name in left[:_LISTED])}{more} of its weights; they "
            "are left out: is config.json that of this model?"
        )

    def _find(self, name: str) -> tuple[str, StoredTensor] | None:
        for spelling in spellings(name, self.names.base):
            if spelling in self.stored:
                self.known.add(spelling)
                return spelling, self.stored[spelling]
        return None

    def _check(self, name: str, size: tuple[int, ...]) -> None:
        found = self._find(name)
        if found is None:
            raise CheckpointError(self._missing(name))
        stored_name, tensor = found
        where = f"{self.folder / tensor.file}: tensor {stored_name}"
        if tensor.shape is not None and tensor.shape != size:
            raise CheckpointError(
                f"{where} is {list(tensor.shape)} but config.json asks for {list(size)}; {_REMEDY}"
            )
        if tensor.dtype is not None and tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{where} holds {tensor.dtype}: the checkpoint is quantized already; give the "
                "original one in 16 or 32 bit"
            )

    def _missing(self, name: str) -> str:
        packed = self._find(f"{name.removesuffix('.weight')}.qweight")
        if packed is not None:
            return (
                f"{self.folder}: tensor {packed[0]} is quantized, but config.json has no "
                "quantization_config that says how; download config.json again"
            )
        return (
            f"{self.folder} has no tensor {name} among its {len(self.stored)}; it is incomplete or "
            "of another model: download it again"
        )

    def _check_packed(self, module: str, size: tuple[int, ...]) -> bool:
        """Whether the linear `module`, `[out, in]`, is stored in GPTQ's format; if so, check it."""
        found = self._find(f"{module}.qweight")
        if found is None:
            return False
        parts = {part: self._find(f"{module}.{part}") for part in (*_PACKED, *_PACKED_EXTRAS)}
        missing = [part for part in _PACKED if parts[part] is None]
        if missing:
            raise CheckpointError(self._missing(f"{module}.{missing[0]}"))
        name, tensor = found
        words = [-(-size[1] * bits // _WORD_BITS) for bits in STORED_BITS]
        if tensor.shape is not None and tensor.shape not in [(count, size[0]) for count in words]:
            raise CheckpointError(
                f"{self.folder / tensor.file}: tensor {name} is {list(tensor.shape)}, which holds "
                f"{size[1]} inputs of {size[0]} outputs at none of "
                f"{', '.join(map(str, STORED_BITS))} bits; {_REMEDY}"
            )
        return True

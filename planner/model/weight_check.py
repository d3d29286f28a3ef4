"""Checking the weights in a model's folder against its configuration: tensors and their shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.folder import gguf_index, model_place
from quant.checkpoint.gptq_config import STORED_BITS, bits_of_words
from quant.checkpoint.stored_tensors import (
    StoredTensor,
    has_only_zeros,
    is_adapter,
    is_bias,
    is_harmless,
    is_in_hub_cache,
    is_norm,
    patterns,
    spellings,
    stored_name,
    stored_tensors,
    unread_weights,
)
from quant.common.errors import CheckpointError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_PACKED = ("qweight", "qzeros", "scales")
_PACKED_MARKS = ("qweight", "weight_packed")
"""What stands in place of a weight in GPTQ and AWQ, and in compressed-tensors."""

_REMEDY = "correct config.json, or take the weights of this model"
_GGUF_REMEDY = "download the file again, or take another conversion of the model"
_OTHER_TYPE = "a type that is not read; take a file of another type, such as Q8_0, Q4_K_M or F16"
_ORIGINAL = "the checkpoint is quantized already; give the original one in 16 or 32 bit"


def check_weights(folder: Path, shape: ModelShape) -> str | None:
    """Check tensors in `folder`; return a warning about those that nothing takes, or that there are
    none yet. CheckpointError names file, tensor and remedy for what is unreadable, missing,
    misshaped, or changes results without a place for it.
    """
    unread = unread_weights(folder)
    if unread is not None:
        raise CheckpointError(unread)
    stored = stored_tensors(folder)
    if not stored:
        if is_in_hub_cache(folder):
            return None
        return (
            f"{folder} holds no weights yet: what is planned rests on config.json alone; the "
            "weights are checked against it once they are there"
        )
    weights = _Weights(folder, shape, stored)
    weights.check_layer_count()
    for name, size in end_tensors(shape).items():
        weights.check(name, size)
    weights.check_head()
    weights.check_layers()
    return weights.left_out()


class _Weights:
    def __init__(self, folder: Path, shape: ModelShape, stored: Mapping[str, StoredTensor]) -> None:
        self.folder, self.shape, self.stored = folder, shape, stored
        described = gguf_index(folder)
        self.place = model_place(folder)
        self.settings = "config.json" if described is None else "its metadata"
        self.remedy = _REMEDY if described is None else _GGUF_REMEDY
        self.spelling = None if described is None else ARCHITECTURES[described.architecture]
        self.names = FAMILIES[shape.model_type].architecture
        self.known: set[str] = set()

    def check_layer_count(self) -> None:
        stacks = spellings(self.names.layers_path, self.names.base)
        of_layer = re.compile(rf"(?:{'|'.join(map(re.escape, stacks))})\.(\d{{1,9}})\.")
        found = {int(match[1]) for match in map(of_layer.match, self.stored) if match}
        layers = max(found, default=-1) + 1
        key = "num_hidden_layers, or n_layer" if self.spelling is None else "block_count"
        if layers != self.shape.layers:
            raise CheckpointError(
                f"{self.place}: {self.settings} says {self.shape.layers} layers ({key}), but the "
                f"weights have {layers}; {self.remedy}"
            )

    def check_head(self) -> None:
        size = (self.shape.vocab_size, self.shape.word_embedding_size)
        heads = [f"{name}.weight" for name in self.names.head_names]
        stored = [n for n in heads if stored_name(self.stored, n, self.names.base) is not None]
        for name in stored or ([] if self.shape.tied_embeddings else heads[:1]):
            self.check(name, size)

    def check_layers(self) -> None:
        tensors = layer_tensors(self.shape)
        linears = {f"{name}.weight" for name in (*self.names.attention, *self.names.mlp)}
        for index in range(self.shape.layers):
            for name, size in tensors.items():
                full = f"{self.names.layers_path}.{index}.{name}"
                is_linear = self.shape.stored is not None and name in linears
                if not (is_linear and self._check_packed(full.removesuffix(".weight"), size)):
                    self.check(full, size)

    def left_out(self) -> str | None:
        """Warn of tensors that nothing takes; CheckpointError where results depend on one."""
        left = [n for n in self.stored if n not in self.known and not is_harmless(n)]
        modules = {name.rpartition(".")[0] for name in self.known} | {*self.names.head_names}
        biases = [name for name in left if is_bias(name, modules)]
        zeros = {name for name in biases if self._may_be_zeros(name)}
        needed = [n for n in biases if n not in zeros] + [n for n in left if self._is_needed(n)]
        nobody = f"{self.place}: no part of a {self.shape.model_type} model"
        if needed:
            settings = "this config.json" if self.spelling is None else "this metadata"
            raise CheckpointError(
                f"{nobody} with {settings} takes {patterns(needed)} of its weights, "
                f"without which answers would be wrong; {self._remedy(needed[0])}"
            )
        unknown = [name for name in left if name not in zeros]
        if not unknown:
            return None
        return f"{nobody} takes {patterns(unknown)} of its weights; they are left out: " + (
            "is config.json that of this model?"
            if self.spelling is None
            else "llama.cpp may use them"
        )

    def _may_be_zeros(self, name: str) -> bool:
        tensor = self.stored[name]
        return tensor.shape is None or has_only_zeros(self.folder / tensor.file, name)

    def _is_needed(self, name: str) -> bool:
        stacks = tuple(f"{each}." for each in spellings(self.names.layers_path, self.names.base))
        return is_adapter(name) or (name.startswith(stacks) and is_norm(name))

    def _remedy(self, name: str) -> str:
        if is_adapter(name):
            return "merge the adapter into the weights first (merge_and_unload of peft)"
        if self.spelling is not None:
            return "take another conversion of the model, or its original checkpoint"
        module, family = name.rpartition(".")[0], FAMILIES[self.shape.model_type]
        entry = None
        if module.endswith(tuple(f".{each}" for each in self.names.attention)):
            entry = family.attention_bias
        elif module.endswith(tuple(f".{each}" for each in self.names.mlp)):
            entry = family.mlp_bias
        proper = "take the config.json that belongs to these weights"
        return f"set {entry} to true in config.json, or {proper}" if entry else proper

    def _find(self, name: str) -> tuple[str, StoredTensor] | None:
        found = stored_name(self.stored, name, self.names.base)
        if found is None:
            return None
        self.known.add(found)
        return found, self.stored[found]

    def check(self, name: str, size: tuple[int, ...]) -> None:
        found = self._find(name)
        if found is None:
            raise CheckpointError(self._missing(name))
        stored_name, tensor = found
        where = f"{self.folder / tensor.file}: tensor {self._spelt(stored_name)}"
        if tensor.dtype is not None and tensor.dtype not in _FLOATS:
            other = _ORIGINAL if self.spelling is None else _OTHER_TYPE
            raise CheckpointError(f"{where} holds {tensor.dtype}: {other}")
        if tensor.shape is not None and tensor.shape != size:
            raise CheckpointError(
                f"{where} is {list(tensor.shape)} but {self.settings} asks for {list(size)}; "
                f"{self.remedy}"
            )

    def _spelt(self, name: str) -> str:
        return name if self.spelling is None else self.spelling.stored_name(name)

    def _missing(self, name: str) -> str:
        module = name.removesuffix(".weight")
        packed = next(
            filter(None, (self._find(f"{module}.{mark}") for mark in _PACKED_MARKS)), None
        )
        if packed is not None:
            return (
                f"{self.folder}: tensor {packed[0]} is quantized, but neither config.json "
                "(quantization_config) nor a file beside it says how; download the configuration "
                "again, or give the original checkpoint in 16 or 32 bit"
            )
        return (
            f"{self.place} has no tensor {self._spelt(name)} among its {len(self.stored)}; it is "
            "incomplete or of another model: download it again"
        )

    def _check_packed(self, module: str, size: tuple[int, ...]) -> bool:
        found = self._find(f"{module}.qweight")
        if found is None:
            return False
        parts = {part: self._find(f"{module}.{part}") for part in (*_PACKED, "g_idx")}
        missing = [part for part in _PACKED if parts[part] is None]
        if missing:
            raise CheckpointError(self._missing(f"{module}.{missing[0]}"))
        name, tensor = found
        fits = tensor.shape is None or (
            tensor.shape[1:] == size[:1] and bits_of_words(tensor.shape[0], size[1]) is not None
        )
        if not fits and tensor.shape is not None:
            raise CheckpointError(
                f"{self.folder / tensor.file}: tensor {name} is {list(tensor.shape)}, which holds "
                f"{size[1]} inputs of {size[0]} outputs at none of "
                f"{', '.join(map(str, STORED_BITS))} bits; {_REMEDY}"
            )
        return True


Shapes = dict[str, tuple[int, ...]]


def layer_tensors(shape: ModelShape) -> Shapes:
    names = FAMILIES[shape.model_type].architecture
    modules = (*names.attention, *names.mlp)
    output = len(names.attention) - 1
    has_bias = [shape.qkv_bias] * output + [shape.output_bias] + [shape.mlp_bias] * len(names.mlp)
    found: Shapes = {}
    for name, linear, bias in zip(modules, shape.layer_linears, has_bias, strict=True):
        found[f"{name}.weight"] = (linear.out_features, linear.in_features)
        if bias:
            found[f"{name}.bias"] = (linear.out_features,)
    for name in names.norms:
        found |= _norm(name, shape)
    if shape.qk_norm:
        found |= {f"self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    return found


def end_tensors(shape: ModelShape) -> Shapes:
    names, hidden = FAMILIES[shape.model_type].architecture, shape.hidden_size
    embedding = names.embedding_path
    found: Shapes = {f"{embedding}.weight": (shape.vocab_size, shape.word_embedding_size)}
    if shape.position_rows:
        found[f"{names.decoder}.embed_positions.weight"] = (shape.position_rows, hidden)
    if shape.word_embedding_size != hidden:
        found[f"{names.decoder}.project_in.weight"] = (hidden, shape.word_embedding_size)
        found[f"{names.decoder}.project_out.weight"] = (shape.word_embedding_size, hidden)
    if shape.embedding_norm:
        found |= _norm(f"{embedding}_layernorm", shape)
    if shape.final_norm:
        found |= _norm(f"{names.decoder}.{names.final[0]}", shape)
    return found


def _norm(name: str, shape: ModelShape) -> Shapes:
    count = shape.norm_parameters // shape.hidden_size
    return {f"{name}.{part}": (shape.hidden_size,) for part in ("weight", "bias")[:count]}

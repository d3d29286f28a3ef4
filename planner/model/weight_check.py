"""Checking the weights in a model's folder against its configuration: tensors and their shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from planner.model.tensor_shapes import end_tensors, fused_experts, layer_tensors, separate_experts
from quant.checkpoint.coded_weights import weight_tensors
from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.folder import gguf_index, model_place
from quant.checkpoint.stored_tensors import (
    KEY_TENSORS,
    StoredTensor,
    has_only_zeros,
    is_adapter,
    is_bias,
    is_harmless,
    is_in_hub_cache,
    is_norm,
    is_of_expert,
    patterns,
    spellings,
    stored_name,
    unread_weights,
)
from quant.common.errors import CheckpointError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MXFP4_GROUP = 32
"""Weights of a row that share a scale."""

_PACKED_MARKS = ("qweight", "weight_packed", "q_weight", "trellis", "W_q", "Qidxs", "codes")
"""What stands in place of a weight in GPTQ and AWQ, compressed-tensors, EXL2, EXL3, HQQ, QuIP# and
AQLM."""

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
    stored = weight_tensors(folder)
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
        self.predictors: tuple[str, ...] = ()
        """What names of layers that are not run begin with (`Architecture.predictor`)."""

    def check_layer_count(self) -> None:
        stacks = spellings(self.names.layers_path, self.names.base)
        of_layer = re.compile(rf"(?:{'|'.join(map(re.escape, stacks))})\.(\d{{1,9}})\.")
        found = {int(match[1]) for match in map(of_layer.match, self.stored) if match}
        mark = f"{self.names.predictor}.weight"
        for index in sorted(found - {*range(self.shape.layers)}):
            names = tuple(f"{stack}.{index}." for stack in stacks)
            if any(f"{name}{mark}" in self.stored for name in names):
                self.predictors += names
                found.remove(index)
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
        for index in range(self.shape.layers):
            self._check_layer(f"{self.names.layers_path}.{index}", self.shape.layer(index))

    def _check_layer(self, layer: str, kind: ModelShape) -> None:
        fused = [name for name in fused_experts(kind) if not name.endswith("_bias")]
        forms = [f"{layer}.{name}{end}" for name in fused for end in ("", "_blocks")]
        is_fused = any([self._find(each) for each in forms])
        for name, size in layer_tensors(kind).items():
            full = f"{layer}.{name}"
            if name in fused and (not is_fused or self._check_mxfp4(full, size)):
                continue
            self.check(full, size)
        if fused and not is_fused:
            self._check_experts(layer, kind)
        if kind.reads_earlier_keys:  # published files have what makes keys and values all the same
            for name in KEY_TENSORS:
                self._find(f"{layer}.{name}")

    def _check_experts(self, layer: str, kind: ModelShape) -> None:
        is_coded = self.shape.stored is not None
        experts = separate_experts(kind, is_coded and self.names.experts_by_inputs)
        for tensors in experts:
            for name, size in tensors.items():
                if self._find(f"{layer}.{name}") is None:
                    stored = sum(all(self._find(f"{layer}.{n}") for n in each) for each in experts)
                    raise CheckpointError(
                        f"{self._missing(f'{layer}.{name}')} ({stored} of {len(experts)} experts "
                        "of this layer are there)"
                    )
                self.check(f"{layer}.{name}", size)

    def _check_mxfp4(self, name: str, size: tuple[int, ...]) -> bool:
        """Check codes and scales in place of experts' weights; False where there are none."""
        found = {part: self._find(f"{name}_{part}") for part in ("blocks", "scales")}
        if len(size) < 3 or not any(found.values()):
            return False
        experts, columns, rows = size
        groups = (experts, rows, columns // _MXFP4_GROUP)
        for part, own in (("blocks", (*groups, _MXFP4_GROUP // 2)), ("scales", groups)):
            self.check(f"{name}_{part}", own, frozenset({"U8"}))
        return True

    def left_out(self) -> str | None:
        """Warn of tensors that nothing takes; CheckpointError where results depend on one."""
        run = [name for name in self.stored if not name.startswith(self.predictors)]
        left = [name for name in run if name not in self.known and not is_harmless(name)]
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
        counts = is_norm(name) or is_of_expert(name)
        return is_adapter(name) or (name.startswith(stacks) and counts)

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

    def check(self, name: str, size: tuple[int, ...], types: frozenset[str] = _FLOATS) -> None:
        found = self._find(name)
        if found is None:
            raise CheckpointError(self._missing(name))
        stored_name, tensor = found
        where = f"{self.folder / tensor.file}: tensor {self._spelt(stored_name)}"
        if tensor.dtype is not None and tensor.dtype not in types:
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

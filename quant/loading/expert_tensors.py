"""Reading the weights of a layer's experts one by one, in whatever form a checkpoint has them.

Hub checkpoints have a tensor for each expert and projection (Qwen3-MoE), one for all experts as
transformers fuses them (Qwen3.5-MoE), that transposed, or its MXFP4 codes and scales (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quant.backends.base import PackedWeight
from quant.checkpoint.decoding import decode_fp4, scale_values
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.experts import (
    ExpertWeights,
    PackExpert,
    QuantizedExperts,
    expert_shapes,
    packed_expert,
)
from quant.hosted_experts import HostedExperts
from quant.linear import HostForm, LayerForm, linear_of_codes
from quant.rounding.canonical import CanonicalWeight, part_of, rows_joined
from quant.rounding.gptq_format import to_canonical
from quant.rounding.importance import InputStatistics
from quant.scheme import FULL_BITS, Cut, LinearShape

GATE_UP, DOWN = FUSED = ("gate_up_proj", "down_proj")
_OF_EXPERT = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}
"""Projections of one expert whose rows follow each other in the fused weight, or take turns."""

_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4_BYTES = 16
"""Bytes of a block of 32 codes, which share a scale."""

_ReadExpert = Callable[[int], Tensor]


@dataclass(frozen=True)
class ExpertTensors:
    """The experts of full name `name`, of which `module` has the shapes, on the meta device.
    `cuts`: the parts that are held, of each expert's weights by the names in `FUSED`, of biases of
    all.
    """

    checkpoint: Checkpoint
    name: str
    module: nn.Module
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def whole(self, fused: str, held: LinearShape) -> tuple[int, ...]:
        """The sizes `[out, in]` of an expert's weight of which `held` is kept."""
        size, cut = (held.out_features, held.in_features), self.cuts.get(fused)
        return size if cut is None else cut.whole_shape(size)

    def reader(self, fused: str, shape: LinearShape) -> _ReadExpert:
        """Give a function that reads the whole weight `fused` of an expert, `[out, in]`, which may
        be a view of the file; CheckpointError where there is none, or of another shape.
        """
        count, _, _ = expert_shapes(self.module)
        size = self.whole(fused, shape)
        if self._find(f"{fused}{_BLOCKS}") is not None:
            return self._mxfp4_reader(fused, (count, *size))
        whole = self._find(fused)
        if whole is None:
            return lambda index: self._of_expert(fused, index, size)
        is_transposed = bool(getattr(self.module, "is_transposed", False))
        self._check(whole, (count, *(size[::-1] if is_transposed else size)))

        def read(index: int) -> Tensor:
            found = self._floats(whole)[index]
            return found.t() if is_transposed else found

        return read

    def parts(self, fused: str) -> tuple[str, ...]:
        """The projections by which codes of `fused` are stored of each expert: gate and up apart,
        unless their rows alternate (gpt-oss).
        """
        is_transposed = bool(getattr(self.module, "is_transposed", False))
        return (fused,) if is_transposed else _OF_EXPERT[fused]

    def rows_of(self, fused: str) -> dict[str, slice]:
        """The rows of the weight `fused` that each of its projections has, by its name."""
        names = _OF_EXPERT[fused]
        if len(names) == 1:
            return {names[0]: slice(None)}
        if not getattr(self.module, "is_concatenated", True):
            return {name: slice(first, None, 2) for first, name in enumerate(names)}
        _, both, _ = expert_shapes(self.module)
        half = both.out_features // 2
        return {names[0]: slice(half), names[1]: slice(half, None)}

    def stored_bits(self, fused: str) -> int:
        """The bits of the codes of `fused`; 16 where it has none."""
        return self.checkpoint.stored_bits(f"{self.name}.0.{self.parts(fused)[0]}")

    def has_codes(self, fused: str) -> bool:
        if self.checkpoint.is_changed(self.name):
            return False
        return self.checkpoint.has_codes(f"{self.name}.0.{self.parts(fused)[0]}")

    def stored_names(self) -> list[str]:
        """Names under which the weights of all experts are stored."""
        count, _, _ = expert_shapes(self.module)
        each = (part for parts in _OF_EXPERT.values() for part in parts)
        apart = (f"{index}.{part}.weight" for part in each for index in range(count))
        whole = (f"{fused}{end}" for fused in FUSED for end in ("", _BLOCKS, _SCALES))
        return [found for part in (*whole, *apart) if (found := self._find(part)) is not None]

    def packed(self, fused: str, index: int, shape: LinearShape, form: LayerForm) -> PackedWeight:
        """Pack the weight `fused` of an expert with the codes that it is stored with, whose bits
        may be others than those of `form`.
        """
        parts, weights = self.parts(fused), list[CanonicalWeight]()
        rows, columns = self.whole(fused, shape)
        for part in parts:
            module = f"{self.name}.{index}.{part}"
            size = rows // len(parts), columns
            stored = to_canonical(self.checkpoint.read_codes(module, size))
            if stored.input_order is not None:
                raise CheckpointError(
                    "the groups of its columns lie apart (desc_act), as those of experts may not; "
                    "quantize the model without desc_act"
                )
            weights.append(stored.canonical)
        joined, cut = rows_joined(weights), self.cuts.get(fused)
        joined = joined if cut is None else part_of(joined, cut)
        return linear_of_codes(joined, None, form.with_bits(joined.bits)).packed

    def _of_expert(self, fused: str, index: int, size: tuple[int, ...]) -> Tensor:
        """Read an expert that is stored by itself."""
        parts = []
        names = _OF_EXPERT[fused]
        for projection in names:
            name = f"{self.name}.{index}.{projection}.weight"
            stored = self.checkpoint.find(name, _first(name))
            self._check(stored, (size[0] // len(names), size[1]))
            parts.append(self._floats(stored))
        if len(parts) == 1:
            return parts[0]
        take_turns = not getattr(self.module, "is_concatenated", True)
        return torch.stack(parts, 1).flatten(0, 1) if take_turns else torch.cat(parts)

    def _mxfp4_reader(self, fused: str, size: tuple[int, ...]) -> _ReadExpert:
        names = [
            self.checkpoint.find(f"{self.name}.{fused}{end}", _first(self.name))
            for end in (_BLOCKS, _SCALES)
        ]
        groups = size[2] // (2 * _MXFP4_BYTES)
        self._check(names[0], (*size[:2], groups, _MXFP4_BYTES))
        self._check(names[1], (*size[:2], groups))
        blocks, scales = (self.checkpoint.read(name) for name in names)
        return lambda index: decode_fp4(blocks[index], scale_values(scales[index]))

    def _find(self, part: str) -> str | None:
        name, prefix = f"{self.name}.{part}", _first(self.name)
        return self.checkpoint.find(name, prefix) if self.checkpoint.has(name, prefix) else None

    def _check(self, stored: str, size: tuple[int, ...]) -> None:
        found = self.checkpoint.shape_of(stored)
        if found != size:
            raise CheckpointError(
                f"tensor {stored} in {self.checkpoint.place} is {list(found)} but the model's "
                f"configuration wants {list(size)}; the checkpoint is of another model"
            )

    def _floats(self, stored: str) -> Tensor:
        tensor = self.checkpoint.read(stored)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"tensor {stored} in {self.checkpoint.place} holds {tensor.dtype}: the checkpoint "
                "is quantized already; give the original one in 16 or 32 bit"
            )
        return tensor


def _first(name: str) -> str:
    return name.partition(".")[0]


def load_experts(
    tensors: ExpertTensors,
    form: LayerForm,
    inputs: Mapping[str, InputStatistics | None],
    pack: PackExpert = packed_expert,
    layer_bits: int = FULL_BITS,
) -> QuantizedExperts:
    """Read and pack the experts one by one; biases are left on the meta device. `inputs` are those
    of the layer by the names in `FUSED`, those of `down_proj` `[experts * width]`. `layer_bits`: by
    which the layer is known as it is stored, and which keep its weights as they are.
    """
    module = tensors.module
    count, *shapes = expert_shapes(module)
    held = [ExpertWeights(shape, count) for shape in shapes]
    for fused, weights in zip(FUSED, held, strict=True):
        stored = tensors.stored_bits(fused)
        is_kept = form.bits in (layer_bits, stored)
        own_form = form.with_bits(stored) if is_kept else form
        has_codes = is_kept and tensors.has_codes(fused)
        read = None if has_codes else tensors.reader(fused, weights.shape)
        for index in range(count):
            name = f"{tensors.name}.{index}.{fused}"
            own = inputs_of_expert(inputs.get(fused), index, tensors.whole(fused, weights.shape)[1])
            try:
                packed = (
                    tensors.packed(fused, index, weights.shape, form)
                    if read is None
                    else pack(read(index), own_form, name, own, tensors.cuts.get(fused))
                )
                weights.add(packed, form.dtype)
            except CheckpointError as error:
                raise CheckpointError(f"{name} in {tensors.checkpoint.place}: {error}") from error
    return experts_like(module, held[0], held[1], form)


def experts_like(
    module: nn.Module, gate_up: ExpertWeights, down: ExpertWeights, form: LayerForm
) -> QuantizedExperts:
    """Make experts that compute as the fused `module`, whose biases they take."""
    apply_gate: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
    experts = (
        HostedExperts(gate_up, down, apply_gate, form)
        if isinstance(form, HostForm)
        else QuantizedExperts(gate_up, down, apply_gate, form)
    )
    for fused in FUSED:
        name = f"{fused}_bias"
        setattr(experts, name, getattr(module, name, None))
    return experts


def inputs_of_expert(
    inputs: InputStatistics | None, index: int, width: int
) -> InputStatistics | None:
    """Of the inputs of all experts `[experts * width]`, or of what they share `[width]`, give those
    of one; None where it was not asked.
    """
    if inputs is None or len(inputs.mean_square) == width:
        return inputs
    own = inputs.of_inputs(slice(index * width, (index + 1) * width))
    return own if bool(own.mean_square.any()) else None

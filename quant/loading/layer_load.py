"""What of a layer is to be loaded, and in which form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quant.checkpoint.reader import Checkpoint
from quant.experts import expert_shapes, is_experts
from quant.linear import LayerForm
from quant.loading.expert_tensors import FUSED, ExpertTensors
from quant.rounding.importance import InputStatistics, LayerImportance
from quant.scheme import FULL_BITS, Cut

EXACT = frozenset({"A_log", "dt_bias", "e_score_correction_bias"})
"""Tensors that are held in float32, as they may be stored: the decay of a state, which has an
effect on all that come after a token (`planner.model.layer_parts.DeltaMixer`), and what a router
adds to the scores by which it chooses."""


def held_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type in which a layer that computes in `dtype` holds a tensor beside its linears."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if name.rpartition(".")[2] in EXACT else dtype


@dataclass(frozen=True)
class LayerLoad:
    """`module` on the meta device, of full name `name_prefix`. `cuts`: the parts that are held, of
    parameters by their name or their module's, of fused experts those of each; `module` has their
    shapes, `importance` tells of the whole. `quantized`: the
    linears that have the bits of `form`, None for all; others stay in the compute type.
    `experts_form`: that of the experts, where it is another one.
    """

    module: nn.Module
    name_prefix: str
    form: LayerForm
    importance: LayerImportance | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    quantized: frozenset[str] | None = None
    experts_form: LayerForm | None = None

    def form_of(self, name: str) -> LayerForm:
        """The form of the module `name` or of what is in it, by the experts of the layer."""
        if self.experts_form is None or not any(
            name == own or name.startswith(f"{own}.") for own in self.expert_names
        ):
            return self.form
        return self.experts_form

    @property
    def expert_names(self) -> list[str]:
        """Fused experts by name, until they are loaded."""
        return [name for name, child in self.module.named_modules() if is_experts(child)]

    @property
    def linears(self) -> list[tuple[str, nn.Linear]]:
        """Those that have the layer's bits, by name."""
        return plain_linears(self.module, self.quantized)

    def stored_bits(self, checkpoint: Checkpoint) -> int:
        """The bits by which the layer is known as it is stored; 16 where no codes are."""
        if not checkpoint.keeps_codes:
            return FULL_BITS
        weights = Counter[int]()
        for name, linear in self.linears:
            bits = checkpoint.stored_bits(f"{self.name_prefix}.{name}")
            weights[bits] += linear.weight.numel()
        for _, tensors in self.experts(checkpoint):
            for fused, shape in zip(FUSED, expert_shapes(tensors.module)[1:], strict=True):
                weights[tensors.stored_bits(fused)] += shape.parameters
        return checkpoint.bits_of_layer(weights)

    def experts(self, checkpoint: Checkpoint) -> list[tuple[str, ExpertTensors]]:
        """Fused experts by name, with their tensors."""
        return [(name, self._experts_of(checkpoint, name)) for name in self.expert_names]

    def _experts_of(self, checkpoint: Checkpoint, name: str) -> ExpertTensors:
        place = f"{name}."
        cuts = {n.removeprefix(place): cut for n, cut in self.cuts.items() if n.startswith(place)}
        module = self.module.get_submodule(name)
        return ExpertTensors(checkpoint, f"{self.name_prefix}.{name}", module, cuts)


def plain_linears(
    module: nn.Module, names: Container[str] | None = None
) -> list[tuple[str, nn.Linear]]:
    """The linears of a layer by name, those in `names` where it is given."""
    linears = [(n, child) for n, child in module.named_modules() if isinstance(child, nn.Linear)]
    return [(name, child) for name, child in linears if names is None or name in names]


def expert_inputs(load: LayerLoad, name: str) -> dict[str, InputStatistics | None]:
    known = {} if load.importance is None else load.importance.inputs
    return {fused: known.get(f"{name}.{fused}") for fused in FUSED}

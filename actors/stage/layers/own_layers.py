"""Decoder layers with few kernels: their products are the modules that were loaded, all between
them is `actors.stage.layers.cuda_layer` on GPUs and `actors.stage.layers.cpu_layer` on CPUs.

A layer's sum with the residual stream is one kernel with the norms of the next layer, so that one
like LLaMA's starts 12 on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from actors.attention.addresses import Scoring
from actors.attention.cuda import range_attention
from actors.attention.kv_cache import KVCache
from actors.attention.ragged import NewTokens, RaggedContext
from actors.messages import MicroBatch
from actors.stage.layers.cpu_layer import LayerLoops, layer_loops
from actors.stage.layers.cuda_layer import LayerKernels, Norm, Turning, layer_kernels, warn_of
from actors.stage.partial_model import ContextAsCache, architecture_of
from planner.model.families import has_own_layers
from quant.backends.cuda.driver import CudaError

_TOLERANCE = 0.01
"""Largest relative error of the self-test; rounding to bfloat16 costs 0.004."""

LayerPasses = LayerKernels | LayerLoops
"""What passes over numbers between products."""

_TEST_TOKENS = 32
_TEST_SIZE = 0.05
"""Size of its hidden states: what a layer adds is not small beside them."""


class OwnLayer(nn.Module):
    """Stands in for transformers' decoder `layer` of number `index`; computes with its modules."""

    def __init__(
        self, layer: nn.Module, index: int, config: PretrainedConfig, kernels: LayerPasses
    ) -> None:
        super().__init__()
        self.layer, self.index, self.kernels = layer, index, kernels
        architecture = architecture_of(config)
        attention: Any = layer.get_submodule(architecture.attention[0].rpartition(".")[0])
        norms = [Norm.of(layer.get_submodule(name)) for name in architecture.norms]
        self._norms = tuple(norm for norm in norms if norm is not None)
        heads = (Norm.of(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self._head_norms = tuple(norm for norm in heads if norm is not None)
        names = (*architecture.attention, *architecture.mlp, architecture.activation)
        self._named = {name: layer.get_submodule(name) for name in names}  # found once
        self._is_parallel = bool(getattr(layer, "use_parallel_residual", False))
        self._projections = architecture.attention[:-1]
        self._output = architecture.attention[-1]
        self._mlp, self._activation = architecture.mlp, architecture.activation
        self._is_fused = self._mlp[0].endswith("gate_up_proj")  # their name everywhere
        self._in_blocks = architecture.qkv_in_blocks
        self._turns = bool(getattr(attention, "use_rope", True))  # SmolLM3
        self._multiplier = float(getattr(layer, "residual_multiplier", 1.0))  # Granite
        slopes = getattr(attention, "alibi_slopes", None)
        if slopes is not None:
            slopes = slopes.to(kernels.device)
        scale = getattr(attention, "scaling", None) or attention.inv_norm_factor
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self._scoring = Scoring(float(scale), window, slopes)

    @property
    def first_norms(self) -> tuple[Norm, ...]:
        """The norms of what comes in."""
        return self._norms if self._is_parallel else self._norms[:1]

    def group(self, cache: KVCache) -> int:
        """Queries for each head of keys in `cache`."""
        kv_heads, _, head_dim = cache.of_layer(self.index)[0].numbers.shape
        width: Any = self._named[self._projections[0]].out_features
        heads = int(width) // head_dim
        if self._in_blocks:
            return heads // kv_heads - 2
        return heads // (3 if len(self._projections) == 1 else 1) // kv_heads

    def forward(
        self,
        hidden: Tensor,
        normed: tuple[Tensor, ...],
        following: tuple[Norm, ...],
        context: RaggedContext,
        turning: Turning | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream behind the layer, `[tokens, hidden_size]`, and the `following` norms
        of it; `normed` are the `first_norms` of `hidden`.
        """
        attended = self._attention(normed[0], context, turning)
        if self._is_parallel:
            added = self._grown(normed[1]), attended
            return self.kernels.add(hidden, added, following)
        hidden, between = self.kernels.add(hidden, (attended,), self._norms[1:])
        return self.kernels.add(hidden, (self._grown(between[0]),), following)

    def _attention(self, normed: Tensor, context: RaggedContext, turning: Turning | None) -> Tensor:
        kv_heads, _, head_dim = context.held(self.index)[0].numbers.shape
        projected = [
            self._named[name](normed).unflatten(-1, (-1, head_dim)) for name in self._projections
        ]
        if self._in_blocks:
            projected = projected[0].split(
                [projected[0].shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1
            )
        elif len(projected) == 1:
            projected = projected[0].unflatten(1, (-1, 3)).unbind(2)
        new = NewTokens(*projected)
        turning = turning if self._turns else None
        if turning is not None and turning.growth is not None:
            new = replace(new, query=new.query * turning.growth)
        attended = self.kernels.attend(
            context, self.index, new, turning, self._head_norms, self._scoring
        )
        return self._scaled(self._named[self._output](attended.flatten(1)))

    def _scaled(self, out: Tensor) -> Tensor:
        return out if self._multiplier == 1 else out.mul_(self._multiplier)

    def _grown(self, normed: Tensor) -> Tensor:
        *grow, shrink = (self._named[name] for name in self._mlp)
        gates = [linear(normed) for linear in grow]
        if self._is_fused:
            gates = gates[0].chunk(2, -1)
        function = self._named[self._activation]
        return self._scaled(shrink(self.kernels.activate(function, *gates)))


def own_layers(model: PreTrainedModel) -> list[OwnLayer]:
    """The layers of `model` that compute by kernels of our own."""
    stack = getattr(model.get_decoder(), architecture_of(model.config).layers)
    return [layer for layer in stack if isinstance(layer, OwnLayer)]


def have_own_attention(layers: list[OwnLayer]) -> bool:
    """Whether attention of `layers` is by kernels of our own for ranges of any kind too."""
    return bool(layers) and layers[0].kernels.reads_tables


def run_own_layers(
    model: PreTrainedModel, layers: list[OwnLayer], context: RaggedContext, inputs: Tensor
) -> Tensor:
    """As `actors.stage.stage.run_decoder`, by `layers` and without transformers' forward: all that
    changes from step to step is in `inputs` and in what `RaggedContext.tell` has brought.
    """
    decoder, architecture = model.get_decoder(), architecture_of(model.config)
    kernels, where = layers[0].kernels, context.where
    hidden = inputs
    if not inputs.is_floating_point():
        for name in sorted(architecture.embedding, key=lambda name: "positions" in name):
            module = getattr(decoder, name)
            if "positions" in name:
                hidden = hidden + module(None, position_ids=where.positions)
            elif module is not None:
                hidden = module(hidden)
        if architecture.input_multiplier is not None:
            hidden = hidden * getattr(decoder, architecture.input_multiplier)
    turning = _turning(model, hidden, context)
    final, *rest = (getattr(decoder, name) for name in architecture.final)
    last = Norm.of(final)
    _, normed = kernels.add(hidden, (), layers[0].first_norms)
    for layer, follower in pairwise([*layers, None]):
        assert layer is not None
        following = (() if last is None else (last,)) if follower is None else follower.first_norms
        hidden, normed = layer(hidden, normed, following, context, turning)
    if last is not None:
        hidden = normed[0]
    for module in (final if last is None else None, *rest):
        if module is not None:
            hidden = module(hidden)
    return hidden


def put_own_layers(
    model: PreTrainedModel, layers: range, cache: KVCache, dtype: torch.dtype
) -> None:
    """Have `layers` of a loaded model compute by kernels of our own, in `dtype`, where the device
    has them and a self-test finds their results equal to those of transformers' layers.
    """
    config = model.config
    stack = getattr(model.get_decoder(), architecture_of(config).layers)
    if not layers or not _is_known(stack[layers[0]], config):
        return
    numbers = cache.of_layer(layers[0])[0].numbers
    device, coded = numbers.device, numbers.dtype == torch.int8
    kernels: LayerPasses | None = None
    if range_attention(numbers.shape[-1], dtype, coded, device) is not None:
        kernels = layer_kernels(config.hidden_size, numbers.shape[-1], dtype, coded, device)
    elif device.type == "cpu":
        kernels = layer_loops(dtype)
    if kernels is None:
        return
    own = [OwnLayer(stack[index], index, config, kernels) for index in layers]
    complaint = self_test(model, own[0], cache.like(layers[:1], _TEST_TOKENS), dtype)
    if complaint is not None:
        warn_of(complaint, device)
        return
    for layer in own:
        stack[layer.index] = layer


def _is_known(layer: nn.Module, config: PretrainedConfig) -> bool:
    """Whether `OwnLayer` computes what `layer` does."""
    if not has_own_layers(config.model_type):
        return False
    norms = [Norm.of(layer.get_submodule(name)) for name in architecture_of(config).norms]
    after = not getattr(config, "do_layer_norm_before", True)  # OPT-350m
    return None not in norms and not (
        after or getattr(config, "apply_residual_connection_post_layernorm", False)
    )


@torch.inference_mode()
def self_test(
    model: PreTrainedModel, own: OwnLayer, cache: KVCache, dtype: torch.dtype
) -> str | None:
    """Compare `own` with the layer that it stands in for on prompts and a decode step; say what is
    wrong, None if nothing is.
    """
    device, width = own.kernels.device, model.config.hidden_size
    draw = torch.Generator().manual_seed(0)
    ones, begins = np.ones(3, np.int64), np.array([0, 7, 20])
    starts, counts = np.array([0, 0, 0]), np.array([4, 11, 4])
    try:
        for batch in (
            MicroBatch(np.arange(3), starts, counts, begins),
            MicroBatch(np.arange(3), counts, ones, begins),
        ):
            size = int(batch.counts.sum()), width
            hidden = (torch.randn(size, generator=draw) * _TEST_SIZE).to(device, dtype)
            context = RaggedContext.of(cache, batch)
            turning = _turning(model, hidden, context)
            wanted = _by_transformers(model, own, hidden, context, turning)
            _, normed = own.kernels.add(hidden, (), own.first_norms)
            found, _ = own(hidden, normed, (), context, turning)
            error = float((found - wanted).float().norm() / wanted.float().norm())
            if not error <= _TOLERANCE:
                return f"the result of a layer is off by {error:.1%}"
    except CudaError as error:
        return str(error)
    return None


def _by_transformers(
    model: PreTrainedModel,
    own: OwnLayer,
    hidden: Tensor,
    context: RaggedContext,
    turning: Turning | None,
) -> Tensor:
    options: dict[str, Any] = {"attention_mask": None}
    if architecture_of(model.config).context_as_cache:
        options |= {"layer_past": ContextAsCache(context), "alibi": None}
    else:
        options |= {"ragged": context, "position_ids": context.where.positions[None]}
    if turning is not None:
        options["position_embeddings"] = turning.cosines[None], turning.sines[None]
    out = own.layer(hidden[None], **options)
    result: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return result


def _turning(model: PreTrainedModel, hidden: Tensor, context: RaggedContext) -> Turning | None:
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    positions = context.where.positions[None]
    cosines, sines = (each[0] for each in rotary(hidden[None], positions))
    growth = None
    if architecture_of(model.config).growing_queries:
        rope = model.config.rope_parameters
        beta, trained = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
        growth = (
            get_llama_4_attn_scale(positions, beta, trained)[0].transpose(0, 1).to(cosines.dtype)
        )
    return Turning(cosines, sines, growth)

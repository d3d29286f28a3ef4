"""The KV cache of a model's layers: which have keys and values, and of what sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import KVSharingDict

from actors.attention.delta.states import ConstantStates, delta_mixer, layers_with_states
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.stored import key_factors
from actors.stage.partial_model import architecture_of
from planner.model.tensor_parallel import RankShare
from quant.common.errors import SpecError
from quant.rounding.importance import LayerImportance

_WHOLE_HEADS = ("proportional",)
"""Types of rotary positions that pair channels at half the head's width, however few they turn."""


def make_cache(
    config: PretrainedConfig,
    layers: range,
    tokens: int,
    form: CacheForm,
    importance: Sequence[LayerImportance] | None = None,
    parked_tokens: int = 0,
) -> KVCache:
    """An empty KV cache of so many token slots for some decoder layers of the model of `config`.

    `importance`: one a layer, by whose keys 8-bit keys are rounded.
    """
    turns_neighbours, shares = architecture_of(config).turns_neighbours, form.shares
    sources = {layer: _source(config, layer, form.alone) for layer in layers}
    held = [slice(None)] * len(layers)
    if shares is not None:
        held = [slice(share.kv_heads.start, share.kv_heads.stop) for share in shares]
    factors = {
        layer: key_factors(own.keys[heads], rotary_width(config, sources[layer]), turns_neighbours)
        for layer, own, heads in zip(layers, importance or (), held, strict=False)
        if kv_shape(config, sources[layer]) is not None and not _rotated(config)
    }
    shape = cache_shape(config, layers, tokens, shares, form.alone)
    stateful, states = layers_with_states(config, layers), None
    if stateful:
        mixer = delta_mixer(config)
        if shares is not None:
            own = shares[stateful[0] - layers.start]
            mixer = replace(mixer, key_heads=len(own.kv_heads), value_heads=len(own.heads))
        states = ConstantStates(stateful, mixer, form.slots, form.dtype, form.device)
    return KVCache(layers, shape, form, parked_tokens, factors, states)


def cache_shape(
    config: PretrainedConfig,
    layers: range,
    tokens: int,
    shares: Sequence[RankShare] | None = None,
    alone: bool = False,
) -> CacheShape:
    """Room for `tokens` in the `layers` of the model of `config`, of which a rank holds `shares`
    (None: all); `alone` as in `CacheForm`.
    """
    held = {layer: kv_shape(config, _source(config, layer, alone)) for layer in layers}
    for layer, share in zip(layers, shares or (), strict=False):
        if (whole := held[layer]) is not None:
            held[layer] = len(share.kv_heads), whole[1]
    usual = next(filter(None, held.values()), (1, 1))
    others = {layer: heads for layer, heads in held.items() if heads != usual}
    reading = () if alone else layers
    owners = {layer: own for layer in reading if (own := _owner(config, layer)) is not None}
    apart = next((layer for layer, own in owners.items() if own not in layers), None)
    if apart is not None:
        raise SpecError(
            f"layer {apart} reads the keys and values of layer {owners[apart]}, which is not among "
            f"layers {layers.start} to {layers.stop - 1}; plan again, which keeps both together"
        )
    return CacheShape(tokens, *usual, others, owners, _rotated(config))


def _rotated(config: PretrainedConfig) -> int:
    """Numbers that positions rotate behind a latent, in models that hold those; 0: in others."""
    has_latents = getattr(config, "kv_lora_rank", None) is not None
    return int(config.qk_rope_head_dim) if has_latents else 0


def _owner(config: PretrainedConfig, layer: int) -> int | None:
    """The layer whose keys and values another one reads; None: its own, or none at all."""
    modes: Sequence[str | None] = getattr(config, "kv_sharing_modes", ())
    if "reuse" not in modes[layer : layer + 1]:
        return None
    types = config.layer_types
    holding = (n for n, mode in enumerate(modes) if mode == "store" and types[n] == types[layer])
    return next(holding)


def _source(config: PretrainedConfig, layer: int, alone: bool) -> int:
    """The layer whose sizes of keys count for `layer`."""
    owner = _owner(config, layer) if alone else None
    return layer if owner is None else owner


KeysByType = Mapping[str, tuple[Tensor, Tensor]]
"""Keys and values `[1, heads, tokens, width]` that later layers read, by type of layers."""


@dataclass(frozen=True)
class SharedKeys:
    """The keys and values that later layers read, as numbers of a token: heads and width of each
    type of layers. So they go from layer to layer where these are computed one by one.
    """

    sizes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, config: PretrainedConfig) -> SharedKeys:
        modes: Sequence[str | None] = getattr(config, "kv_sharing_modes", ())
        storing = [layer for layer, mode in enumerate(modes) if mode == "store"]
        found = {config.layer_types[layer]: kv_shape(config, layer) for layer in storing}
        return cls({kind: heads for kind, heads in found.items() if heads is not None})

    @property
    def numbers(self) -> int:
        return 2 * sum(heads * width for heads, width in self.sizes.values())

    def packed(self, held: KeysByType | KVSharingDict) -> Tensor:
        """The numbers `[tokens, numbers]`."""
        parts = (part for kind in self.sizes for part in held[kind])
        return torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts], -1)

    def unpacked(self, numbers: Tensor) -> KeysByType:
        """What `packed` was given."""
        each = [heads * width for heads, width in self.sizes.values() for _ in range(2)]
        parts = iter(numbers.split(each, -1))
        return {
            kind: (self._heads(next(parts), size), self._heads(next(parts), size))
            for kind, size in self.sizes.items()
        }

    def _heads(self, part: Tensor, size: tuple[int, int]) -> Tensor:
        heads: Tensor = part.unflatten(-1, size)
        return heads.transpose(0, 1)[None]


def kv_shape(config: PretrainedConfig, layer: int) -> tuple[int, int] | None:
    """Number of key and value heads of a layer of the model of `config`, and the width of each; one
    of latents with their rotated numbers. None where it has none of its own: a constant state, or
    what an earlier layer holds.
    """
    sharing = getattr(config, "kv_sharing_modes", None)
    if layers_with_states(config, range(layer, layer + 1)) or (
        sharing and sharing[layer] == "reuse"
    ):
        return None
    own = config.per_layer_config[layer] if config.is_heterogeneous else config
    if _rotated(own):
        return 1, own.kv_lora_rank + _rotated(own)
    heads = own.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
    return getattr(own, "num_key_value_heads", None) or heads, head_dim


def most_kv_heads(config: PretrainedConfig) -> int:
    """Key and value heads of the layer that has most of them."""
    shapes = (kv_shape(config, layer) for layer in range(config.num_hidden_layers))
    return max((shape[0] for shape in shapes if shape is not None), default=1)


def rotary_width(config: PretrainedConfig, layer: int) -> int:
    """Channels of a head that positions rotate, in a layer of the model of `config`: the first
    ones.
    """
    shape = kv_shape(config, layer)
    rotation = getattr(config, "rope_parameters", None)
    rotates = getattr(config, "no_rope_layers", None)
    if shape is None or not rotation or (rotates and not rotates[layer]):
        return 0
    types = getattr(config, "layer_types", None)
    if types and types[layer] in rotation:
        rotation = rotation[types[layer]] or {"partial_rotary_factor": 0.0}
    is_whole = rotation.get("rope_type") in _WHOLE_HEADS
    return int((1.0 if is_whole else rotation.get("partial_rotary_factor", 1.0)) * shape[1])

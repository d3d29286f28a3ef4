"""Gemma's families: norms before and behind each part of a layer, sliding layers beside full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.family import (
    FULL,
    GATED,
    SLIDING,
    STATIC_BY_TYPE,
    STATIC_ROTARY,
    ConfigKeys,
    Family,
    RotaryKeys,
    UnusedEntries,
    full_every,
    gated_shape,
    layer_types,
    mixed_shape,
    windowed_shape,
)
from planner.model.layer_parts import Experts
from planner.model.shape import MAX_SIZE, ModelShape
from quant.scheme import LinearShape

_LARGEST_CAP = 1e6
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
"""The defaults of transformers: files of Gemma 3 leave out what does not differ from them."""

_SIZES_2 = _SIZES | {"vocab_size": 256_000, "max_position_embeddings": 8192}
_SIZES_3 = _SIZES | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_SIZES_4 = _SIZES | {
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
_SIZES_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024}
_NOT_UNIFIED = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
_GLOBAL_HEAD_DIM = 512
_SLIDING_PATTERN = 6
_ALTERNATING = 2
_BOTH_WAYS = "use_bidirectional_attention"
_OF_LAYERS = ("num_key_value_heads", "head_dim")
"""Entries that a layer of Gemma 4 may have of its own."""

_READS, _KEYS_ALONE, _ASKS = ", reading earlier keys", ", keys alone", ", experts"
"""Said of kinds that hold no keys and values, that make values of their keys, that have experts."""


def _gemma2(config: ConfigFile) -> ModelShape:
    return _windowed(_with_defaults(config, _SIZES_2), _ALTERNATING)


def _gemma3(config: ConfigFile) -> ModelShape:
    full = _with_defaults(config, _SIZES_3)
    return _windowed(full, full.size("sliding_window_pattern", default=_SLIDING_PATTERN), True)


def _gemma4(config: ConfigFile) -> ModelShape:
    full = _with_defaults(config, _SIZES_4)
    types = layer_types(full, (FULL, SLIDING), full_every(_SLIDING_PATTERN, SLIDING))
    types = (*types[:-1], FULL)  # as transformers, whatever the file says
    owner, heads = _owners(full, types), _heads_by_layer(full, types)
    plain, wide = _gemma4_layer(full), full.flag("use_double_wide_mlp", False)
    values_are_keys = full.flag("attention_k_eq_v", False)

    @cache
    def made(kind: str, reads: bool, kv_heads: int, head_dim: int) -> ModelShape:
        is_full = kind == FULL
        keys_alone = values_are_keys and is_full and not reads
        return replace(
            plain,
            kind=f"{kind}{_READS * reads}{_KEYS_ALONE * keys_alone}{plain.kind}",
            kv_heads=kv_heads,
            head_dim=head_dim,
            sliding_window=None if is_full else full.size("sliding_window"),
            values_are_keys=keys_alone,
            reads_earlier_keys=reads,
            intermediate_size=plain.intermediate_size * (2 if wide and reads else 1),
        )

    layers = [made(kind, owner[i] != i, *heads[i]) for i, kind in enumerate(types)]
    shared = [range(o + 1, i + 1) for i, o in enumerate(owner) if o != i]
    joined = tuple(sorted({layer for each in shared for layer in each}))
    return replace(mixed_shape(layers, joined), kv_heads=max(each[0] for each in heads))


def _gemma4_unified(config: ConfigFile) -> ModelShape:
    """Gemma 4 12B: without what is added to each layer, and without experts."""
    values = {**_SIZES_UNIFIED, **config.values, **_NOT_UNIFIED}
    return _gemma4(replace(config, values=values))


def _gemma4_layer(config: ConfigFile) -> ModelShape:
    if (ways := config.values.get(_BOTH_WAYS)) not in (None, "vision"):  # tokens of images
        raise config.refusal(_BOTH_WAYS, ways, "vision or null for a model that generates text")
    _check_caps(config)
    width = config.integer("hidden_size_per_layer_input")
    if not 0 <= width <= MAX_SIZE:
        raise config.refusal("hidden_size_per_layer_input", width, f"0 to {MAX_SIZE}")
    key, rows = "vocab_size_per_layer_input", config.size("vocab_size")
    if config.integer(key) != rows and width:
        raise config.refusal(key, config.values[key], f"vocab_size, {rows}")
    hidden = config.size("hidden_size")
    experts = _experts(config) if config.flag("enable_moe_block", False) else None
    linears = (LinearShape(hidden, width), LinearShape(width, hidden)) if width else ()
    return gated_shape(
        config,
        _SIZES["head_dim"],
        default_bias=False,
        qk_norm=True,
        kind=_ASKS if experts else "",
        experts=experts,
        layer_norms=4 + bool(width) + (3 if experts else 0),
        extra_linears=linears,
        per_layer_width=width,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _experts(config: ConfigFile) -> Experts:
    """Read the experts that stand beside the MLP, which all tokens ask."""
    count, asked = config.size("num_experts"), config.size("top_k_experts")
    if asked > count:
        raise config.refusal("top_k_experts", asked, f"at most {count} (num_experts)")
    width = config.size("moe_intermediate_size")
    shared = config.size("intermediate_size")
    return Experts(count, asked, width, shared_width=shared, router_scales=True)


def _owners(config: ConfigFile, types: Sequence[str]) -> list[int]:
    """The layer whose keys and values each reads: itself, or the last own one of its type."""
    key, layers = "num_kv_shared_layers", len(types)
    count = config.integer(key)
    own = types[: layers - count]
    if not 0 <= count < layers or not {*types} <= {*own}:
        raise config.refusal(
            key, count, "such that every type of layers has one with keys of its own"
        )
    last = {kind: max(i for i, each in enumerate(own) if each == kind) for kind in {*own}}
    return [*range(len(own)), *(last[kind] for kind in types[len(own) :])]


def _heads_by_layer(config: ConfigFile, types: Sequence[str]) -> list[tuple[int, int]]:
    """Number and width of the heads of keys in each layer: in full layers others, by entries of
    their own or, as transformers 5 writes files, by layer.
    """
    usual = config.size("num_key_value_heads"), config.size("head_dim")
    given = config.values.get("per_layer_config")
    if given is None:
        width = config.size("global_head_dim", default=_GLOBAL_HEAD_DIM)
        count = usual[0]
        if config.flag("attention_k_eq_v", False):
            count = config.size("num_global_key_value_heads", default=count)
        return [(count, width) if kind == FULL else usual for kind in types]
    found = [usual] * len(types)
    for key, own in given.items() if isinstance(given, Mapping) else [("", given)]:
        if not (isinstance(own, Mapping) and key.isdecimal() and int(key) < len(types)):
            raise config.refusal("per_layer_config", given, "an object of objects by layer")
        if {*own} - {*_OF_LAYERS}:
            raise config.refusal(
                f"per_layer_config.{key}", dict(own), f"of {' and '.join(_OF_LAYERS)}"
            )
        values = {f"per_layer_config.{key}.{name}": value for name, value in own.items()}
        inner = replace(config, values=values)
        sizes = zip(_OF_LAYERS, usual, strict=True)
        count, width = (
            inner.size(f"per_layer_config.{key}.{name}", default=size) for name, size in sizes
        )
        found[int(key)] = count, width
    return found


def _with_defaults(config: ConfigFile, defaults: Mapping[str, Any]) -> ConfigFile:
    return replace(config, values={**defaults, **config.values})


def _windowed(config: ConfigFile, period: int, qk_norm: bool = False) -> ModelShape:
    """Read a shape whose every `period`-th layer attends to all tokens, where no list says it."""
    _check_scores(config)
    config.per_head(config.size("hidden_size"), config.size("num_attention_heads"))
    shape = gated_shape(
        config,
        _SIZES["head_dim"],
        default_bias=False,
        qk_norm=qk_norm,
        layer_norms=4,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
    types = layer_types(config, (FULL, SLIDING), full_every(period, SLIDING))
    return windowed_shape(shape, types, config.size("sliding_window"))


def _check_scores(config: ConfigFile) -> None:
    """Check what scores are scaled and capped by, and that tokens see earlier ones alone."""
    config.size("query_pre_attn_scalar")
    if config.values.get(_BOTH_WAYS) is not None and config.flag(_BOTH_WAYS, False):
        raise config.refusal(_BOTH_WAYS, True, "false or null for a model that generates text")
    _check_caps(config)


def _check_caps(config: ConfigFile) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = config.values.get(key)
        if value is not None and not (type(value) is float and is_number(value, 0, _LARGEST_CAP)):
            raise config.refusal(key, value, "a number above 0 with a decimal point, or null")


_FOUR_NORMS = replace(
    GATED,
    norms=(*GATED.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    logits_cap="final_logit_softcapping",
)
_Q, _K, _, _O = GATED.attention
_ATTENTION: Mapping[str, dict[str, Any]] = {
    "": {},
    _READS: {"attention": (_Q, _O)},
    _KEYS_ALONE: {"attention": (_Q, _K, _O)},
}
_NORMS: Mapping[str, dict[str, Any]] = {
    "": {},
    _ASKS: {
        "norms": (
            *_FOUR_NORMS.norms,
            *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
            "pre_feedforward_layernorm_2",
        )
    },
}
"""In what layers differ by what is said of their kind."""

_KEYS = ConfigKeys(activation="hidden_activation")

_KEYS_4 = replace(
    _KEYS,
    rotary=RotaryKeys(default_share=1.0, types=(*STATIC_ROTARY, "proportional"), by_type=True),
)

GEMMA_FAMILIES: Mapping[str, Family] = {
    "gemma2": Family(_gemma2, _FOUR_NORMS, _KEYS),
    "gemma4_text": Family(
        _gemma4,
        replace(
            _FOUR_NORMS,
            embedding=(
                *("embed_tokens", "embed_tokens_per_layer", "per_layer_model_projection"),
                "per_layer_projection_norm",
            ),
            layer_factor="layer_scalar",
            experts="experts",
            router="router.proj",
            kinds={
                f"{kind}{keys}{asks}": attention | norms
                for kind in (FULL, SLIDING)
                for keys, attention in _ATTENTION.items()
                for asks, norms in _NORMS.items()
            },
        ),
        replace(
            _KEYS_4,
            unused=UnusedEntries(
                counts=("moe_intermediate_size", "top_k_experts"), may_be_null=True
            ),
        ),
    ),
    "gemma4_unified_text": Family(
        _gemma4_unified,
        replace(
            _FOUR_NORMS,
            layer_factor="layer_scalar",
            kinds={
                f"{kind}{keys}": attention
                for kind in (FULL, SLIDING)
                for keys, attention in _ATTENTION.items()
            },
        ),
        _KEYS_4,
    ),
    "gemma3_text": Family(_gemma3, _FOUR_NORMS, replace(_KEYS, rotary=STATIC_BY_TYPE)),
}

"""Reads the shape of each supported architecture out of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.decoder_shape import ModelShape
from quant.errors import SpecError
from quant.gptq.config import CONFIG_KEY, parse_gptq_config

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_BLOOM_TRAINED_LENGTH = 2048  # ALiBi has no table; BLOOM was trained on 2,048 tokens


@dataclass(frozen=True)
class ConfigFile:
    """The parsed `config.json` of `name`, with checks at every read."""

    name: str
    values: Mapping[str, Any]

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set (older configs spell some differently)."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise SpecError(f"{self.name}: {key} is {value!r}; it must be a whole number")
            return value
        if default is None:
            raise SpecError(f"{self.name}: {' or '.join(keys)} is missing from its config.json")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """A true/false entry, or what the library takes when it is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.name}: {key} is {value!r}; it must be true or false")
        return value

    def per_head(self, width: int, heads: int) -> int:
        """`width` split over `heads`, which must come out even."""
        if heads < 1 or width % heads:
            raise SpecError(f"{self.name}: hidden size {width} cannot be split over {heads} heads")
        return width // heads


def shape_from_config(name: str, values: Mapping[str, Any]) -> ModelShape:
    """The shape that the parsed `config.json` of `name` describes.

    SpecError for mixture-of-experts models, for architectures outside `supported_model_types`, for
    quantized weights that cannot be read, and for missing or impossible entries.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError(f"{name}: its config.json names no model_type")
    config = ConfigFile(name, values)
    if "moe" in model_type or "mixtral" in model_type or _has_experts(config):
        raise SpecError(
            f"{name} ({model_type}) is a mixture-of-experts model, which llmpq does not plan yet; "
            "choose a dense one"
        )
    if model_type not in _READERS:
        raise SpecError(
            f"{name}: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(supported_model_types())}"
        )
    shape, quantization = _READERS[model_type](config), values.get(CONFIG_KEY)
    if quantization is None:
        return shape
    return replace(shape, stored=parse_gptq_config(quantization, name))


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that can be planned and run."""
    return tuple(sorted(_READERS))


def _has_experts(config: ConfigFile) -> bool:
    return any(config.integer(key, default=0) > 1 for key in _EXPERT_KEYS)


def _opt(config: ConfigFile) -> ModelShape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    norm_first = config.flag("do_layer_norm_before", True)
    bias = config.flag("enable_bias", True)
    positions = config.integer("max_position_embeddings")
    return ModelShape(
        name=config.name,
        model_type="opt",
        layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.integer("vocab_size"),
        max_positions=positions,
        position_rows=positions + 2,  # the library keeps two rows for padding
        word_embedding_size=config.integer("word_embed_proj_dim", default=hidden),
        gated_mlp=False,
        fused_qkv=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_parameters=2 * hidden * config.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_first and not config.flag("_remove_final_layer_norm", False),
        embedding_norm=False,
        qk_norm=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _bloom(config: ConfigFile) -> ModelShape:
    hidden = config.integer("n_embed", "hidden_size")
    heads = config.integer("n_head", "num_attention_heads")
    return ModelShape(
        name=config.name,
        model_type="bloom",
        layers=config.integer("n_layer", "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("seq_length", default=_BLOOM_TRAINED_LENGTH),
        position_rows=0,
        word_embedding_size=hidden,
        gated_mlp=False,
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_parameters=2 * hidden,
        final_norm=True,
        embedding_norm=True,
        qk_norm=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt_neox(config: ConfigFile) -> ModelShape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias = config.flag("attention_bias", True)
    return ModelShape(
        name=config.name,
        model_type="gpt_neox",
        layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        position_rows=0,
        word_embedding_size=hidden,
        gated_mlp=False,
        fused_qkv=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        norm_parameters=2 * hidden,
        final_norm=True,
        embedding_norm=False,
        qk_norm=False,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _llama(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return _gated(
        config,
        kv_heads=config.integer(
            "num_key_value_heads", default=config.integer("num_attention_heads")
        ),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: ConfigFile) -> ModelShape:
    return _gated(config, sliding_window=config.integer("sliding_window", default=0) or None)


def _qwen2(config: ConfigFile) -> ModelShape:
    return _gated(config, qkv_bias=True, sliding_window=_qwen_window(config))


def _qwen3(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return _gated(
        config,
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_window(config),
    )


def _qwen_window(config: ConfigFile) -> int | None:
    """The window where every layer has it; with full layers among them, plan for full attention."""
    if not config.flag("use_sliding_window", False):
        return None
    first_sliding = config.integer("max_window_layers", default=config.integer("num_hidden_layers"))
    return config.integer("sliding_window", default=0) or None if first_sliding == 0 else None


def _gated(
    config: ConfigFile,
    *,
    kv_heads: int | None = None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> ModelShape:
    """The LLaMA family: rotary positions, gated MLP, RMS norms, grouped key/value heads."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=default_head_dim or 0)
    return ModelShape(
        name=config.name,
        model_type=str(config.values["model_type"]),
        layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads or config.integer("num_key_value_heads"),
        head_dim=head_dim or config.per_head(hidden, heads),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        position_rows=0,
        word_embedding_size=hidden,
        gated_mlp=True,
        fused_qkv=False,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        norm_parameters=hidden,
        final_norm=True,
        embedding_norm=False,
        qk_norm=qk_norm,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        sliding_window=sliding_window,
    )


_READERS: dict[str, Callable[[ConfigFile], ModelShape]] = {
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

"""Reads the shape of each supported architecture out of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile
from planner.model.config_values import check_values
from planner.model.shape import MAX_LAYERS, ModelShape
from quant.checkpoint.gptq_config import CONFIG_KEY, parse_gptq_config
from quant.common.errors import SpecError

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_BLOOM_TRAINED_LENGTH = 2048  # ALiBi has no table; BLOOM was trained on 2,048 tokens


def shape_from_config(name: str, values: Mapping[str, Any], place: str | None = None) -> ModelShape:
    """The shape that the parsed `config.json` of `name` describes; `place` is the file's path.

    SpecError naming it for mixture-of-experts models, for architectures outside
    `supported_model_types`, for quantized weights that cannot be read, and for entries that are
    missing or that the model could not be run with.
    """
    config = ConfigFile(name, values, place or f"config.json of {name}")
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError(f"{config.place} names no model_type")
    if "moe" in model_type or "mixtral" in model_type or _has_experts(config):
        raise SpecError(
            f"{config.place}: {model_type:.40} is a mixture-of-experts model, which llmpq does not "
            "plan yet; choose a dense one"
        )
    if model_type not in _READERS:
        raise SpecError(
            f"{config.place}: model_type {model_type!r:.40} is not supported; "
            f"supported: {', '.join(supported_model_types())}"
        )
    shape, quantization = _shape(config, model_type), values.get(CONFIG_KEY)
    check_values(config, shape)
    if quantization is None:
        return shape
    return replace(shape, stored=parse_gptq_config(quantization, config.place))


def _shape(config: ConfigFile, model_type: str) -> ModelShape:
    try:
        return _READERS[model_type](config)
    except SpecError as error:
        where = "" if config.place in str(error) else f"{config.place}: "
        raise SpecError(f"{where}{error}") from error


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that can be planned and run."""
    return tuple(sorted(_READERS))


def _has_experts(config: ConfigFile) -> bool:
    return any(config.integer(key, default=0) > 1 for key in _EXPERT_KEYS)


def _opt(config: ConfigFile) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm_first = config.flag("do_layer_norm_before", True)
    removed = config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.size("max_position_embeddings")
    return ModelShape(
        name=config.name,
        model_type="opt",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=positions,
        position_rows=positions + 2,  # the library keeps two rows for padding
        word_embedding_size=config.size("word_embed_proj_dim", default=hidden),
        gated_mlp=False,
        fused_qkv=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_parameters=2 * hidden * config.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_first and not removed,
        embedding_norm=False,
        qk_norm=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _bloom(config: ConfigFile) -> ModelShape:
    hidden = config.size("n_embed", "hidden_size")
    heads = config.size("n_head", "num_attention_heads")
    return ModelShape(
        name=config.name,
        model_type="bloom",
        layers=config.size("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("seq_length", default=_BLOOM_TRAINED_LENGTH),
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
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.flag("attention_bias", True)
    return ModelShape(
        name=config.name,
        model_type="gpt_neox",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
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
    config.per_head(config.size("hidden_size"), config.size("num_attention_heads"))
    return _gated(
        config,
        kv_heads=config.size("num_key_value_heads", default=config.size("num_attention_heads")),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: ConfigFile) -> ModelShape:
    return _gated(config, sliding_window=_window(config))


def _qwen2(config: ConfigFile) -> ModelShape:
    return _gated(
        config,
        kv_heads=_qwen_heads(config),
        qkv_bias=True,
        sliding_window=_qwen_window(config),
    )


def _qwen3(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return _gated(
        config,
        kv_heads=_qwen_heads(config),
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_window(config),
    )


def _qwen_heads(config: ConfigFile) -> int | None:
    """Key/value heads where they are null: as many as others. None: as the configuration says."""
    is_null = (
        "num_key_value_heads" in config.values and config.values["num_key_value_heads"] is None
    )
    return config.size("num_attention_heads") if is_null else None


def _qwen_window(config: ConfigFile) -> int | None:
    """The window where every layer has it; with full layers among them, plan for full attention."""
    config.integer("sliding_window", default=0)
    if config.values.get("max_window_layers", 0) is None:
        raise config.refusal("max_window_layers", None, "a whole number")
    first_sliding = config.integer(
        "max_window_layers", default=config.size("num_hidden_layers", most=MAX_LAYERS)
    )
    is_used = config.flag("use_sliding_window", False)
    window = _window(config) if is_used else None
    return window if first_sliding == 0 else None


def _window(config: ConfigFile) -> int | None:
    return None if config.values.get("sliding_window") is None else config.size("sliding_window")


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
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    is_given = config.values.get("head_dim") is not None
    if default_head_dim is not None and "head_dim" in config.values and not is_given:
        raise config.refusal("head_dim", None, "a whole number, or left out")
    head_dim = config.size("head_dim") if is_given else default_head_dim
    return ModelShape(
        name=config.name,
        model_type=str(config.values["model_type"]),
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads or config.size("num_key_value_heads"),
        head_dim=head_dim or config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
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

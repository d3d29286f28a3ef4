"""The model families: how each reads its shape, and how transformers calls its modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.shape import MAX_LAYERS, MAX_SIZE, ModelShape
from quant.common.errors import SpecError


@dataclass(frozen=True)
class ConfigFile:
    name: str
    values: Mapping[str, Any]
    place: str

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
        return SpecError(f"{self.place}: {key} is {shown(value)}; it must be {needed}")

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int:
                raise self.refusal(key, value, "a whole number")
            return value
        if default is None:
            raise SpecError(f"{self.place}: {' or '.join(keys)} is missing")
        return default

    def size(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.integer(*keys, default=default)
        if not 1 <= value <= most:
            key = next((key for key in keys if self.values.get(key) is not None), keys[0])
            raise self.refusal(key, value, f"1 to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def per_head(self, width: int, heads: int) -> int:
        if heads < 1 or width % heads:
            raise SpecError(f"{self.place}: hidden size {width} cannot be split over {heads} heads")
        return width // heads


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether `value` is a finite number above `least` and at most `most`."""
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        return False
    return bool(least < value <= most)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class Architecture:
    """Names of a family's modules in transformers. `decoder` is the module whose children are
    `layers`, `embedding` (the first stage's, token embedding first) and `final` (the last stage's,
    final norm first). In a layer: `attention` (queries, keys, values or all fused, then output),
    `mlp` and its `activation`, `norms`. `head_names` are those of an untied head.
    `layer_returns_tuple`: hidden states come in a tuple; `context_as_cache`: a layer passes nothing
    but the KV cache on to attention.
    """

    decoder: str
    embedding: tuple[str, ...]
    final: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[str, str]
    activation: str = "mlp.act_fn"
    layers: str = "layers"
    head_names: tuple[str, ...] = ("lm_head",)
    layer_returns_tuple: bool = False
    context_as_cache: bool = False

    @property
    def layers_path(self) -> str:
        return f"{self.decoder}.{self.layers}"

    @property
    def base(self) -> str:
        """The base model's prefix, which checkpoints may lack."""
        return self.decoder.partition(".")[0]

    @property
    def embedding_path(self) -> str:
        return f"{self.decoder}.{self.embedding[0]}"


@dataclass(frozen=True)
class RotaryKeys:
    """Entries for rotary positions in older files: `share` of a head, or `default_share`."""

    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    default_share: float | None = None


@dataclass(frozen=True)
class UnusedEntries:
    """Entries that generation does not use, but of whose wrong types transformers builds no model:
    `flags`, `shares` (any number), `deviation` (with a decimal point), whole `counts`.
    """

    flags: tuple[str, ...] = ("use_cache",)
    shares: tuple[str, ...] = ("attention_dropout",)
    deviation: str = "initializer_range"
    counts: tuple[str, ...] = ()
    may_be_null: bool = False


@dataclass(frozen=True)
class ConfigKeys:
    """Entries checked beside the sizes; None where the family has none. `has_padding_row`: the
    embedding is built with `pad_token_id`.
    """

    activation: str | None = "hidden_act"
    norm_eps: str | None = "rms_norm_eps"
    rotary: RotaryKeys | None = RotaryKeys()
    has_padding_row: bool = True
    unused: UnusedEntries = UnusedEntries()


@dataclass(frozen=True)
class Family:
    """`read_shape` raises SpecError; `attention_bias` and `mlp_bias` are entries, None for none."""

    read_shape: Callable[[ConfigFile], ModelShape]
    architecture: Architecture
    keys: ConfigKeys = ConfigKeys()
    attention_bias: str | None = None
    mlp_bias: str | None = None


_TRAINED_LENGTH = 2048
"""ALiBi has no table of positions; BLOOM was trained on 2,048 tokens."""

_ACTIVATION_BUFFERS = 2
"""The library writes BLOOM's GELU out in terms of which two more are of the MLP's width."""

_QWEN3_HEAD_DIM = 128
"""The default of transformers."""

_GATED = Architecture(
    decoder="model",
    embedding=("embed_tokens",),
    final=("norm",),
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    norms=("input_layernorm", "post_attention_layernorm"),
)


def _shape(config: ConfigFile, **own: Any) -> ModelShape:
    hidden = own["hidden_size"] = own.get("hidden_size") or config.size("hidden_size")
    heads = own["heads"] = own.get("heads") or config.size("num_attention_heads")
    usual: dict[str, Callable[[], Any]] = {
        "layers": lambda: config.size("num_hidden_layers", most=MAX_LAYERS),
        "intermediate_size": lambda: config.size("intermediate_size"),
        "kv_heads": lambda: heads,
        "head_dim": lambda: config.per_head(hidden, heads),
        "vocab_size": lambda: config.size("vocab_size"),
        "max_positions": lambda: config.size("max_position_embeddings"),
        "word_embedding_size": lambda: hidden,
        "norm_parameters": lambda: 2 * hidden,
        "tied_embeddings": lambda: config.flag("tie_word_embeddings", False),
    }
    read = {name: value() for name, value in usual.items() if name not in own}
    return ModelShape(name=config.name, model_type=str(config.values["model_type"]), **read, **own)


def _gated_shape(config: ConfigFile, default_head_dim: int | None = None, **own: Any) -> ModelShape:
    """Read a LLaMA-like shape; `default_head_dim` None: hidden size over heads."""
    hidden = config.size("hidden_size")
    own["heads"] = config.size("num_attention_heads")
    is_given = config.values.get("head_dim") is not None
    if default_head_dim is not None and "head_dim" in config.values and not is_given:
        raise config.refusal("head_dim", None, "a whole number, or left out")
    if is_given or default_head_dim is not None:
        own["head_dim"] = config.size("head_dim", default=default_head_dim)
    if own.get("kv_heads") is None:
        own["kv_heads"] = config.size("num_key_value_heads")
    return _shape(config, gated_mlp=True, norm_parameters=hidden, **own)


def _sliding_window(config: ConfigFile) -> int | None:
    return None if config.values.get("sliding_window") is None else config.size("sliding_window")


def _llama(config: ConfigFile) -> ModelShape:
    heads = config.size("num_attention_heads")
    config.per_head(config.size("hidden_size"), heads)
    bias = config.flag("attention_bias", False)
    return _gated_shape(
        config,
        kv_heads=config.size("num_key_value_heads", default=heads),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _mistral(config: ConfigFile) -> ModelShape:
    return _gated_shape(config, sliding_window=_sliding_window(config))


def _qwen2(config: ConfigFile) -> ModelShape:
    heads, window = _qwen_kv_heads(config), _qwen_window(config)
    return _gated_shape(config, kv_heads=heads, qkv_bias=True, sliding_window=window)


def _qwen3(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return _gated_shape(
        config,
        _QWEN3_HEAD_DIM,
        kv_heads=_qwen_kv_heads(config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_qwen_window(config),
    )


def _qwen_kv_heads(config: ConfigFile) -> int | None:
    is_null = config.values.get("num_key_value_heads", 0) is None
    return config.size("num_attention_heads") if is_null else None


def _qwen_window(config: ConfigFile) -> int | None:
    """Return the window where every layer has it; with full layers among them, None."""
    config.integer("sliding_window", default=0)
    if config.values.get("max_window_layers", 0) is None:
        raise config.refusal("max_window_layers", None, "a whole number")
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    first_sliding = config.integer("max_window_layers", default=layers)
    is_used = config.flag("use_sliding_window", False)
    window = _sliding_window(config) if is_used else None
    return window if first_sliding == 0 else None


def _bloom(config: ConfigFile) -> ModelShape:
    hidden = config.size("n_embed", "hidden_size")
    return _shape(
        config,
        layers=config.size("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=config.size("n_head", "num_attention_heads"),
        max_positions=config.size("seq_length", default=_TRAINED_LENGTH),
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        alibi=True,
        activation_buffers=_ACTIVATION_BUFFERS,
    )


def _gpt_neox(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", True)
    return _shape(config, fused_qkv=True, qkv_bias=bias, output_bias=bias, mlp_bias=True)


def _opt(config: ConfigFile) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm_first = config.flag("do_layer_norm_before", True)
    removed = config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.size("max_position_embeddings")
    return _shape(
        config,
        intermediate_size=config.size("ffn_dim"),
        heads=heads,
        position_rows=positions + 2,  # the library keeps two rows for padding
        word_embedding_size=config.size("word_embed_proj_dim", default=hidden),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_parameters=2 * hidden * config.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_first and not removed,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


_BLOOM = Family(
    _bloom,
    # Its attention does not call the attention interface: `actors.stage.partial_model` replaces it.
    Architecture(
        decoder="transformer",
        layers="h",
        embedding=("word_embeddings", "word_embeddings_layernorm"),
        final=("ln_f",),
        attention=("self_attention.query_key_value", "self_attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
        activation="mlp.gelu_impl",
        layer_returns_tuple=True,
        context_as_cache=True,
    ),
    ConfigKeys(
        activation=None,
        norm_eps="layer_norm_epsilon",
        rotary=None,
        has_padding_row=False,
        unused=UnusedEntries(
            flags=("use_cache", "apply_residual_connection_post_layernorm", "slow_but_exact"),
            shares=("attention_dropout", "hidden_dropout"),
            counts=("pretraining_tp",),
        ),
    ),
)

_GPT_NEOX = Family(
    _gpt_neox,
    Architecture(
        decoder="gpt_neox",
        embedding=("embed_in",),
        final=("final_layer_norm",),
        attention=("attention.query_key_value", "attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
        activation="mlp.act",
        head_names=("lm_head", "embed_out"),
    ),
    ConfigKeys(
        norm_eps="layer_norm_eps",
        rotary=RotaryKeys(theta="rotary_emb_base", share="rotary_pct", default_share=0.25),
        has_padding_row=False,
        unused=UnusedEntries(
            flags=("use_cache", "is_decoder", "use_parallel_residual"),
            shares=("attention_dropout", "hidden_dropout", "classifier_dropout"),
        ),
    ),
    attention_bias="attention_bias",
)

_OPT = Family(
    _opt,
    Architecture(
        decoder="model.decoder",
        embedding=("embed_tokens", "embed_positions", "project_in"),
        final=("final_layer_norm", "project_out"),
        attention=(*_GATED.attention[:3], "self_attn.out_proj"),
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        activation="activation_fn",
    ),
    ConfigKeys(
        activation="activation_function",
        norm_eps=None,
        rotary=None,
        unused=UnusedEntries(
            shares=("attention_dropout", "dropout", "layerdrop"), deviation="init_std"
        ),
    ),
    attention_bias="enable_bias",
    mlp_bias="enable_bias",
)

_LLAMA = Family(
    _llama,
    _GATED,
    ConfigKeys(unused=UnusedEntries(counts=("pretraining_tp",), may_be_null=True)),
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
)

FAMILIES: Mapping[str, Family] = {
    "bloom": _BLOOM,
    "gpt_neox": _GPT_NEOX,
    "llama": _LLAMA,
    "mistral": Family(_mistral, _GATED),
    "opt": _OPT,
    "qwen2": Family(_qwen2, _GATED),
    "qwen3": Family(_qwen3, _GATED, attention_bias="attention_bias"),
}
"""The families by `model_type`. Stages cut the forward pass of transformers between layers. Tests
compare their tokens with those of `generate` for each of these families: others may lose
information at a cut without any error."""


def supported_model_types() -> tuple[str, ...]:
    return tuple(sorted(FAMILIES))

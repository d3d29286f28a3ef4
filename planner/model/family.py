"""What a model family is: how its shape is read, which modules it has, what is checked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.model.config_file import ConfigFile, is_number, shown
from planner.model.layer_parts import Experts
from planner.model.shape import MAX_LAYERS, ModelShape
from quant.common.errors import SpecError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Values of `layer_types`, by which kinds of layers are named too."""

LONG_TYPES = ("longrope", "su")
"""Longrope by its names: a stage takes one of its two sets of frequencies by the longest request
that is planned for."""

_LARGEST_MULTIPLIER = 1e6


@dataclass(frozen=True)
class Architecture:
    """Names of a family's modules in transformers. `decoder` is the module whose children are
    `layers`, `embedding` (the first stage's, token embedding first) and `final` (the last stage's,
    final norm first). In a layer: `attention` (queries, keys, values or all fused, then output),
    `mlp` and its `activation`, `norms`. `head_names` are those of an untied head.
    `layer_returns_tuple`: hidden states come in a tuple; `context_as_cache`: a layer passes nothing
    but the KV cache on to attention. `experts`: the module that has those of a layer, fused or as
    many MLPs, `router` the linear that chooses among them, `shared_gate` one that weighs what all
    tokens ask, which stands in `mlp`; `experts_by_inputs`: the fused ones are stored inputs first,
    with gate and up by turns. `kinds`: in what layers of a kind differ, by `ModelShape.kind`.
    `qkv_in_blocks`: fused queries come before keys and these before values, rather than those of
    one head before those of the next. `turns_neighbours`: positions rotate channels side by side
    into each other, rather than those at half the distance. `growing_queries`: multiplied by more,
    the later they stand.
    `input_multiplier`: the decoder's attribute by which it multiplies what comes in, as the first
    stage alone may do. Logits are divided by the entry `logits_divisor` of the configuration, then
    capped by `logits_cap`. `layer_factor`: a number by which a layer multiplies what comes out of
    it. `predictor`: a linear that only those layers of a checkpoint have, after the others, that
    predict tokens further ahead, and are not run.
    """

    decoder: str
    embedding: tuple[str, ...]
    final: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[str, ...]
    activation: str = "mlp.act_fn"
    layers: str = "layers"
    head_names: tuple[str, ...] = ("lm_head",)
    layer_returns_tuple: bool = False
    context_as_cache: bool = False
    experts: str | None = None
    router: str | None = None
    shared_gate: str | None = None
    experts_by_inputs: bool = False
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    qkv_in_blocks: bool = False
    turns_neighbours: bool = False
    growing_queries: bool = False
    input_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None
    layer_factor: str | None = None
    predictor: str | None = None

    def of_kind(self, kind: str) -> Architecture:
        return replace(self, **self.kinds[kind]) if kind in self.kinds else self

    @property
    def linears(self) -> frozenset[str]:
        """Names of the linears that have the bits of their layer, of all kinds."""
        each = (self, *(self.of_kind(kind) for kind in self.kinds))
        return frozenset(name for own in each for name in (*own.attention, *own.mlp))

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
    """Entries for rotary positions in older files: `share` of a head, or `default_share`. `types`
    that the family has; None: all whose frequencies depend on a token's position alone. `by_type`:
    each type of layers has its own entries.
    """

    theta: str = "rope_theta"
    share: str = "partial_rotary_factor"
    default_share: float | None = None
    types: tuple[str, ...] | None = None
    by_type: bool = False


@dataclass(frozen=True)
class UnusedEntries:
    """Entries that generation does not use, but of whose wrong types transformers builds no model:
    `flags`, `shares` (any number), `deviation` and `decimals` (with a decimal point), whole
    `counts`.
    """

    flags: tuple[str, ...] = ("use_cache",)
    shares: tuple[str, ...] = ("attention_dropout",)
    deviation: str = "initializer_range"
    decimals: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    may_be_null: bool = False


@dataclass(frozen=True)
class ConfigKeys:
    """Entries checked beside the sizes; None where the family has none. `has_padding_row`: the
    embedding is built with `pad_token_id`. `layer_types`: what a list of them may say.
    """

    activation: str | None = "hidden_act"
    norm_eps: str | None = "rms_norm_eps"
    rotary: RotaryKeys | None = RotaryKeys()
    has_padding_row: bool = True
    layer_types: tuple[str, ...] = (FULL, SLIDING)
    unused: UnusedEntries = UnusedEntries()


@dataclass(frozen=True)
class Family:
    """`read_shape` raises SpecError; `attention_bias` and `mlp_bias` are entries, None for none.
    `own_layers`: whether `actors.stage.layers.own_layers` computes what its layers do.
    """

    read_shape: Callable[[ConfigFile], ModelShape]
    architecture: Architecture
    keys: ConfigKeys = ConfigKeys()
    attention_bias: str | None = "attention_bias"
    mlp_bias: str | None = None
    own_layers: bool = False


GATED = Architecture(
    decoder="model",
    embedding=("embed_tokens",),
    final=("norm",),
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    norms=("input_layernorm", "post_attention_layernorm"),
)

ASKING: Mapping[str, Any] = {
    "experts": "mlp.experts",
    "router": "mlp.gate",
    "activation": "mlp.experts.act_fn",
}
"""How most families call what layers with experts have."""

ONE_MLP: Mapping[str, Any] = {
    "mlp": GATED.mlp,
    "activation": GATED.activation,
    "experts": None,
    "router": None,
}
"""What layers of kind `DENSE` have, in models whose others have experts."""

DENSE = "dense"
STATIC_ROTARY = ("default", "linear", "yarn", "llama3")
STATIC_BY_TYPE = RotaryKeys(types=STATIC_ROTARY, by_type=True)


def plain_shape(config: ConfigFile, **own: Any) -> ModelShape:
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


def gated_shape(
    config: ConfigFile,
    default_head_dim: int | None = None,
    default_bias: bool | None = None,
    **own: Any,
) -> ModelShape:
    """Read a LLaMA-like shape. `default_head_dim` None: hidden size over heads. `default_bias`: of
    all projections of attention, where `attention_bias` is left out; None: as `own` says.
    """
    hidden = config.size("hidden_size")
    if default_bias is not None:
        own["qkv_bias"] = own["output_bias"] = config.flag("attention_bias", default_bias)
    own["heads"] = config.size("num_attention_heads")
    is_given = config.values.get("head_dim") is not None
    if default_head_dim is not None and "head_dim" in config.values and not is_given:
        raise config.refusal("head_dim", None, "a whole number, or left out")
    if is_given or default_head_dim is not None:
        own["head_dim"] = config.size("head_dim", default=default_head_dim)
    if own.get("kv_heads") is None:
        own["kv_heads"] = config.size("num_key_value_heads")
    return plain_shape(config, gated_mlp=True, norm_parameters=hidden, **own)


def multiplier(config: ConfigFile, key: str) -> float:
    value = config.values.get(key, 1.0)
    if not is_number(value, 0, _LARGEST_MULTIPLIER):
        raise config.refusal(key, value, "a number above 0, or left out")
    return float(value)


def kv_heads_or_all(config: ConfigFile, may_lack: bool = False) -> int | None:
    """All heads where their number is null, or may be and is left out; None where told."""
    is_null = config.values.get("num_key_value_heads", None if may_lack else 0) is None
    return config.size("num_attention_heads") if is_null else None


def window_of(config: ConfigFile) -> int | None:
    return None if config.values.get("sliding_window") is None else config.size("sliding_window")


def window_if_used(config: ConfigFile) -> int | None:
    """The window of a family whose files may have one that is switched off."""
    config.integer("sliding_window", default=0)
    return window_of(config) if config.flag("use_sliding_window", False) else None


def layer_types(
    config: ConfigFile, known: tuple[str, ...], usual: Callable[[int], str]
) -> tuple[str, ...]:
    """Read the type of each layer; `usual` tells it where the file lists none."""
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    given = config.values.get("layer_types")
    if given is None:
        return tuple(usual(index) for index in range(layers))
    check_layer_types(config, given, known, layers)
    return tuple(given)


def full_every(period: int, other: str) -> Callable[[int], str]:
    """The type of each layer where every `period`-th one attends to all tokens."""
    return lambda layer: other if (layer + 1) % period else FULL


def check_layer_types(config: ConfigFile, given: Any, known: tuple[str, ...], layers: int) -> None:
    if not isinstance(given, list) or len(given) != layers:
        needed = f"a list of {layers} (num_hidden_layers) of {' and '.join(known)}, or left out"
        length = f"a list of {len(given)}" if isinstance(given, list) else shown(given)
        raise SpecError(f"{config.entry('layer_types')} is {length}; it must be {needed}")
    for index, each in enumerate(given):
        if each not in known:
            raise config.refusal(f"layer_types[{index}]", each, f"one of {', '.join(known)}")


def windowed_shape(shape: ModelShape, types: Sequence[str], window: int | None) -> ModelShape:
    """Make the shape of a model like `shape`, whose layers of type `SLIDING` attend to `window`
    tokens, and all others to all tokens; of two kinds where it has both.
    """
    windows = [window if each == SLIDING else None for each in types]
    if len({*windows}) == 1:
        return replace(shape, sliding_window=windows[0])
    both = dict(zip(types, windows, strict=True))
    made = {kind: replace(shape, kind=kind, sliding_window=each) for kind, each in both.items()}
    return mixed_shape([made[each] for each in types])


def mixed_shape(layers: Sequence[ModelShape], joined: tuple[int, ...] = ()) -> ModelShape:
    """Make the shape of a model of these layers, each the shape of a model with only such layers.
    Equal ones are one kind, and one kind is a plain shape. What the model as a whole is said to
    have is that of the layers which see most tokens.
    """
    found = {id(layer): layer for layer in layers}  # as comparing two takes long
    kinds = tuple(dict.fromkeys(found.values()))
    if len(kinds) == 1:
        return replace(kinds[0], joined=joined)
    widest = max(kinds, key=lambda kind: (kind.kv_width > 0, kind.sliding_window is None))
    place = {each: kinds.index(layer) for each, layer in found.items()}
    pattern = tuple(place[id(layer)] for layer in layers)
    return replace(widest, kind="", kinds=kinds, pattern=pattern, joined=joined)


_EXPERT_COUNT = ("num_experts", "num_local_experts")
_EXPERTS_ASKED = "num_experts_per_tok"
_COUNT_OF_OTHERS = ("n_routed_experts", "moe_num_experts")
"""How other families call the number of experts."""


def says_experts(config: ConfigFile, is_known: bool) -> bool:
    """Whether a file has experts: by their number, and by name in an unknown family."""
    counts = (config.integer(key, default=0) for key in (*_EXPERT_COUNT, *_COUNT_OF_OTHERS))
    by_name = not is_known and "moe" in str(config.values["model_type"])
    return by_name or any(count > 1 for count in counts)


def experts_of(
    config: ConfigFile, width_key: str, count_keys: tuple[str, ...] = _EXPERT_COUNT, **own: Any
) -> Experts:
    refuse_nulls(config, *count_keys)
    count, per_token = config.size(*count_keys), config.size(_EXPERTS_ASKED)
    if per_token > count:
        key = next(key for key in count_keys if config.values.get(key) is not None)
        raise config.refusal(_EXPERTS_ASKED, per_token, f"at most {count} ({key})")
    return Experts(count, per_token, config.size(width_key), **own)


def refuse_nulls(config: ConfigFile, *keys: str) -> None:
    """Raise SpecError where one of `keys` is there without a value, as transformers does."""
    for key in keys:
        if config.values.get(key, 0) is None:
            raise config.refusal(key, None, "a whole number, or left out")


def expert_keys(
    *flags: str,
    share: float | None = None,
    decimals: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
) -> ConfigKeys:
    """The entries of a family with experts; `share` of a head is rotated, None: all of it."""
    return ConfigKeys(
        rotary=RotaryKeys(default_share=share),
        unused=UnusedEntries(
            flags=("use_cache", "output_router_logits", *flags),
            decimals=("router_aux_loss_coef", *decimals),
            counts=counts,
        ),
    )

"""Families whose layers have experts: Mixtral, OLMoE, Granite's and gpt-oss, and those with an
expert that all tokens ask and dense layers before the others: GLM-4.5 and 4.6, and those with
latent attention (DeepSeek-V2 and V3, GLM-4.7-Flash, Mistral Small 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.family import (
    ASKING,
    DENSE,
    FULL,
    GATED,
    ONE_MLP,
    SLIDING,
    Family,
    expert_keys,
    experts_of,
    gated_shape,
    kv_heads_or_all,
    layer_types,
    mixed_shape,
    plain_shape,
    refuse_nulls,
    window_of,
)
from planner.model.gated_families import GRANITE, granite_shape, growing_scores
from planner.model.layer_parts import LatentAttention
from planner.model.shape import ModelShape

_HEAD_DIM = 64
"""The default of transformers for gpt-oss."""

_LARGEST_CLIP = 1e6
_COUNT = "num_local_experts"


def _gpt_oss(config: ConfigFile) -> ModelShape:
    refuse_nulls(config, "num_key_value_heads")
    full = gated_shape(
        config,
        _HEAD_DIM,
        default_bias=True,
        kind=FULL,
        kv_heads=kv_heads_or_all(config, may_lack=True),
        sinks=True,
        experts=experts_of(config, "intermediate_size", has_biases=True),
    )
    sliding = replace(full, kind=SLIDING, sliding_window=window_of(config))
    types = layer_types(config, (FULL, SLIDING), lambda layer: FULL if layer % 2 else SLIDING)
    return mixed_shape([sliding if kind == SLIDING else full for kind in types])


def _mixtral(config: ConfigFile) -> ModelShape:
    return gated_shape(
        config,
        sliding_window=window_of(config),
        experts=experts_of(config, "intermediate_size", (_COUNT, "num_experts")),
    )


def _olmoe(config: ConfigFile) -> ModelShape:
    clip = config.values.get("clip_qkv")
    if clip is not None and not (type(clip) is float and is_number(clip, 0, _LARGEST_CLIP)):
        raise config.refusal("clip_qkv", clip, "a number above 0 with a decimal point, or null")
    shape = gated_shape(
        config,
        default_bias=False,
        kv_heads=kv_heads_or_all(config, may_lack=True),
        experts=experts_of(config, "intermediate_size"),
    )
    if shape.query_width != shape.hidden_size:
        usual = shape.hidden_size // shape.heads
        raise config.refusal("head_dim", shape.head_dim, f"{usual}, hidden_size over heads")
    return replace(shape, qk_norm_width=shape.query_width + shape.kv_width)


def _granitemoe(config: ConfigFile) -> ModelShape:
    return granite_shape(config, experts=experts_of(config, "intermediate_size", (_COUNT,)))


def _granitemoeshared(config: ConfigFile) -> ModelShape:
    shared = config.size("shared_intermediate_size")
    experts = experts_of(config, "intermediate_size", (_COUNT,), shared_width=shared)
    return granite_shape(config, experts=experts, fused_mlp=True)


_GRANITE = replace(
    GRANITE,
    mlp=(),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    activation="block_sparse_moe.experts.act_fn",
)

_DIRECT = "direct queries"
"""Said of kinds whose queries have no latent."""

_ROTARY_SHARE = 0.5
"""The default of transformers."""

_ROUTED = "n_routed_experts"
_FIRSTDENSE, _BY_LAYER = "first_k_dense_replace", "mlp_layer_types"
_SPARSE = "sparse"


def _glm4_moe(config: ConfigFile) -> ModelShape:
    plain = gated_shape(
        config,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    return _with_experts(config, plain, _first_dense(config, plain.layers, 1), groups=(1, 1))


def _with_experts(
    config: ConfigFile,
    plain: ModelShape,
    dense: Sequence[bool],
    groups: tuple[int, int],
    router_bias: bool = True,
) -> ModelShape:
    """Make the shape of a model of layers like `plain` where they are `dense`, and others with
    experts; `groups`: how many there are, and of how many experts are chosen, where the file does
    not say.
    """
    width = config.size("moe_intermediate_size")
    refuse_nulls(config, "n_shared_experts")
    shared = width * config.size("n_shared_experts", default=1)
    experts = experts_of(
        config,
        "moe_intermediate_size",
        count_keys=(_ROUTED,),
        shared_width=shared,
        router_bias=router_bias,
    )
    _check_groups(config, experts.count, experts.per_token, groups)
    sparse = replace(plain, experts=experts, intermediate_size=width)
    one = replace(plain, kind=", ".join(filter(None, (plain.kind, DENSE))))
    return mixed_shape([one if each else sparse for each in dense])


def _first_dense(config: ConfigFile, layers: int, usual: int) -> list[bool]:
    """Whether each layer has one MLP, where the first ones do."""
    refuse_nulls(config, _FIRSTDENSE)
    first = config.integer(_FIRSTDENSE, default=usual)
    return [layer < first for layer in range(layers)]


def _check_groups(config: ConfigFile, experts: int, per_token: int, usual: tuple[int, int]) -> None:
    """Refuse groups that the router cannot choose of: it adds the two best scores of each."""
    groups = config.size("n_group", default=usual[0])
    chosen = config.size("topk_group", default=usual[1])
    if experts % groups or experts // groups < 2:
        least = f"such that {experts} ({_ROUTED}) are whole groups of two or more"
        raise config.refusal("n_group", groups, least)
    if chosen > groups:
        raise config.refusal("topk_group", chosen, f"at most {groups} (n_group)")
    if per_token > chosen * (experts // groups):
        most = f"at most {chosen * (experts // groups)}, the experts of topk_group groups"
        raise config.refusal("num_experts_per_tok", per_token, most)


def _deepseek_v2(config: ConfigFile) -> ModelShape:
    method = config.values.get("topk_method", _GREEDY)
    if method not in (_GREEDY, _IN_GROUPS):
        raise config.refusal("topk_method", method, f"{_GREEDY} or {_IN_GROUPS}")
    _check_only(config, "scoring_func", "softmax")
    _check_only(config, "norm_topk_prob", False)
    _check_only(config, "mlp_bias", False)
    if method == _IN_GROUPS:
        refuse_nulls(config, "n_group", "topk_group")
    plain = _latent_shape(config)
    dense = _first_dense(config, plain.layers, 0)
    return _with_experts(config, plain, dense, (1, 1), router_bias=False)


def _deepseek_v3(config: ConfigFile) -> ModelShape:
    _check_sigmoid(config)
    plain = _latent_shape(config)
    return _with_experts(config, plain, _first_dense(config, plain.layers, 3), groups=(8, 4))


def _glm4_moe_lite(config: ConfigFile) -> ModelShape:
    _check_sigmoid(config)
    refuse_nulls(config, "n_group", "topk_group", "num_key_value_heads")
    _check_only(config, "head_dim", config.size("qk_rope_head_dim"))
    plain = _latent_shape(config)
    given = config.values.get(_BY_LAYER)
    if given is None:
        _check_only(config, _FIRSTDENSE, 1)
        given = [DENSE] + [_SPARSE] * (plain.layers - 1)
    known = isinstance(given, list) and all(each in (DENSE, _SPARSE) for each in given)
    if not known or len(given) != plain.layers:
        needed = f"{plain.layers} (num_hidden_layers) of {DENSE} and {_SPARSE}, or left out"
        raise config.refusal(_BY_LAYER, given, needed)
    return _with_experts(config, plain, [each == DENSE for each in given], groups=(1, 1))


def _mistral4(config: ConfigFile) -> ModelShape:
    key, entries = growing_scores(config)
    refuse_nulls(config, "n_group", "topk_group", "num_key_value_heads")
    plain = _latent_shape(config)
    turning = config.size("qk_rope_head_dim")
    width, share = turning + config.size("qk_nope_head_dim"), entries.get(_SHARE)
    if share is not None and not (is_number(share, 0, 1) and int(width * share) == turning):
        needed = f"{turning / width}, qk_rope_head_dim of a head of {width}, or left out"
        raise config.refusal(f"{key}.{_SHARE}", share, needed)
    dense = _first_dense(config, plain.layers, 0)
    return _with_experts(config, plain, dense, (1, 1), router_bias=False)


_SHARE = "partial_rotary_factor"
_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def _check_sigmoid(config: ConfigFile) -> None:
    _check_only(config, "topk_method", "noaux_tc")
    _check_only(config, "scoring_func", "sigmoid")


def _check_only(config: ConfigFile, key: str, known: Any) -> None:
    """Refuse an entry with which transformers would compute other things than the file says."""
    value = config.values.get(key, known)
    if value != known or type(value) is not type(known):
        raise config.refusal(key, value, f"{known!r} for {config.values['model_type']}")


def _latent_shape(config: ConfigFile) -> ModelShape:
    """Read the shape of layers with latent attention and one MLP."""
    _check_only(config, "attention_bias", False)
    _check_only(config, "moe_layer_freq", 1)
    heads = config.size("num_attention_heads")
    if config.size("num_key_value_heads", default=heads) != heads:
        given = config.values["num_key_value_heads"]
        raise config.refusal("num_key_value_heads", given, f"{heads} (num_attention_heads)")
    if "q_lora_rank" not in config.values:
        raise config.refusal("q_lora_rank", "left out", "a whole number, or null")
    is_direct = config.values["q_lora_rank"] is None
    turning = config.size("qk_rope_head_dim")
    config.integer("head_dim", default=turning)  # which transformers puts there
    if turning % 2:
        raise config.refusal("qk_rope_head_dim", turning, "an even number")
    latent = LatentAttention(
        rank=config.size("kv_lora_rank"),
        rotary_width=turning,
        plain_width=config.size("qk_nope_head_dim"),
        value_width=config.size("v_head_dim"),
        query_rank=0 if is_direct else config.size("q_lora_rank"),
    )
    return plain_shape(
        config,
        heads=heads,
        kv_heads=1,
        head_dim=latent.held_width,
        gated_mlp=True,
        norm_parameters=config.size("hidden_size"),
        kind=_DIRECT if is_direct else "",
        latent=latent,
    )


_GROUPED = replace(
    GATED,
    **ASKING,
    mlp=tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    predictor="eh_proj",
    kinds={DENSE: ONE_MLP},
)


def _attention(*queries: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}" for name in (*queries, "kv_a_proj_with_mqa", "o_proj"))


_DIRECT_QUERIES: Mapping[str, Any] = {"attention": _attention("q_proj")}
_LATENT = replace(
    _GROUPED,
    attention=_attention("q_a_proj", "q_b_proj"),
    kinds={
        DENSE: ONE_MLP,
        _DIRECT: _DIRECT_QUERIES,
        f"{_DIRECT}, {DENSE}": {**_DIRECT_QUERIES, **ONE_MLP},
    },
)


def _latent_family(
    read_shape: Callable[[ConfigFile], ModelShape],
    flags: tuple[str, ...] = ("rope_interleave",),
    decimals: tuple[str, ...] = (),
    share: float | None = None,
) -> Family:
    keys = expert_keys(
        "norm_topk_prob",
        *flags,
        share=share,
        decimals=("routed_scaling_factor", *decimals),
        counts=("num_nextn_predict_layers", "num_mtp_layers", "pretraining_tp"),
    )
    return Family(read_shape, _LATENT, keys, None)


EXPERT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": _latent_family(_deepseek_v2, (), ("attention_dropout",)),
    "deepseek_v3": _latent_family(_deepseek_v3),
    "glm4_moe": Family(
        _glm4_moe,
        _GROUPED,
        expert_keys(
            "norm_topk_prob",
            share=_ROTARY_SHARE,
            decimals=("routed_scaling_factor",),
            counts=("num_nextn_predict_layers", "num_mtp_layers"),
        ),
    ),
    "glm4_moe_lite": _latent_family(_glm4_moe_lite),
    "gpt_oss": Family(
        _gpt_oss,
        replace(GATED, mlp=(), experts="mlp.experts", router="mlp.router", experts_by_inputs=True),
        expert_keys(decimals=("swiglu_alpha", "swiglu_limit")),
    ),
    "granitemoe": Family(_granitemoe, _GRANITE, expert_keys()),
    "granitemoeshared": Family(
        _granitemoeshared,
        replace(_GRANITE, mlp=("shared_mlp.input_linear", "shared_mlp.output_linear")),
        expert_keys(),
    ),
    "mistral4": replace(
        _latent_family(_mistral4, share=1.0),
        architecture=replace(_LATENT, growing_queries=True),
    ),
    "mixtral": Family(
        _mixtral,
        replace(GATED, mlp=(), **ASKING),
        expert_keys(decimals=("router_jitter_noise",)),
        attention_bias=None,
    ),
    "olmoe": Family(_olmoe, replace(GATED, mlp=(), **ASKING), expert_keys("norm_topk_prob")),
}

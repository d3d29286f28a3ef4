"""GLM-4.5 and 4.6: experts in groups, one that all tokens ask, and dense layers before them."""

from __future__ import annotations

from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.expert_entries import expert_keys, experts_of, refuse_nulls
from planner.model.family import GATED, Family, gated_shape, mixed_shape
from planner.model.shape import ModelShape

_DENSE = "dense"
_ROTARY_SHARE = 0.5
"""The default of transformers."""

_COUNT = "n_routed_experts"


def _glm4_moe(config: ConfigFile) -> ModelShape:
    plain = gated_shape(
        config,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    width = config.size("moe_intermediate_size")
    refuse_nulls(config, "n_shared_experts", "first_k_dense_replace")
    shared = width * config.size("n_shared_experts", default=1)
    experts = experts_of(
        config, "moe_intermediate_size", count_keys=(_COUNT,), shared_width=shared, router_bias=True
    )
    _check_groups(config, experts.count, experts.per_token)
    sparse = replace(plain, experts=experts, intermediate_size=width)
    dense = replace(plain, kind=_DENSE)
    first = config.integer("first_k_dense_replace", default=1)
    return mixed_shape([dense if layer < first else sparse for layer in range(plain.layers)])


def _check_groups(config: ConfigFile, experts: int, per_token: int) -> None:
    """Refuse groups that the router cannot choose of: it adds the two best scores of each."""
    groups = config.size("n_group", default=1)
    chosen = config.size("topk_group", default=1)
    if experts % groups or experts // groups < 2:
        least = f"such that {experts} ({_COUNT}) are whole groups of two or more"
        raise config.refusal("n_group", groups, least)
    if chosen > groups:
        raise config.refusal("topk_group", chosen, f"at most {groups} (n_group)")
    if per_token > chosen * (experts // groups):
        most = f"at most {chosen * (experts // groups)}, the experts of topk_group groups"
        raise config.refusal("num_experts_per_tok", per_token, most)


GLM4_MOE = Family(
    _glm4_moe,
    replace(
        GATED,
        mlp=tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
        experts="mlp.experts",
        router="mlp.gate",
        predictor="eh_proj",
        activation="mlp.experts.act_fn",
        kinds={
            _DENSE: {
                "mlp": GATED.mlp,
                "activation": GATED.activation,
                "experts": None,
                "router": None,
            }
        },
    ),
    expert_keys(
        "norm_topk_prob",
        share=_ROTARY_SHARE,
        decimals=("routed_scaling_factor",),
        counts=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
    attention_bias="attention_bias",
)

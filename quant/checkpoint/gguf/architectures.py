"""llama.cpp's architectures that are families of ours. Its converter reorders rows: queries and
keys of `llama` and of what it converts in the same way, whose rotary positions turn neighbours
there and halves here, and fused queries, keys and values, three blocks there and three parts of
each head here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RowOrder = Literal["as stored", "rotary", "fused", "plus one"]
"""The last one: numbers of a norm, stored with the one that transformers adds to them."""

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)\.(\w+)$")
_EXPERTS = "mlp.experts"
_OF_EXPERT = re.compile(rf"{re.escape(_EXPERTS)}\.(\d+)\.(\w+)$")


@dataclass(frozen=True)
class GgufArchitecture:
    """`model_type` in transformers, and modules there by those in the file: `ends` outside the
    layers, `layer` within one, `experts` those of one expert of a tensor that holds all of a
    layer's. `queries`, `keys` (rotary order) and `fused` are modules of the file.
    """

    model_type: str
    layers: str
    ends: Mapping[str, str]
    layer: Mapping[str, str]
    queries: str = ""
    keys: str = ""
    fused: str = ""
    norms_plus_one: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)

    def full_name(self, stored: str) -> str:
        """The name in transformers of `stored`; an unknown one keeps its own, below that of its
        layer.
        """
        match = _LAYER.match(stored)
        if match is None:
            module, _, part = stored.rpartition(".")
            return f"{self.ends[module]}.{part}" if module in self.ends else stored
        index, module, part = match.groups()
        return f"{self.layers}.{index}.{self.layer.get(module, module)}.{part}"

    def expert_names(self, stored: str, count: int) -> list[str]:
        """The names in transformers of each expert in `stored`; none if it is not of experts."""
        match = _LAYER.match(stored)
        if match is None or match[2] not in self.experts:
            return []
        layer, end = f"{self.layers}.{match[1]}.{_EXPERTS}", f"{self.experts[match[2]]}.{match[3]}"
        return [f"{layer}.{index}.{end}" for index in range(count)]

    def order(self, stored: str) -> RowOrder:
        if self.norms_plus_one and stored.endswith("norm.weight"):
            return "plus one"
        match = _LAYER.match(stored)
        module = match[2] if match else ""
        if module and module in (self.queries, self.keys):
            return "rotary"
        return "fused" if module and module == self.fused else "as stored"

    def stored_name(self, full_name: str) -> str:
        module, _, part = full_name.rpartition(".")
        index, _, inner = module.removeprefix(f"{self.layers}.").partition(".")
        of_expert = _OF_EXPERT.match(inner)
        if of_expert is not None:
            names = {own: name for name, own in self.experts.items()}
            fused = names.get(of_expert[2], inner)
            return f"blk.{index}.{fused}.{part} (expert {of_expert[1]})"
        names = {own: name for name, own in (self.layer if inner else self.ends).items()}
        stem = f"blk.{index}." if inner else ""
        return f"{stem}{names.get(inner or module, inner or module)}.{part}"


_GATED_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GATED_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

_FUSED_MLP_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _like_llama(model_type: str) -> GgufArchitecture:
    names = _GATED_ENDS, _GATED_LAYER
    return GgufArchitecture(model_type, "model.layers", *names, queries="attn_q", keys="attn_k")


def _gemma(model_type: str) -> GgufArchitecture:
    layer = {
        **_GATED_LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return GgufArchitecture(model_type, "model.layers", _GATED_ENDS, layer, norms_plus_one=True)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": _like_llama("llama"),
    "smollm3": _like_llama("smollm3"),
    "granite": _like_llama("granite"),
    "mistral3": _like_llama("ministral3"),
    "phi3": GgufArchitecture(
        "phi3",
        "model.layers",
        _GATED_ENDS,
        {
            **_FUSED_MLP_LAYER,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_norm": "post_attention_layernorm",
        },
    ),
    "glm4": GgufArchitecture(
        "glm4",
        "model.layers",
        _GATED_ENDS,
        {
            **_FUSED_MLP_LAYER,
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "olmo2": GgufArchitecture(
        "olmo2",
        "model.layers",
        _GATED_ENDS,
        {
            **{name: own for name, own in _GATED_LAYER.items() if "norm" not in own},
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "gemma2": _gemma("gemma2"),
    "gemma3": _gemma("gemma3_text"),
    "qwen2": GgufArchitecture("qwen2", "model.layers", _GATED_ENDS, _GATED_LAYER),
    "qwen3": GgufArchitecture("qwen3", "model.layers", _GATED_ENDS, _GATED_LAYER),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "model.layers",
        _GATED_ENDS,
        {
            **{name: own for name, own in _GATED_LAYER.items() if "mlp" not in own},
            "ffn_gate_inp": "mlp.gate",
        },
        experts={
            "ffn_gate_exps": "gate_proj",
            "ffn_up_exps": "up_proj",
            "ffn_down_exps": "down_proj",
        },
    ),
    "bloom": GgufArchitecture(
        "bloom",
        "transformer.h",
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            **_FUSED_LAYER,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        fused="attn_qkv",
    ),
    "gptneox": GgufArchitecture(
        "gpt_neox",
        "gpt_neox.layers",
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        {
            **_FUSED_LAYER,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
        fused="attn_qkv",
    ),
}
"""The architectures by `general.architecture`. Mistral's models and SmolLM2 are files of `llama`.
llama.cpp has no OPT."""

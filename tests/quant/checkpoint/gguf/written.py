"""Small models written as GGUF files, in the way of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig

from tests.quant.checkpoint.gguf.written_fields import fields_of

Array = np.ndarray[Any, Any]
Encode = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType]]

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                  "bloom": "bloom", "gpt_neox": "gptneox", "smollm3": "smollm3",
                  "granite": "granite", "phi3": "phi3", "glm4": "glm4",
                  "olmo2": "olmo2", "ministral3": "mistral3", "gemma2": "gemma2",
                  "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama",
                  "olmo3": "olmo2", "olmoe": "olmoe", "granitemoe": "granitemoe",
                  "granitemoeshared": "granitemoe", "qwen2_moe": "qwen2moe",
                  "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "qwen3_next": "qwen3next",
                  "gemma4_text": "gemma4", "qwen3_5_text": "qwen35",
                  "qwen3_5_moe_text": "qwen35moe", "deepseek_v2": "deepseek2",
                  "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2"}  # fmt: skip
_PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "mistral3")
_ADDS_ONE = re.compile("gemma[23]|qwen35|qwen3next")
_RENAMED = {
    ".dt_bias": ".dt_proj.bias",
    "layer_scalar": "layer_scalar.weight",
    "_moe.router.weight": "_moe.router.layer.weight",
    "block_sparse_moe.experts.": "mlp.experts.",
    "e_score_correction_bias": "e_score_correction.bias",
}
_ENUMS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def permuted(weights: Array, heads: int) -> Array:
    """Rows of queries or keys as `LlamaModel.permute` of the converter orders them."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def unfused(weights: Array, heads: int) -> Array:
    """Fused rows as `BloomModel.modify_tensors` of the converter orders them."""
    split = weights.reshape(heads, 3, -1, *weights.shape[1:])
    return np.concatenate([split[:, part].reshape(-1, *weights.shape[1:]) for part in range(3)])


def plain(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
    """Everything in float32."""
    del name
    return weights, gguf.GGMLQuantizationType.F32


def as_type(kind: gguf.GGMLQuantizationType) -> Encode:
    """Matrices in blocks of `kind`, as the package rounds them; vectors in float32."""

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        if weights.ndim == 1:
            return plain(name, weights)
        return gguf.quantize(weights, kind), kind

    return encode


def write_gguf(
    model: Any,
    path: Path,
    encode: Encode = plain,
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Array]], None] = lambda tensors: None,
    part_bytes: int = 0,
) -> Path:
    """Write `model` to `path`. `metadata` is added or replaces what stands there (None: removed);
    `change` may alter the tensors; `part_bytes`: most bytes of a part of a split file.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # to Gemma 4's
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_size=part_bytes)
    given = fields_of(config, architecture) | dict(metadata or {})
    for key, value in given.items():
        _add(writer, key, value)
    tensors = _tensors(model, architecture)
    change(tensors)
    for name, weights in tensors.items():
        data, kind = encode(name, weights)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None or key == "general.architecture":
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _unfused_experts(tensors: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Gate and up of experts, and of the one that all ask, each by itself and named as weights."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if config.model_type == "gpt_oss" and stem.endswith("experts"):
            kind = "bias" if part.endswith("_bias") else "weight"
            own = tensor if kind == "bias" else tensor.transpose(1, 2)
            if part.startswith("down"):
                found[f"{stem}.down_proj.{kind}"] = own
            else:
                found[f"{stem}.gate_proj.{kind}"] = own[:, ::2]
                found[f"{stem}.up_proj.{kind}"] = own[:, 1::2]
        elif name.endswith("experts.gate_up_proj") and config.model_type != "gemma4_text":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif stem.endswith("kv_b_proj"):
            widths = [config.qk_nope_head_dim, config.v_head_dim]
            keys, values = tensor.unflatten(0, (-1, sum(widths))).split(widths, 1)
            stem = stem.removesuffix("kv_b_proj")
            found[f"{stem}k_b_proj.weight"] = keys.transpose(1, 2)
            found[f"{stem}v_b_proj.weight"] = values
        elif name.endswith("shared_mlp.input_linear.weight"):
            layer = stem.split(".")[2]
            gate, up = tensor.chunk(2)
            stem = f"blk.{layer}.ffn"
            found |= {f"{stem}_gate_shexp.weight": gate, f"{stem}_up_shexp.weight": up}
        elif name.endswith("linear_attn.in_proj_qkvz.weight"):
            layer = stem.split(".")[2]
            qkv, gate = _split_qkvz(tensor, config)
            stem = f"blk.{layer}.attn"
            found |= {f"{stem}_qkv.weight": qkv, f"{stem}_gate.weight": gate}
        else:
            is_bare = part in ("gate_up_proj", "down_proj", "sinks")
            found[f"{name}.weight" if is_bare else name] = tensor
    return found


def _split_qkvz(tensor: Any, config: PretrainedConfig) -> tuple[Any, Any]:
    """As `Qwen3NextModel.modify_tensors`: the parts of each key head become whole ones."""
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads
    value = per_key // keys * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [value] * 2
    heads = tensor.reshape(keys, sum(sizes), -1)
    query, key, own, gate = (each.flatten(0, 1) for each in heads.split(sizes, dim=1))
    return torch.cat([query, key, own]), gate


def _tiled(weights: Array, config: PretrainedConfig, width: int, axis: int = 0) -> Array:
    """As `_LinearAttentionVReorderBase._reorder_v_heads`."""
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys
    shape = weights.shape
    apart = weights.reshape(*shape[:axis], keys, per_key, width, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def _delta_part(name: str, weights: Array, config: PretrainedConfig) -> Array:
    """A tensor of a delta rule as the converter writes it."""
    part, width = name.rpartition("linear_attn.")[2], config.linear_value_head_dim
    if "conv1d" in part:
        weights = weights.squeeze(1)
    if config.model_type.startswith("qwen3_5"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        if part.startswith(("in_proj_qkv", "conv1d")):
            behind = _tiled(weights[first:], config, width)
            weights = np.concatenate([weights[:first], behind])
        elif part.startswith(("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
            weights = _tiled(weights, config, 1)
        elif part.startswith("in_proj_z"):
            weights = _tiled(weights, config, width)
        elif part.startswith("out_proj"):
            weights = _tiled(weights, config, width, axis=1)
    return -np.exp(weights) if part == "A_log" else weights


def _tensors(model: Any, architecture: str) -> dict[str, Array]:
    names = gguf.get_tensor_name_map(_ENUMS[architecture], model.config.num_hidden_layers)
    heads = model.config.num_attention_heads
    key_heads = getattr(model.config, "num_key_value_heads", heads)
    found = (
        {
            f"rope_factors_{each}.weight": np.array(factors, np.float32)
            for each in ("long", "short")
            if (factors := model.config.rope_parameters.get(f"{each}_factor")) is not None
        }
        if architecture == "phi3"
        else {}
    )
    if architecture == "gemma4":
        share = model.config.rope_parameters["full_attention"]["partial_rotary_factor"]
        full = model.config.layer_types.index("full_attention")
        head = model.config.per_layer_config[full].head_dim
        turned = int(head * share / 2)
        still = head // 2 - turned
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * still, np.float32)
    for name, tensor in _unfused_experts(model.state_dict(), model.config).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weights = tensor.float().numpy()
        if architecture in _PERMUTED and re.search(r"\.[qk]_proj\.", name):
            weights = permuted(weights, heads if ".q_proj." in name else key_heads)
        if "linear_attn." in name:
            weights = _delta_part(name, weights, model.config)
        elif _ADDS_ONE.match(architecture) and name.endswith("norm.weight"):
            weights = weights + 1
        if "query_key_value" in name:
            weights = unfused(weights, heads)
        known = name.removeprefix("transformer.")  # as the converter of BLOOM does
        for own, converted in _RENAMED.items():
            known = known.replace(own, converted)
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if "router." in known and known.endswith("scale"):  # as that of Gemma 4 does
            module = "ffn_down_exps" if "per_expert" in known else "ffn_gate_inp"
            stored = f"blk.{known.split('.')[2]}.{module}.scale"
        assert stored is not None, name
        found[stored] = np.ascontiguousarray(weights)
    return found

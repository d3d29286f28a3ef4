"""Small models written as GGUF files, in the way of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PretrainedConfig

Array = np.ndarray[Any, Any]
Encode = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType]]

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                  "bloom": "bloom", "gpt_neox": "gptneox", "smollm3": "smollm3",
                  "granite": "granite", "phi3": "phi3", "glm4": "glm4",
                  "olmo2": "olmo2", "ministral3": "mistral3", "gemma2": "gemma2",
                  "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}  # fmt: skip
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
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_size=part_bytes)
    given = _metadata(config, architecture) | dict(metadata or {})
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


def _metadata(config: PretrainedConfig, architecture: str) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    found: dict[str, Any] = {
        "context_length": getattr(config, "max_position_embeddings", 2048),
        "embedding_length": hidden,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * hidden),
        "attention.head_count": heads,
    }
    if architecture in ("bloom", "gptneox"):
        eps = getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps
        found["attention.layer_norm_epsilon"] = eps
    else:
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        found["attention.head_count_kv"] = config.num_key_value_heads
        rotary = config.rope_parameters
        rotary = rotary.get("full_attention", rotary)
        found["rope.freq_base"] = rotary["rope_theta"]
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        share = rotary.get("partial_rotary_factor", 1.0)
        found["rope.dimension_count"] = int(share * head_dim)
        found["attention.key_length"] = found["attention.value_length"] = head_dim
    if "gemma" in architecture:
        found["attention.sliding_window"] = config.sliding_window
        if architecture == "gemma3":
            sliding = [each == "sliding_attention" for each in config.layer_types]
            found["attention.sliding_window_pattern"] = sliding
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[key] = getattr(config, key)
        if rotary["rope_type"] == "linear":
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rotary["factor"]}
    if architecture == "qwen3moe":
        found["expert_count"] = config.num_experts
        found["expert_used_count"] = config.num_experts_per_tok
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "granite":
        found["attention.scale"] = config.attention_multiplier
        found["embedding_scale"] = config.embedding_multiplier
        found["residual_scale"] = config.residual_multiplier
        found["logit_scale"] = config.logits_scaling
    if config.model_type == "ministral3":
        rope = config.rope_parameters
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        found["rope.scaling.type"], found["rope.scaling.factor"] = "yarn", rope["factor"]
        length = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = length
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if config.model_type == "phi3":
        found["attention.sliding_window"] = config.sliding_window or 0
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if config.model_type == "mistral" and config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "gptneox":
        share = config.rope_parameters["partial_rotary_factor"]
        found["rope.dimension_count"] = int(share * (hidden // heads))
        found["use_parallel_residual"] = config.use_parallel_residual
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _unfused_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Gate and up of experts each by itself, named as weights."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


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
    for name, tensor in _unfused_experts(model.state_dict()).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weights = tensor.float().numpy()
        if architecture in ("llama", "smollm3", "granite", "mistral3") and re.search(
            r"\.[qk]_proj\.", name
        ):
            weights = permuted(weights, heads if ".q_proj." in name else key_heads)
        if "gemma" in architecture and name.endswith("norm.weight"):
            weights = weights + 1
        if "query_key_value" in name:
            weights = unfused(weights, heads)
        known = name.removeprefix("transformer.")  # as the converter of BLOOM does
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found[stored] = np.ascontiguousarray(weights)
    return found

"""A model whose MLPs have become experts, with its function kept: for quality and speed of experts
where no weights of such models are at hand.

    python -m benchmarks.quantization.experts FOLDER [--model SOURCE] [--experts 8] [--asked 2]
    python -m benchmarks.quantization.experts FOLDER --split

Every expert is a copy of the MLP, of which a token asks some, or with --split a part of its
columns, of which a token asks all. Qwen3 becomes Qwen3-MoE; LLaMA becomes gpt-oss, whose gate is
then SiLU, without a limit, and whose sinks have no share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantization.models import DEMO
from quant.checkpoint.model_folder import copy_settings
from quant.checkpoint.reader import Checkpoint

_CONFIG = "config.json"
_NO_LIMIT, _NO_SINK = 1e6, -1e4
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "swiglu_alpha": 1.0,
    "swiglu_limit": _NO_LIMIT,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_PARTS = ("gate_proj", "up_proj", "down_proj")


def with_experts(source: Path, target: Path, experts: int, asked: int, split: bool = False) -> None:
    """Write the folder `target` of `source`, a LLaMA or Qwen3, with that many `experts`."""
    checkpoint = Checkpoint(source)
    config = json.loads((checkpoint.folder / _CONFIG).read_text())
    from_llama = config["model_type"] == "llama"
    asked = experts if split else asked
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    width = width // experts if split else width
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.names()}
    draw = torch.Generator().manual_seed(0)
    for index in range(layers):
        name = f"model.layers.{index}"
        mlp = {part: tensors.pop(f"{name}.mlp.{part}.weight") for part in _PARTS}
        weights = _split(mlp, experts) if split else _copied(mlp, experts)
        tensors |= _fused(weights, name) if from_llama else _each(weights, name)
        router = torch.randn(experts, config["hidden_size"], generator=draw)
        router = (torch.zeros_like(router) if split else router).to(mlp["up_proj"].dtype)
        tensors[f"{name}.mlp.{'router' if from_llama else 'gate'}.weight"] = router
        if from_llama:
            tensors[f"{name}.mlp.router.bias"] = router.new_zeros(experts)
            sinks = router.new_full((config["num_attention_heads"],), _NO_SINK)
            tensors[f"{name}.self_attn.sinks"] = sinks
    target.mkdir(parents=True, exist_ok=True)
    copy_settings(checkpoint.folder, target)
    own: Mapping[str, Any] = _GPT_OSS if from_llama else _QWEN3_MOE
    width_key = "intermediate_size" if from_llama else "moe_intermediate_size"
    count_key = "num_local_experts" if from_llama else "num_experts"
    config |= {**own, width_key: width, count_key: experts, "num_experts_per_tok": asked}
    if from_llama:
        config["layer_types"] = ["full_attention"] * layers
    (target / _CONFIG).write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def _copied(mlp: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    return {part: weight.expand(experts, -1, -1) for part, weight in mlp.items()}


def _split(mlp: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Parts of the MLP; all have the weight of one among `experts`, by which they are larger."""
    down = torch.stack(mlp["down_proj"].chunk(experts, dim=1)) * experts
    return {
        **{part: torch.stack(mlp[part].chunk(experts)) for part in ("gate_proj", "up_proj")},
        "down_proj": down,
    }


def _each(weights: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """As Qwen3-MoE stores them: each by itself."""
    plain = torch.contiguous_format
    return {
        f"{layer}.mlp.experts.{index}.{part}.weight": own.clone(memory_format=plain)
        for part, every in weights.items()
        for index, own in enumerate(every)
    }


def _fused(weights: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """As gpt-oss does: in one, by inputs, gate and up in turn, to which one is added."""
    gate_up = torch.stack((weights["gate_proj"], weights["up_proj"]), 2).flatten(1, 2)
    bias = gate_up.new_zeros(gate_up.shape[:2])
    bias[:, 1::2] = -1
    experts = f"{layer}.mlp.experts"
    down = weights["down_proj"]
    return {
        f"{experts}.gate_up_proj": gate_up.transpose(1, 2).contiguous(),
        f"{experts}.gate_up_proj_bias": bias,
        f"{experts}.down_proj": down.transpose(1, 2).contiguous(),
        f"{experts}.down_proj_bias": down.new_zeros(down.shape[:2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--asked", type=int, default=2)
    parser.add_argument("--split", action="store_true")
    options = parser.parse_args()
    with_experts(options.model, options.target, options.experts, options.asked, options.split)


if __name__ == "__main__":
    main()

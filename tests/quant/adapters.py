"""LoRA adapters as PEFT writes them, with random numbers, and models that they are merged into."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quant.checkpoint.stored_tensors import ADAPTER_CONFIG, ADAPTER_WEIGHTS

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def adapter_tensors(
    model: nn.Module, targets: Sequence[str], rank: int, seed: int = 0
) -> dict[str, Tensor]:
    """Random pairs for the linears of `model` whose names end in one of `targets`."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(tuple(targets)):
            place, (rows, columns) = f"base_model.model.{name}", module.weight.shape
            down = torch.randn(rank, columns, generator=draw) / math.sqrt(columns)
            found[f"{place}.lora_A.weight"] = down
            found[f"{place}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * 0.2
    return found


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float = 16, **others: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "r": rank, "lora_alpha": alpha, **others}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(dict(tensors), folder / ADAPTER_WEIGHTS)
    return folder


def merge(model: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Add the products of an adapter's tensors to the weights of `model`."""
    for name, down in tensors.items():
        module, is_down, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if is_down:
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            linear = model.get_submodule(module)
            assert isinstance(linear, nn.Linear)
            with torch.no_grad():
                linear.weight += scale * (up.double() @ down.double()).float()

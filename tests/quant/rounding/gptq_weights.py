"""Random GPTQ weights, and checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.rounding.encoding import gptq_tensors


def stream_of(codes: list[int], bits: int) -> list[int]:
    """The words of a stream of codes, one bit after the other in plain Python."""
    stream = [(code >> bit) & 1 for code in codes for bit in range(bits)]
    stream += [0] * (-len(stream) % 32)
    words = [
        sum(bit << place for place, bit in enumerate(stream[first : first + 32]))
        for first in range(0, len(stream), 32)
    ]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def random_codes(rows: int, columns: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (rows, columns), generator=generator, dtype=torch.uint8)


def weight_of(
    bits: int, rows: int = 32, columns: int = 256, group: int = 64, act_order: bool = False
) -> GroupCodes:
    generator = torch.Generator().manual_seed(bits)
    groups = columns // group
    group_of_column = torch.arange(columns, dtype=torch.int32) // group
    if act_order:
        group_of_column = group_of_column[torch.randperm(columns, generator=generator)]
    return GroupCodes(
        codes=random_codes(rows, columns, bits),
        scale=(torch.rand(rows, groups, generator=generator) * 0.02 + 0.001).half(),
        zero=1 + random_codes(rows, groups, bits, seed=1) % (2**bits - 1),
        group_of_column=group_of_column,
        bits=bits,
    )


def meant(weight: GroupCodes) -> torch.Tensor:
    """(code - zero) * scale in float64, weight by weight."""
    columns = weight.group_of_column.long()
    return (weight.codes.double() - weight.zero.double()[:, columns]) * weight.scale.double()[
        :, columns
    ]


MODULE = "model.layers.0.mlp.up_proj"


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], module: str = MODULE, **config: Any
) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file({f"{module}.{part}": t for part, t in tensors.items()}, folder / SINGLE_FILE)
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 64} | config
    (folder / "config.json").write_text(json.dumps({"quantization_config": entries}))
    return Checkpoint(folder)


def replace_by_gptq(
    folder: Path,
    model: PreTrainedModel,
    layer: str,
    bits: int,
    act_order: bool,
    others: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Save `model` with the linears of `layer` in GPTQ's format; it computes with them too.

    `others`: bits of some linears by the last part of their names; 16 leaves them out.
    """
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    for name, linear in model.get_submodule(layer).named_modules():
        own = others.get(name.rpartition(".")[2], bits)
        if not isinstance(linear, nn.Linear) or own == 16:
            continue
        rows, columns = linear.weight.shape
        weight = weight_of(own, rows, columns, 32, act_order)
        with torch.no_grad():
            linear.weight.copy_(meant(weight))
        del tensors[f"{layer}.{name}.weight"]
        for part, tensor in gptq_tensors(weight, 0).items():
            tensors[f"{layer}.{name}.{part}"] = tensor
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE)
    entries = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2"}
    config = json.loads(model.config.to_json_string()) | {"quantization_config": entries}
    (folder / "config.json").write_text(json.dumps(config))


def replace_layer(folder: Path, source: str, target: str) -> None:
    """Store the tensors of one layer as those of another too."""
    tensors = load_file(folder / SINGLE_FILE)
    kept = {n: t for n, t in tensors.items() if not n.startswith(f"{target}.")}
    copied = {
        n.replace(source, target, 1): t.clone()
        for n, t in tensors.items()
        if n.startswith(f"{source}.")
    }
    save_file(kept | copied, folder / SINGLE_FILE)

"""Random 4-bit codes in the formats of quantized checkpoints, for `benchmarks.speed.loading`."""

from __future__ import annotations

from typing import Any

import torch


def stored_parts(stored: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """The tensors of a linear in random 4-bit codes, in groups of 128 with zeros."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32)

    groups = columns // 128
    scale = torch.rand(groups, rows).mul_(1e-2).half()
    if stored == "awq":
        codes, zeros = words(columns, rows // 8), words(groups, rows // 8)
        return {"qweight": codes, "qzeros": zeros, "scales": scale}
    if stored == "gptq":
        codes, zeros = words(columns // 8, rows), words(groups, rows // 8)
        order = torch.arange(columns, dtype=torch.int32) // 128
        return {"qweight": codes, "qzeros": zeros, "scales": scale, "g_idx": order}
    codes, zeros = words(rows, columns // 8), words(rows // 8, groups)
    shape = torch.tensor([rows, columns])
    names = ("weight_packed", "weight_zero_point", "weight_scale", "weight_shape")
    return dict(zip(names, (codes, zeros, scale.t().contiguous(), shape), strict=True))


def stored_entries(stored: str) -> dict[str, Any]:
    """What `config.json` says of it."""
    if stored == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
        group = {"targets": ["Linear"], "weights": {**weights, "symmetric": False}}
        entries: dict[str, Any] = {"config_groups": {"group_0": group}, "format": "pack-quantized"}
        return {"quant_method": stored, "ignore": ["lm_head"], **entries}
    entries = {"quant_method": stored, "bits": 4, "group_size": 128}
    if stored == "awq":
        return {**entries, "version": "gemm", "zero_point": True}
    return {**entries, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"}

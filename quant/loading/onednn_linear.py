"""16-bit linears in oneDNN's block layout: a decode step takes two thirds of the time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant.scheme import Processor


class PrepackedLinear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.packed_weight = weight
        self.out_features, self.in_features = shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight, which are not in torch's storage."""
        count: int = torch.ops.mkldnn._nbytes(self.packed_weight)
        return count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed_weight, self.bias, "none", [], ""
        )
        return out


def prepack(linear: nn.Linear, processor: Processor) -> nn.Module:
    """Prepack where that is faster and adds no byte; oneDNN refuses the layout on a CPU too old, as
    `processor` may be one that is only played here.
    """
    weight = linear.weight
    if not processor.is_cpu or weight.dtype != torch.bfloat16:
        return linear
    known = "avx512_bf16" in processor.instruction_sets
    if not (known and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return linear
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    if torch.ops.mkldnn._nbytes(packed) != weight.nbytes:  # blocks that do not fill are padded
        return linear
    bias = None if linear.bias is None else linear.bias.detach()
    return PrepackedLinear(packed, bias, (linear.out_features, linear.in_features))


def prepack_linears(module: nn.Module, processor: Processor) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, prepack(child, processor))

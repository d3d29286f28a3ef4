"""Linear layers from a GPTQ checkpoint, whose bits must be those of the plan."""

from __future__ import annotations

import torch
from torch import nn

from quant.checkpoint.reader import Checkpoint
from quant.common.errors import PlanMismatchError
from quant.gptq.format import read_gptq, to_canonical
from quant.linear import linear_of_codes
from quant.scheme import Processor

_FULL_BITS = 16


def gptq_linear(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, int],
    bits: int,
    processor: Processor,
    dtype: torch.dtype,
    device: torch.device,
    backend: str | None = None,
) -> nn.Module | None:
    """The linear `module` of `shape` `[out, in]`, without bias; None where plain weights are stored
    and planned.

    PlanMismatchError where the stored bits are not the planned `bits`; CheckpointError and
    DeviceError as in `quant.linear.linear_of_codes`.
    """
    if not checkpoint.has(f"{module}.qweight", prefix=module.partition(".")[0]):
        if bits != _FULL_BITS:
            raise _mismatch(checkpoint, module, _FULL_BITS, bits)
        return None
    stored = read_gptq(checkpoint, module, shape)
    if stored.bits != bits:
        raise _mismatch(checkpoint, module, stored.bits, bits)
    weight = to_canonical(stored)
    return linear_of_codes(weight.canonical, weight.input_order, processor, dtype, device, backend)


def _mismatch(
    checkpoint: Checkpoint, module: str, stored_bits: int, planned_bits: int
) -> PlanMismatchError:
    return PlanMismatchError(
        f"{module} in {checkpoint.folder} is stored with {stored_bits} bits, but the plan gives "
        f"its layer {planned_bits}; run the plan that the checkpoint was quantized for, plan for "
        "the checkpoint itself, or give the original 16-bit checkpoint"
    )

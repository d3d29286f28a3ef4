"""Linear layers from a GPTQ checkpoint, whose bits must be those of the plan."""

from __future__ import annotations

from torch import nn

from quant.checkpoint.reader import Checkpoint
from quant.common.errors import PlanMismatchError
from quant.gptq.format import read_gptq, to_canonical
from quant.linear import LayerForm, linear_of_codes
from quant.scheme import FULL_BITS


def gptq_linear(
    checkpoint: Checkpoint, module: str, shape: tuple[int, int], form: LayerForm
) -> nn.Module | None:
    """Load the linear `module` of `shape` `[out, in]`, without bias; None for plain weights.

    PlanMismatchError where the stored bits are not the planned ones; CheckpointError and
    DeviceError as in `quant.linear.linear_of_codes`.
    """
    if not checkpoint.has(f"{module}.qweight", prefix=module.partition(".")[0]):
        if form.bits != FULL_BITS:
            raise _mismatch(checkpoint, module, FULL_BITS, form.bits)
        return None
    stored = read_gptq(checkpoint, module, shape)
    if stored.bits != form.bits:
        raise _mismatch(checkpoint, module, stored.bits, form.bits)
    weight = to_canonical(stored)
    return linear_of_codes(weight.canonical, weight.input_order, form)


def _mismatch(
    checkpoint: Checkpoint, module: str, stored_bits: int, planned_bits: int
) -> PlanMismatchError:
    return PlanMismatchError(
        f"{module} in {checkpoint.place} is stored with {stored_bits} bits, but the plan gives "
        f"its layer {planned_bits}; run the plan that the checkpoint was quantized for, plan for "
        "the checkpoint itself, or give the original 16-bit checkpoint"
    )

"""Linear layers from a GPTQ checkpoint, whose bits must be those of the plan."""

from __future__ import annotations

from torch import nn

from quant.canonical import part_of
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, PlanMismatchError
from quant.cuts import COLUMNS, ROWS, Cut
from quant.gptq.format import StoredWeight, read_gptq, to_canonical
from quant.linear import LayerForm, linear_of_codes
from quant.scheme import FULL_BITS


def gptq_linear(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, int],
    form: LayerForm,
    cut: Cut | None = None,
) -> nn.Module | None:
    """Load the linear `module`, stored with `shape` `[out, in]`, or the part of it that `cut`
    takes, without bias; None for plain weights.

    PlanMismatchError where the stored bits are not the planned ones; CheckpointError and
    DeviceError as in `quant.linear.linear_of_codes`, and CheckpointError for columns that cannot be
    cut.
    """
    if not checkpoint.has(f"{module}.qweight", prefix=module.partition(".")[0]):
        if form.bits != FULL_BITS:
            raise _mismatch(checkpoint, module, FULL_BITS, form.bits)
        return None
    rows = None if cut is None or cut.dimension == COLUMNS else cut.index[ROWS]
    stored = read_gptq(checkpoint, module, shape, rows)
    if stored.bits != form.bits:
        raise _mismatch(checkpoint, module, stored.bits, form.bits)
    weight = to_canonical(stored)
    if cut is not None and cut.dimension == COLUMNS:
        weight = _columns(weight, cut)
    return linear_of_codes(weight.canonical, weight.input_order, form)


def _columns(weight: StoredWeight, cut: Cut) -> StoredWeight:
    if weight.input_order is not None:
        raise CheckpointError(
            f"the groups of its {cut.size} columns lie apart (desc_act), so that no rank can hold "
            f"{cut.length} of them; quantize the model without desc_act, or give each stage one "
            "device"
        )
    return StoredWeight(part_of(weight.canonical, cut), None)


def _mismatch(
    checkpoint: Checkpoint, module: str, stored_bits: int, planned_bits: int
) -> PlanMismatchError:
    return PlanMismatchError(
        f"{module} in {checkpoint.place} is stored with {stored_bits} bits, but the plan gives "
        f"its layer {planned_bits}; run the plan that the checkpoint was quantized for, plan for "
        "the checkpoint itself, or give the original 16-bit checkpoint"
    )

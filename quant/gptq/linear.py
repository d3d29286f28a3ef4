"""Linear layers from a GPTQ checkpoint, with the bits that they are stored with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from quant.canonical import part_of
from quant.checkpoint.gptq_config import bits_of_words
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
    takes, without bias, with the bits that it is stored with; None for plain weights.

    CheckpointError and DeviceError as in `quant.linear.linear_of_codes`, and CheckpointError for
    columns that cannot be cut.
    """
    if _qweight(checkpoint, module) is None:
        return None
    rows = None if cut is None or cut.dimension == COLUMNS else cut.index[ROWS]
    stored = read_gptq(checkpoint, module, shape, rows)
    if stored.bits != form.bits:
        form = replace(form, bits=stored.bits, backend=None)
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


def check_planned_bits(checkpoint: Checkpoint, columns: Mapping[str, int], bits: int) -> None:
    """Raise PlanMismatchError where no linear of a layer is stored with the `bits` of its plan.

    `columns`: inputs of each linear by its full name. Those that a checkpoint gives other bits, or
    leaves out, stand beside others.
    """
    stored = {module: _stored_bits(checkpoint, module, n) for module, n in columns.items()}
    if bits in stored.values() or None in stored.values():  # None: reading it tells why
        return
    module, found = next(iter(stored.items()))
    raise PlanMismatchError(
        f"{module} in {checkpoint.place} is stored with {found} bits, but the plan gives its layer "
        f"{bits}; run the plan that the checkpoint was quantized for, plan for the checkpoint "
        "itself, or give the original 16-bit checkpoint"
    )


def _stored_bits(checkpoint: Checkpoint, module: str, columns: int) -> int | None:
    name = _qweight(checkpoint, module)
    if name is None:
        return FULL_BITS
    shape = checkpoint.shape_of(name)
    return bits_of_words(shape[0], columns) if shape else None


def _qweight(checkpoint: Checkpoint, module: str) -> str | None:
    """The stored name of a linear's words; None where it is not quantized."""
    name, prefix = f"{module}.qweight", module.partition(".")[0]
    return checkpoint.find(name, prefix) if checkpoint.has(name, prefix) else None

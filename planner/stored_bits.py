"""Planning for a checkpoint that is quantized already: its bits are given."""

from __future__ import annotations

from dataclasses import replace

from planner.model.shape import ModelShape
from planner.options import PlanOptions
from quant.common.errors import SpecError


def with_stored_bits(options: PlanOptions, shape: ModelShape) -> PlanOptions:
    """The options with the bitwidth that `shape` is stored in; SpecError where it has several, or
    `bits` leaves it out.
    """
    stored = shape.stored
    if stored is None:
        return options
    if stored.mixed:
        raise SpecError(
            f"{shape.name} is quantized already, with different bits for some of its layers, or by "
            "rules (dynamic) of which only its weights, that are not here, tell what they change; "
            "run it with the plan that it was quantized for (llmpq run --strat_file_name PLAN "
            "--model FOLDER), or plan for the original 16-bit checkpoint"
        )
    if stored.bits not in options.bits:
        raise SpecError(
            f"{shape.name} is stored with {stored.bits} bits, which --bits "
            f"{' '.join(map(str, options.bits))} leaves out; allow {stored.bits}, or plan for the "
            "original 16-bit checkpoint"
        )
    return replace(options, bits=(stored.bits,))

"""A small model that computes in place of the planned one, whose memory limits still hold."""

from __future__ import annotations

from dataclasses import replace

from actors.stage.spec import StageSpec
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec
from quant.common.errors import DeviceError, SpecError


def stand_in_spec(spec: StageSpec, shape: ModelShape) -> StageSpec:
    """`spec` with one layer of a small model of this `shape` in place of the planned ones.

    Plans may have more stages than the small model has layers: stages take its layers by turns.
    Raises `SpecError` where the small model has no room for the planned requests.
    """
    if spec.max_tokens > shape.max_positions:
        raise SpecError(
            f"stand-in {shape.name} has {shape.max_positions} positions, but requests of the plan "
            f"are up to {spec.max_tokens} tokens long; take one with more positions"
        )
    layer = spec.index % shape.layers
    return replace(
        spec,
        layers=range(layer, layer + 1),
        bitwidths=(16,),
        backends={},
        dtype="float32",
        memory_limit_bytes=0,
        kv_bits=16,
    )


def check_planned_memory(plan: PlanSpec) -> None:
    """Raise `DeviceError` where a stage that a stand-in plays would not fit its planned device."""
    for stage in plan.stages:
        if plan.stand_in is not None and stage.memory_bytes > stage.memory_limit_bytes:
            raise DeviceError(
                f"stage {stage.index} needs {stage.memory_bytes} bytes by the plan, but the "
                f"emulated {stage.device} offers {stage.memory_limit_bytes}; plan again, with "
                "fewer bits or a smaller batch"
            )

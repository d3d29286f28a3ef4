"""Types of the fields of a plan file: their ranges, checked when the file is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer

from planner.costs.memory import StageMemory
from quant.backends.table import KERNEL_RULES
from quant.scheme import BITWIDTHS, DTYPE_BYTES, KV_BITWIDTHS, PLAN_ROUNDINGS

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

MAX_BYTES = 2**60
"""An exbibyte: a stage of more is a typing error."""
MAX_LAYERS = 2**16
MAX_THREADS = 2**16
MAX_SECONDS = 1e9
"""Most seconds of one micro-batch: three decades."""


def _as_range(value: Any) -> Any:
    match value:
        case range():
            return value
        case [int(first), int(end)] if (
            bool not in (type(first), type(end)) and 0 <= first <= end <= MAX_LAYERS
        ):
            return range(first, end)
    raise ValueError(f"give [first, end], whole numbers from 0 to {MAX_LAYERS}, not {value!r:.40}")


def _one_of(choices: Collection[int | str]) -> AfterValidator:

    def check(value: int | str) -> int | str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(map(str, choices))}")
        return value

    return AfterValidator(check)


def _known_backends(backends: dict[int, str]) -> dict[int, str]:
    for bits, backend in backends.items():
        names = [rule.name for rule in KERNEL_RULES if rule.bits == bits]
        if backend not in names:
            raise ValueError(f"{bits} bit has no backend {backend!r}; choose one of {names}")
    return backends


def _no_negative_part(memory: StageMemory) -> StageMemory:
    parts = astuple(memory)
    if min(parts) < 0 or max(parts) > MAX_BYTES:
        raise ValueError(f"{parts} bytes; each part is 0 to {MAX_BYTES}")
    return memory


Bits = Annotated[int, _one_of(BITWIDTHS)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Positive = Annotated[float, Field(gt=0)]
LayerRange = Annotated[
    range,
    BeforeValidator(_as_range),
    PlainSerializer(lambda layers: [layers.start, layers.stop], return_type=list[int]),
]
Dtype = Annotated[str, _one_of(DTYPE_BYTES)]
Rounding = Annotated[str, _one_of(PLAN_ROUNDINGS)]
KvBits = Annotated[int, _one_of(KV_BITWIDTHS)]
Backends = Annotated[dict[int, str], AfterValidator(_known_backends)]
Memory = Annotated[StageMemory, AfterValidator(_no_negative_part)]

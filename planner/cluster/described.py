"""Accelerators that a cluster file describes, with the keys of the registry's entries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer

from planner.cluster.accelerators import (
    FIGURES,
    LEAST_CAPABILITY,
    TOO_OLD,
    Accelerator,
    accelerator_of,
    find_accelerator,
    name_key,
)
from quant.common.errors import SpecError

LEAST, MOST = 1e-6, 1e6
"""Range of sizes in GiB and of rates: from a kilobyte, as tests have it, to a petabyte."""

Positive = Annotated[float, Field(ge=LEAST, le=MOST, allow_inf_nan=False)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RAYS_OWN = frozenset({"cpu", "gpu", "tpu", "memory", "objectstorememory"})
"""Ray's own resources: devices that Ray has no type for are placed by a resource of their name."""

_NEEDED = ("memory_gib", "memory_gbyte_per_s", "fp32_tflops", "fp16_tflops")
_HOST_LINK_GBYTE_PER_S = ((9, 64), (8, 32), (0, 16))
"""PCI Express of 16 lanes by the least major capability: 5.0 from Hopper on, 4.0 from Ampere on."""
_HOST_LINK_OF_ROCM = 32


def _as_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Capability = Annotated[
    str, BeforeValidator(_as_text), Field(pattern=r"^([3-9]|[1-9]\d)(\.\d{1,2})?$")
]
Architecture = Annotated[str, Field(pattern=r"^gfx[0-9a-f]{3,5}$")]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class AcceleratorEntry(BaseModel):
    """An accelerator with the keys of `accelerators.toml`; what is not stated is as in `like`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    like: Text | None = None
    memory_gib: Positive | None = None
    usable_memory_gib: Positive | None = None
    inline_ecc: bool | None = None
    memory_gbyte_per_s: Positive | None = None
    fp32_tflops: Positive | None = None
    fp16_tflops: Positive | None = None
    int8_tops: Positive | None = None
    bf16: bool | None = None
    compute_capability: Capability | None = None
    rocm_architecture: Architecture | None = None
    link_gbyte_per_s: Positive | None = None
    host_link_gbyte_per_s: Positive | None = None
    ray_type: Text | None = None
    reported_as: list[Text] | None = None
    source: Text | None = None

    @model_serializer
    def stated(self) -> dict[str, Any]:
        return {key: value for key, value in self if value is not None}


class DescriptionError(Exception):
    """A description that cannot be used: `field` is the key at fault, None for the name."""

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def described_accelerator(
    name: str, entry: AcceleratorEntry, before: Sequence[Accelerator] = ()
) -> Accelerator:
    """Make `entry`'s accelerator, `like` one of `before` or registered; else DescriptionError."""
    _check_name(name, before)
    values = entry.stated()
    like = values.pop("like", None)
    if like is not None:
        values = _derived(values, _base(like, before))
    _check_values(values)
    accelerator = accelerator_of({"name": name, **_with_links(values)})
    if (accelerator.compute_capability or LEAST_CAPABILITY) < LEAST_CAPABILITY:
        raise DescriptionError("compute_capability", TOO_OLD)
    return accelerator


def _check_name(name: str, before: Sequence[Accelerator]) -> None:
    if not _NAME.fullmatch(name):
        raise DescriptionError(
            None, "a name has 1 to 64 letters, digits, dots, dashes and underscores"
        )
    if name_key(name) in _RAYS_OWN or not name_key(name):
        raise DescriptionError(None, "Ray has a resource of this name; choose another")
    try:
        known = find_accelerator(name, before)
    except SpecError:
        return
    where = "is built in" if known.is_registered else "is described above"
    raise DescriptionError(
        None,
        f"{known.name} {where}, and spelling matters only by letters and digits; choose another "
        f"name, with `like: {known.name}` to start from its figures",
    )


def _base(like: str, before: Sequence[Accelerator]) -> Accelerator:
    try:
        base = find_accelerator(like, before)
    except SpecError as error:
        raise DescriptionError("like", str(error)) from error
    if base.is_cpu:
        raise DescriptionError("like", "describe GPUs; a node states what each of its CPUs may use")
    return base


def _derived(values: Mapping[str, Any], base: Accelerator) -> dict[str, Any]:
    same = entry_of(base).stated()
    same["reported_as"] = [base.name, *base.aliases, *base.reported_as]
    if "inline_ecc" in values:
        del same["usable_memory_gib"]
    elif "memory_gib" in values:
        share = base.usable_memory_bytes / base.nominal_memory_bytes
        same["usable_memory_gib"] = round(values["memory_gib"] * share, 2)
    if "compute_capability" in values or "rocm_architecture" in values:
        for key in ("compute_capability", "rocm_architecture", "bf16"):
            same.pop(key, None)
    return same | dict(values)


def _check_values(values: Mapping[str, Any]) -> None:
    for key in _NEEDED:
        if key not in values:
            raise DescriptionError(key, "missing; state it, or name another with `like`")
    has = [key for key in ("compute_capability", "rocm_architecture") if key in values]
    if len(has) != 1:
        which = "both are stated" if has else "missing; it decides which kernels run"
        raise DescriptionError(
            "compute_capability",
            f"{which}: state compute_capability of an NVIDIA GPU (8.6), or rocm_architecture of an "
            "AMD GPU (gfx942)",
        )
    usable, nominal = values.get("usable_memory_gib"), values["memory_gib"]
    if usable is not None and usable > nominal:
        raise DescriptionError(
            "usable_memory_gib", f"{usable:g} GiB is more than memory_gib, which is {nominal:g}"
        )


def _with_links(values: dict[str, Any]) -> dict[str, Any]:
    capability = values.get("compute_capability")
    host = _HOST_LINK_OF_ROCM
    if capability is not None:
        major = int(capability.partition(".")[0])
        host = next(rate for least, rate in _HOST_LINK_GBYTE_PER_S if major >= least)
    values.setdefault("host_link_gbyte_per_s", host)
    values.setdefault("link_gbyte_per_s", values["host_link_gbyte_per_s"])
    return values


def entry_of(accelerator: Accelerator) -> AcceleratorEntry:
    capability = accelerator.compute_capability
    amounts = ((key, unit, getattr(accelerator, field)) for field, (key, unit) in FIGURES.items())
    figures: dict[str, Any] = {
        key: None if amount is None else _short(amount, unit) for key, unit, amount in amounts
    }
    return AcceleratorEntry(
        **figures,
        bf16=accelerator.bf16,
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        rocm_architecture=accelerator.rocm_architecture,
        ray_type=accelerator.ray_type,
        reported_as=list(accelerator.reported_as) or None,
        source=accelerator.source or None,
    )


def _short(amount: float, unit: float) -> float:
    """Write `amount` in `unit` with the fewest decimals from which it is read back."""
    exact = amount / unit
    for digits in range(1, 16):
        short = round(exact, digits)
        back = round(short * unit) if isinstance(amount, int) else short * unit
        if back == amount:
            return short
    return exact

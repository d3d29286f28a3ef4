"""The registry of accelerators: names, figures of the datasheets, and the memory that is usable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from quant.common.errors import SpecError
from quant.common.units import GIB
from quant.scheme import Processor

# Usable shares where no size was measured: the lowest measured one of the HBM devices (P100 0.992,
# V100 0.991, A100 0.985 and 0.989), and for error correction within the memory that of the T4,
# 14.6 of 16 GiB.
_USABLE_SHARE = 0.985
_USABLE_SHARE_INLINE_ECC = 0.9125


@dataclass(frozen=True)
class Accelerator:
    """A type of device; sizes in bytes, rates per second, links in one direction.

    `link_bytes_per_s` is the rate to a device of its type on the node (NVLink, where it has that),
    `host_link_bytes_per_s` that to the host's memory and to devices of other types.
    `compute_capability` and `ray_type` are None for a CPU; `ray_type` also where Ray has no name
    for the GPU. The rates of the CPU are those of one core.
    """

    name: str
    aliases: tuple[str, ...]
    ray_type: str | None
    compute_capability: tuple[int, int] | None
    nominal_memory_bytes: int
    usable_memory_bytes: int
    fp32_flops: float
    fp16_flops: float
    int8_ops: float | None
    bf16: bool
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_link_bytes_per_s: float

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host processor."""
        return self.compute_capability is None

    @property
    def processor(self) -> Processor:
        """The properties that decide on kernels (`quant.backends.table`)."""
        return Processor(compute_capability=self.compute_capability)

    @property
    def default_dtype(self) -> str:
        """The 16-bit type it computes in: `bfloat16`, or `float16` below compute capability 8."""
        return "bfloat16" if self.bf16 else "float16"


@cache
def registry() -> tuple[Accelerator, ...]:
    """Every accelerator that llmpq knows, in the order of `accelerators.toml`."""
    text = files("planner.cluster").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return tuple(_accelerator(entry) for entry in tomllib.loads(text)["accelerator"])


def find_accelerator(name: str) -> Accelerator:
    """Find an accelerator by name, alias or Ray type; case, `_`, `-` and spaces do not matter.

    Raises SpecError for an unknown name, with the nearest known ones.
    """
    known = _by_full_name_or_alias()
    key = _key(name)
    if key in known:
        return known[key]
    near = [known[match].name for match in get_close_matches(key, known, n=3, cutoff=0.5)]
    names = list(dict.fromkeys(near)) or [entry.name for entry in registry()]
    hint = "nearest known" if near else "known"
    raise SpecError(f"unknown accelerator {name!r}; {hint}: {', '.join(names)}")


def assumption(name: str) -> str | None:
    """A note on which accelerator is assumed where `name` fits several; None where it fits one."""
    meant = find_accelerator(name)
    others = [each.name for each in _by_short_name().get(_key(name), ()) if each != meant]
    if not others:
        return None
    size_gib = meant.nominal_memory_bytes // GIB
    return (
        f"{name} is taken for {meant.name} ({size_gib} GB); if it is another, name it: "
        f"{', '.join(others)}"
    )


@cache
def _by_short_name() -> dict[str, tuple[Accelerator, ...]]:
    """The accelerators whose full names have all parts of a short name, by its key: those of `V100`
    differ in memory, those of `V100-16GB` in links.
    """
    found = {}
    for short in {alias for entry in registry() for alias in entry.aliases}:
        parts = _parts(short)
        found[_key(short)] = tuple(each for each in registry() if parts <= _parts(each.name))
    return found


def _parts(name: str) -> set[str]:
    """Split a name into its parts: `{"v100", "16gb"}` for `Tesla_V100-16G`."""
    parts = re.split(r"[^a-z0-9]+", name.lower())
    return {re.sub(r"^(\d+)g$", r"\1gb", part) for part in parts} - {"nvidia", "tesla"}


@cache
def _by_full_name_or_alias() -> dict[str, Accelerator]:
    return {_key(name): entry for entry in registry() for name in (entry.name, *entry.aliases)}


def _key(name: str) -> str:
    key = "".join(character for character in name.lower() if character.isalnum())
    for vendor in ("nvidia", "tesla"):
        key = key.removeprefix(vendor)
    return key


def _accelerator(entry: Mapping[str, Any]) -> Accelerator:
    share = _USABLE_SHARE_INLINE_ECC if entry.get("inline_ecc", False) else _USABLE_SHARE
    capability = entry.get("compute_capability")
    int8_tops = entry.get("int8_tops")
    return Accelerator(
        name=entry["name"],
        aliases=tuple(entry["aliases"]),
        ray_type=entry.get("ray_type"),
        compute_capability=None if capability is None else (capability[0], capability[1]),
        nominal_memory_bytes=round(entry["memory_gib"] * GIB),
        usable_memory_bytes=round(entry.get("usable_gib", entry["memory_gib"] * share) * GIB),
        fp32_flops=entry["fp32_tflops"] * 1e12,
        fp16_flops=entry["fp16_tflops"] * 1e12,
        int8_ops=None if int8_tops is None else int8_tops * 1e12,
        bf16=entry.get("bf16", False),
        memory_bytes_per_s=entry["memory_gbyte_per_s"] * 1e9,
        link_bytes_per_s=entry["link_gbyte_per_s"] * 1e9,
        host_link_bytes_per_s=entry["host_link_gbyte_per_s"] * 1e9,
    )

"""The registry of accelerators: names, figures of the datasheets, and the memory that is usable."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from quant.common.errors import SpecError
from quant.common.text import near_names
from quant.common.units import GIB
from quant.scheme import Processor

# Usable shares where no size was measured: the lowest measured one of the HBM devices (P100 0.992,
# V100 0.991, A100 0.985 and 0.989), and for error correction within the memory that of the T4,
# 14.6 of 16 GiB.
_USABLE_SHARE = 0.985
_USABLE_SHARE_INLINE_ECC = 0.9125

_BF16_CAPABILITY = (8, 0)
LEAST_CAPABILITY = (6, 0)
"""That of the P100, from which on both the kernels here and those of bitsandbytes serve GPUs."""
TOO_OLD = (
    "llmpq runs on NVIDIA GPUs from compute capability {}.{} on (P100, P40, GTX 1080 Ti); leave it "
    "out: the cores of its node can take its place, as accelerator CPU with threads and memory_gib"
).format(*LEAST_CAPABILITY)
_SIZE = re.compile(r"\d+gb")

_SAY_NOTHING = {"geforce", "gpu", "graphics", "generation", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Words in what drivers call a GPU, beside its maker's, without which it is told apart as well."""

_VARIANTS = (
    (re.compile(r"(\bMIG\b|\b\d+g\.\d+gb\b).*", re.IGNORECASE), "a part of a GPU (MIG)"),
    (re.compile(r"\bGRID\b|-\d+[ABCQ]$", re.IGNORECASE), "a virtual GPU (vGPU)"),
    (re.compile(r"(\b(Laptop|Mobile|Max-Q)\b|-LS$).*", re.I), "a GPU held to less power"),
)
"""Names of devices that are less than the GPU of the rest of the name, and what they are."""

_BEFORE_PASCAL = re.compile(
    r"(quadro|grid)?[km]\d\d|(geforce)?gtx?(titan|[4-9]\d\d)|geforce[4-9]\d\d"
)
"""Keys of names of the generations before compute capability 6.0, above all Kepler and Maxwell."""
_OTHER_MAKERS = re.compile(r"(Intel|Apple|Qualcomm)\b", re.IGNORECASE)


FIGURES = {
    "nominal_memory_bytes": ("memory_gib", GIB),
    "usable_memory_bytes": ("usable_memory_gib", GIB),
    "memory_bytes_per_s": ("memory_gbyte_per_s", 1e9),
    "fp32_flops": ("fp32_tflops", 1e12),
    "fp16_flops": ("fp16_tflops", 1e12),
    "int8_ops": ("int8_tops", 1e12),
    "link_bytes_per_s": ("link_gbyte_per_s", 1e9),
    "host_link_bytes_per_s": ("host_link_gbyte_per_s", 1e9),
}
"""Keys and units of `accelerators.toml`, by the fields of an accelerator."""


@dataclass(frozen=True)
class Accelerator:
    """A type of device; sizes in bytes, rates per second, links in one direction.
    `link_bytes_per_s` joins devices of its type on a node (NVLink, where it has that),
    `host_link_bytes_per_s` the host's memory and other types. A CPU has neither
    `compute_capability` (NVIDIA) nor `rocm_architecture` (AMD), and rates of one core. `ray_type`
    is None where Ray has no name for it; `reported_as` are drivers' names for it, which types may
    share.
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
    rocm_architecture: str | None = None
    reported_as: tuple[str, ...] = ()
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.processor.is_cpu

    @cached_property
    def processor(self) -> Processor:
        return Processor(
            compute_capability=self.compute_capability, rocm_architecture=self.rocm_architecture
        )

    @property
    def default_dtype(self) -> str:
        """Return `bfloat16`, or `float16` below compute capability 8."""
        return "bfloat16" if self.bf16 else "float16"

    @property
    def is_registered(self) -> bool:
        """Whether the registry has it with these figures; a cluster file may describe others."""
        return _by_full_name_or_alias().get(name_key(self.name)) == self

    def is_reported_as(self, name: str) -> bool:
        """Whether a driver may call it `name`; described without saying, any unregistered one."""
        for each in (self.name, *self.aliases, *self.reported_as):
            if name_key(name) == name_key(each) or _words(name) == _words(each) != ():
                return True
        return not self.reported_as and not self.is_registered and _registered(name) is None


@cache
def registry() -> tuple[Accelerator, ...]:
    text = files("planner.cluster").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return tuple(accelerator_of(entry) for entry in tomllib.loads(text)["accelerator"])


def find_accelerator(name: str, own: Iterable[Accelerator] = ()) -> Accelerator:
    """Find an accelerator by name, alias, Ray type or driver's name, or by the name of one of
    `own`, whatever the case, `_`, `-` and spaces. SpecError for an unknown name names the nearest.
    """
    key, by_own = name_key(name), {name_key(each.name): each for each in own}
    found = by_own.get(key) or _registered(name)
    if found is not None:
        return found
    why = _no_data_sheet(name)
    if why is not None:
        raise SpecError(f"unknown accelerator {name!r}: {why}")
    known = _by_full_name_or_alias() | by_own
    near = near_names(key, {key: entry.name for key, entry in known.items()})
    hint = f"nearest known: {', '.join(near)}; " if near else ""
    raise SpecError(
        f"unknown accelerator {name!r}; {hint}`llmpq devices` lists all, and a cluster file can "
        "describe others under accelerators"
    )


def _no_data_sheet(name: str) -> str | None:
    if _OTHER_MAKERS.match(name):
        return "llmpq runs on NVIDIA GPUs, on AMD GPUs with ROCm, and on CPUs"
    if _BEFORE_PASCAL.match(name_key(name)):
        return f"it is of a generation before NVIDIA's Pascal, and {TOO_OLD}"
    for pattern, kind in _VARIANTS:
        if pattern.search(name):
            whole = _registered(pattern.sub("", name))
            return (
                f"it is {kind}, of which no data sheet tells; describe it under accelerators in a "
                f"cluster file, with like: {whole.name if whole else 'the GPU that it is of'}, its "
                f"own memory_gib and rates, and reported_as: [{name}]"
            )
    return None


def reported_accelerator(name: str, memory_bytes: int) -> Accelerator:
    """Return the accelerator that a driver calls `name`; of several, that of the nearest size."""
    found = [each for each in registry() if each.is_reported_as(name)] or [find_accelerator(name)]
    return min(found, key=lambda each: abs(each.nominal_memory_bytes - memory_bytes))


def assumption(name: str, own: Iterable[Accelerator] = ()) -> str | None:
    meant = find_accelerator(name, own)
    if not meant.is_registered:
        return None
    others = [each.name for each in _by_short_name().get(name_key(name), ()) if each != meant]
    if not others:
        return None
    size_gib = meant.nominal_memory_bytes // GIB
    return (
        f"{name} is taken for {meant.name} ({size_gib} GB); if it is another, name it: "
        f"{', '.join(others)}"
    )


@cache
def _by_short_name() -> dict[str, tuple[Accelerator, ...]]:
    """Return the accelerators that a short name may mean: `V100` those of all sizes, `V100-16GB`
    those of all links, and without a size those that drivers report alike.
    """
    found = {}
    for entry in registry():
        for short in (*entry.aliases, *entry.reported_as):
            parts = _parts(short)
            alike = set() if any(map(_SIZE.fullmatch, parts)) else set(entry.reported_as)
            found[name_key(short)] = tuple(
                each
                for each in registry()
                if parts <= _parts(each.name) or alike & set(each.reported_as)
            )
    return found


def _parts(name: str) -> set[str]:
    """Split `Tesla_V100-16G` into `{"v100", "16gb"}`."""
    parts = re.split(r"[^a-z0-9]+", name.lower())
    return {re.sub(r"^(\d+)g$", r"\1gb", part) for part in parts} - {"nvidia", "tesla"}


def _registered(name: str) -> Accelerator | None:
    return _by_full_name_or_alias().get(name_key(name)) or _by_words().get(_words(name))


@cache
def _by_words() -> dict[tuple[str, ...], Accelerator]:
    return {
        _words(name): entry
        for entry in reversed(registry())
        for name in (*entry.reported_as, *entry.aliases, entry.name)
    }


def _words(name: str) -> tuple[str, ...]:
    """Sort letters and numbers of a name: `NVIDIA A100 80GB PCIe` has those of `A100-PCIE-80GB`."""
    kept = " ".join(_parts(name) - _SAY_NOTHING)
    return tuple(sorted(re.findall(r"[a-z]+|[0-9]+", kept)))


@cache
def _by_full_name_or_alias() -> dict[str, Accelerator]:
    """The registry by name; of accelerators that drivers report alike, the first has that name."""
    reported = {name_key(n): entry for entry in reversed(registry()) for n in entry.reported_as}
    named = {name_key(n): entry for entry in registry() for n in (entry.name, *entry.aliases)}
    return reported | named


def name_key(name: str) -> str:
    key = "".join(character for character in name.lower() if character.isalnum())
    for vendor in ("nvidia", "tesla"):
        key = key.removeprefix(vendor)
    return key


def accelerator_of(entry: Mapping[str, Any]) -> Accelerator:
    share = _USABLE_SHARE_INLINE_ECC if entry.get("inline_ecc", False) else _USABLE_SHARE
    capability, architecture = _capability(entry), entry.get("rocm_architecture")
    newer = architecture is not None or capability is None or capability >= _BF16_CAPABILITY
    values = {"usable_memory_gib": entry["memory_gib"] * share, "int8_tops": None} | dict(entry)
    figures: dict[str, Any] = {}
    for field, (key, unit) in FIGURES.items():
        amount = values[key]
        figures[field] = round(amount * unit) if unit == GIB else amount and amount * unit
    return Accelerator(
        name=entry["name"],
        aliases=tuple(entry.get("aliases", ())),
        ray_type=entry.get("ray_type"),
        compute_capability=capability,
        bf16=entry.get("bf16", newer),
        rocm_architecture=architecture,
        reported_as=tuple(entry.get("reported_as", ())),
        source=entry.get("source", ""),
        **figures,
    )


def _capability(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    text = entry.get("compute_capability")
    if text is None:
        return None
    major, _, minor = str(text).partition(".")
    return int(major), int(minor or 0)

"""Which rows of a profile a device's times are taken from, and why others are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.phases import PHASES, Phase
from planner.profiles.rows import LayerTerms, ProfileRow
from quant.backends.selection import backend_name
from quant.common.errors import SpecError
from quant.scheme import DTYPE_BYTES


@dataclass(frozen=True)
class Wanted:
    """A question for times: of layers of these sizes on a device, at one precision."""

    device: Device
    dtype: str
    layer: LayerTerms
    bits: int
    phase: Phase

    @property
    def threads(self) -> int:
        """Threads of the device; 1 where that is no property of it."""
        return self.device.threads or 1

    @property
    def backend(self) -> str:
        """The kernel whose time is meant, also where a CPU emulates the device."""
        dtype = ProfileRow.timed_dtype(self.device, self.dtype)
        return backend_name(self.device.accelerator.processor, self.bits, dtype)

    def dtype_of(self, row: ProfileRow) -> str:
        """The compute type of a row; where it says none, the device's own."""
        return row.dtype or self.device.default_dtype


@dataclass(frozen=True)
class Condition:
    """A property without which a row is not used, and the words where none has it."""

    holds: Callable[[Wanted, ProfileRow], bool]
    lack: Callable[[Wanted, Sequence[ProfileRow]], str]


CONDITIONS = (
    Condition(
        lambda wanted, row: row.device == wanted.device.accelerator.name,
        lambda wanted, rows: f"taken on {_listed(row.device for row in rows)}",
    ),
    Condition(
        lambda wanted, row: row.threads in (None, wanted.threads),
        lambda wanted, rows: (
            f"taken at a thread count of {_listed(str(row.threads) for row in rows)}, not "
            f"{wanted.threads}"
        ),
    ),
    Condition(
        lambda wanted, row: DTYPE_BYTES[wanted.dtype_of(row)] == DTYPE_BYTES[wanted.dtype],
        lambda wanted, rows: (
            f"taken in {_listed(wanted.dtype_of(row) for row in rows)}, not {wanted.dtype}"
        ),
    ),
    Condition(lambda wanted, row: row.bits == wanted.bits, lambda wanted, rows: "no rows"),
    Condition(lambda wanted, row: row.phase == wanted.phase, lambda wanted, rows: "no rows"),
    Condition(
        lambda wanted, row: row.backend in (None, wanted.backend),
        lambda wanted, rows: (
            f"taken with the kernel {_listed(row.backend or '' for row in rows)}, not "
            f"{wanted.backend}"
        ),
    ),
)
"""In the order in which it is said what is missing."""


def applies(row: ProfileRow, device: Device, dtype: str) -> bool:
    """Whether it was measured on such a device and precision, with the kernel used now."""
    wanted = Wanted(device, dtype, row.layer, row.bits, row.phase)
    return all(condition.holds(wanted, row) for condition in CONDITIONS)


@dataclass(frozen=True)
class Used:
    """The rows for what is wanted, or `lack`: why there are none, or none of this very model."""

    wanted: Wanted
    rows: tuple[ProfileRow, ...]
    lack: str | None


def used_rows(profiles: Sequence[ProfileRow], wanted: Wanted) -> Used:
    """Rows of the very layer alone where there are any, else those of other models."""
    left = profiles
    for condition in CONDITIONS:
        kept = [row for row in left if condition.holds(wanted, row)]
        if not kept:
            return Used(wanted, (), condition.lack(wanted, left) if left else "no rows")
        left = kept
    same = tuple(row for row in left if row.layer == wanted.layer)
    if same:
        return Used(wanted, same, None)
    return Used(wanted, tuple(left), f"scaled from {_listed(row.model for row in left)}")


def uses(
    profiles: Sequence[ProfileRow],
    device: Device,
    dtype: str,
    layer: LayerTerms,
    bits: Iterable[int],
) -> list[Used]:
    """Rows for both phases at each bitwidth, or why there are none."""
    return [
        used_rows(profiles, Wanted(device, dtype, layer, each, phase))
        for each in bits
        for phase in PHASES
    ]


def describe_uses(verb: str, found: Sequence[Used], estimate: str) -> str:
    """`verb` so many rows of which files, bits and kernels; for what is not, `estimate` and why."""
    rows = [row for used in found for row in used.rows]
    missing = [used for used in found if not used.rows]
    scaled = [used for used in found if used.rows and used.lack]
    parts = []
    if rows:
        sources = _listed(row.source for row in rows)
        kernels = {f"{r.backend} {r.backend_version or ''}".strip() for r in rows if r.backend}
        bits = ", ".join(map(str, sorted({row.bits for row in rows})))
        inner = "; ".join((f"bits {bits}", *sorted(kernels), *_lacks(scaled)))
        of = f" of {sources}" if sources else ""
        parts.append(f"{verb} {len(rows)} profile rows{of} ({inner})")
    if missing:
        parts.append(f"{estimate} ({'; '.join(_lacks(missing))})")
    if rows:
        parts.append(f"embedding and LM head {estimate}")
    return "; ".join(parts)


def refuse_estimates(
    profiles: Sequence[ProfileRow],
    layer: LayerTerms,
    devices: Iterable[tuple[Device, str]],
    bits: Sequence[int],
    path: str,
) -> None:
    """SpecError for the first of `devices`, each with its compute type, of which some layer's time
    was not measured with this very layer, and what is missing.
    """
    for device, dtype in devices:
        lacking = [used for used in uses(profiles, device, dtype, layer, bits) if used.lack]
        if lacking:
            raise SpecError(
                f"strict_profiles: {path} has not all times of {device.name}: "
                f"{'; '.join(_lacks(lacking))}; measure them with llmpq-profile, leave those "
                "bits out (--bits), or plan without --strict_profiles"
            )


def _lacks(found: Sequence[Used]) -> Iterator[str]:
    """What is lacking, by reason: `decode of bits 3, 8: no rows`."""
    for lack in dict.fromkeys(used.lack for used in found):
        by_bits = {
            bits: tuple(u.wanted.phase for u in found if (u.lack, u.wanted.bits) == (lack, bits))
            for bits in sorted({used.wanted.bits for used in found if used.lack == lack})
        }
        for phases in dict.fromkeys(by_bits.values()):
            bits = ", ".join(str(each) for each, of in by_bits.items() if of == phases)
            which = "" if phases == PHASES else f"{phases[0]} of "
            yield f"{which}bits {bits}: {lack}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))

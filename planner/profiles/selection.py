"""Which rows of a profile tell the times of a layer on a device, and which are missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.profiles.layer_terms import HEAD, LayerTerms
from planner.profiles.rows import ProfileRow
from planner.scheduling import PHASES, Phase
from quant.backends.table import backend_name
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES, Processor

_PLAIN_CPU = Processor(instruction_sets=frozenset())

HEAD_TOO = "LM head too, embedding by the datasheet"


@dataclass(frozen=True)
class TimeQuery:
    device: Device
    dtype: str
    layer: LayerTerms
    bits: int
    phase: Phase
    backend: str | None = None
    """The kernel that computes; None: the preferred one."""

    @property
    def threads(self) -> int:
        return self.device.threads or 1

    def backend_of(self, row: ProfileRow) -> str:
        """The kernel backend timed for a micro-batch like `row`, also where a CPU emulates."""
        if self.backend is not None:
            return self.backend
        dtype = ProfileRow.timed_dtype(self.device, self.dtype)
        rows = row.batch_size if self.phase == "decode" else 0
        processor = self.device.accelerator.processor
        return backend_name(processor, self.bits, dtype, decode_rows=rows)

    def is_timed_with(self, row: ProfileRow) -> bool:
        """Whether the row's kernel is the one that computes: a CPU has that of its instructions, of
        which a cluster file tells nothing.
        """
        known = [None, self.backend_of(row)]
        if self.backend is None and self.device.accelerator.is_cpu:
            known.append(backend_name(_PLAIN_CPU, self.bits, self.dtype))
        return row.backend in known

    def dtype_of(self, row: ProfileRow) -> str:
        return row.dtype or self.device.default_dtype


@dataclass(frozen=True)
class Condition:
    holds: Callable[[TimeQuery, ProfileRow], bool]
    problem: Callable[[TimeQuery, Sequence[ProfileRow]], str]


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
        TimeQuery.is_timed_with,
        lambda wanted, rows: (
            f"taken with the kernel {_listed(row.backend or '' for row in rows)}, not "
            f"{_listed(map(wanted.backend_of, rows))}"
        ),
    ),
)
"""The conditions, in the order in which messages say what is missing."""


def applies(row: ProfileRow, device: Device, dtype: str) -> bool:
    """Whether a row was measured on such a device and precision, with the kernel used now."""
    wanted = TimeQuery(device, dtype, row.layer, row.bits, row.phase)
    return all(condition.holds(wanted, row) for condition in CONDITIONS)


@dataclass(frozen=True)
class SelectedRows:
    wanted: TimeQuery
    rows: tuple[ProfileRow, ...]
    problem: str | None


def select_rows(profiles: Sequence[ProfileRow], wanted: TimeQuery) -> SelectedRows:
    """Select rows of the very layer where there are any, else those of other models' layers with
    attention to all tokens and one MLP; of these such as were taken beside as many busy CPUs as the
    node has, or about as many. Heads are no layers.
    """
    left: Sequence[ProfileRow] = [row for row in profiles if row.layer.kind != HEAD]
    for condition in CONDITIONS:
        kept = [row for row in left if condition.holds(wanted, row)]
        if not kept:
            return SelectedRows(wanted, (), condition.problem(wanted, left) if left else "no rows")
        left = kept
    same = _with_neighbours([row for row in left if row.layer == wanted.layer], wanted.device)
    if same:
        return SelectedRows(wanted, same, None)
    plain = _with_neighbours([row for row in left if not row.layer.kind], wanted.device)
    if not plain:
        return SelectedRows(wanted, (), f"taken of {_listed(row.layer.kind for row in left)}")
    return SelectedRows(wanted, plain, f"scaled from {_listed(row.model for row in plain)}")


def _with_neighbours(rows: Sequence[ProfileRow], device: Device) -> tuple[ProfileRow, ...]:
    distances = [abs((row.beside or 0) - device.neighbours) for row in rows]
    least = min(distances, default=0)
    return tuple(row for row, own in zip(rows, distances, strict=True) if own == least)


def select_all(
    profiles: Sequence[ProfileRow],
    device: Device,
    dtype: str,
    layer: LayerTerms,
    bits: Iterable[int],
) -> list[SelectedRows]:
    return [
        select_rows(profiles, TimeQuery(device, dtype, layer, each, phase))
        for each in bits
        for phase in PHASES
    ]


def measured_bits(
    profiles: Sequence[ProfileRow], device: Device, dtype: str, layer: LayerTerms
) -> set[int]:
    """The bitwidths whose times rows tell in both phases: of the very layer where there are any."""
    found = select_all(profiles, device, dtype, layer, BITWIDTHS)
    scaled = set(BITWIDTHS) - {used.wanted.bits for used in found if not used.rows}
    return scaled - {used.wanted.bits for used in found if used.problem} or scaled


def describe_selections(
    verb: str,
    found: Sequence[SelectedRows],
    estimate: str,
    has_head: bool = False,
    lacking: Collection[int] = (),
) -> str:
    """Describe from which rows times are taken (`verb` them); else `estimate` and the reason.
    `has_head`: there are rows of LM heads too; `lacking`: bitwidths that plans leave out for want
    of rows.
    """
    rows = [row for used in found for row in used.rows]
    missing = [used for used in found if not used.rows]
    scaled = [used for used in found if used.rows and used.problem]
    parts = []
    if rows:
        sources = _listed(row.source for row in rows)
        kernels = {f"{r.backend} {r.backend_version or ''}".strip() for r in rows if r.backend}
        bits = ", ".join(map(str, sorted({row.bits for row in rows})))
        inner = "; ".join((f"bits {bits}", *sorted(kernels), *_problems(scaled)))
        of = f" of {sources}" if sources else ""
        parts.append(f"{verb} {len(rows)} profile rows{of} ({inner})")
    if missing:
        parts.append(f"{estimate} ({'; '.join(_problems(missing))})")
    if rows:
        parts.append(HEAD_TOO if has_head else f"embedding and LM head {estimate}")
    if rows and lacking:
        *more, most = map(str, sorted(lacking))
        bits = f"{', '.join(more)} and {most}" if more else most
        parts.append(f"without {bits} bit, which llmpq profile would add")
    return "; ".join(parts)


def refuse_estimates(
    profiles: Sequence[ProfileRow],
    layer: LayerTerms,
    devices: Iterable[tuple[Device, str]],
    bits: Sequence[int],
    path: str,
) -> None:
    """Raise SpecError for the first device and compute type without a time of this very layer."""
    for device, dtype in devices:
        lacking = [
            used for used in select_all(profiles, device, dtype, layer, bits) if used.problem
        ]
        if lacking:
            raise SpecError(
                f"strict_profiles: {path} has not all times of {device.name}: "
                f"{'; '.join(_problems(lacking))}; measure them with llmpq profile, leave those "
                "bits out (--bits), or plan without --strict_profiles"
            )


def _problems(found: Sequence[SelectedRows]) -> Iterator[str]:
    for problem in dict.fromkeys(used.problem for used in found):
        by_bits = {
            bits: tuple(
                u.wanted.phase for u in found if (u.problem, u.wanted.bits) == (problem, bits)
            )
            for bits in sorted({used.wanted.bits for used in found if used.problem == problem})
        }
        for phases in dict.fromkeys(by_bits.values()):
            bits = ", ".join(str(each) for each, of in by_bits.items() if of == phases)
            which = "" if phases == PHASES else f"{phases[0]} of "
            yield f"{which}bits {bits}: {problem}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))

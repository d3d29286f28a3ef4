"""Profile of devices in a CSV file: rows measured already are kept, missing ones are added."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.profiles.design import LayerWorkload, ProfileOptions, design
from planner.profiles.layer_terms import LayerTerms, kind_words
from planner.profiles.rows import ProfileRow, read_profiles, write_profiles
from planner.profiles.selection import applies
from planner.scheduling import PHASES, Phase
from quant.common.errors import SpecError
from quant.scheme import HEAD_BITWIDTHS

if TYPE_CHECKING:
    from actors.profiling.task import ProfileState, ProfileTask

Report = Callable[[str], None]
ReportParts = Callable[[int, int], None]
"""Called with how many parts are done, and of how many."""

LAYERS_PASSED = 3
"""Copies of a layer in one pass: 2 for prefill, 4 for decode (`actors.profiling.layers`)."""

LONG_S = 1.0
"""Seconds after which a workload is known well enough; those whose times agree take fewer."""

BESIDE_S = 0.5
"""Seconds of a workload beside its passes: its inputs, its cache, and the reference work."""


def devices_to_profile(cluster: ClusterSpec) -> tuple[Device, ...]:
    """One device of each kind; SpecError where they are emulated, with the host's times."""
    kinds: dict[Hashable, Device] = {}
    for device in cluster.devices:
        if device.emulated:
            raise SpecError(
                f"{device.name} is emulated: measuring it would give the times of this machine; "
                "take `emulate` out of the cluster file"
            )
        kinds.setdefault((device.accelerator.name, device.threads, device.neighbours), device)
    return tuple(kinds.values())


@dataclass(frozen=True)
class TimedKind:
    """A kind of layers that are timed, the numbers of `alike` ones (none where all are), or the LM
    head.
    """

    shape: ModelShape
    alike: tuple[int, ...]
    is_head: bool = False

    @property
    def layer(self) -> LayerTerms:
        return LayerTerms.of_head(self.shape) if self.is_head else LayerTerms.of(self.shape)

    @property
    def title(self) -> str:
        """The model, and which of its layers where they differ."""
        if self.is_head:
            return f"LM head of {self.shape.name}"
        words = self.shape.kind or kind_words(self.shape) or "other layers"
        return f"{self.shape.name}, {words}" if self.alike else self.shape.name


def timed_kinds(shape: ModelShape) -> tuple[TimedKind, ...]:
    """The kinds of layers of a model, those that take as long as one, and its head."""
    found: dict[LayerTerms, TimedKind] = {}
    shape = shape.plain
    for kind, own in enumerate(shape.kind_shapes):
        alike = tuple(n for n, each in enumerate(shape.pattern) if each == kind)
        found.setdefault(LayerTerms.of(own), TimedKind(own, alike))
    return (*found.values(), TimedKind(shape, (), is_head=True))


class Profile:
    """The CSV at `path`, which grows; `own` are accelerators that the cluster file describes."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        shape: ModelShape,
        options: ProfileOptions,
        own: Sequence[Accelerator] = (),
    ) -> None:
        self._path = path
        self._config = config
        self.kinds = timed_kinds(shape)
        self._options = options
        self._rows: tuple[ProfileRow, ...] = ()
        if path.exists():
            self._rows = read_profiles(path, torn_end=True, own=own)
        write_profiles(path, self._rows)  # a path that cannot be written is found out now

    def expected_s(self, device: Device) -> float:
        """Seconds that `measure` is expected to take, by the layer's datasheet times."""
        from actors.profiling.task import LEAST_ROUNDS

        options, dtype = self._options, device.compute_dtype(self._options.dtype)
        seconds = 0.0
        for kind in self.kinds:
            for bits, workloads in self._todo(kind, device, dtype).items():
                latency = RooflineLatency(kind.shape.with_all(head_bits=bits))
                for each in workloads:
                    sizes = (device, bits, each.batch_size, each.length, dtype)
                    if kind.is_head:
                        pass_s = latency.final_s(device, each.batch_size, dtype)
                    elif each.phase == "prefill":
                        pass_s = LAYERS_PASSED * latency.layer_prefill_s(*sizes)
                    else:
                        pass_s = LAYERS_PASSED * latency.layer_decode_s(*sizes)
                    most_s = options.rounds * pass_s
                    seconds += BESIDE_S + min(most_s, max(LEAST_ROUNDS * pass_s, LONG_S))
        return min(seconds, options.budget_s)

    def points(self, device: Device) -> int:
        dtype = device.compute_dtype(self._options.dtype)
        todo = (self._todo(kind, device, dtype) for kind in self.kinds)
        return sum(len(workloads) for own in todo for workloads in own.values())

    def measure(
        self,
        device: Device,
        report: ReportParts,
        run: Callable[[ProfileTask, Device], Iterator[ProfileState]],
    ) -> tuple[list[tuple[ProfileRow, ...]], list[ProfileState]]:
        """Measure what the file lacks of the design on `device` by `run`, writing as it goes, while
        its neighbours are busy.

        Gives, of each of the `kinds`, all its rows on the device, old and new, and the state of its
        measurement at the end. `report` is told of points, also of those that are not written yet.
        """
        from actors.profiling.task import ProfileTask

        dtype, began = device.compute_dtype(self._options.dtype), time.monotonic()
        count, before = self.points(device), 0
        states: list[ProfileState] = []
        report(0, count)
        for kind in self.kinds:
            task = ProfileTask(
                config=self._config,
                dtype=dtype,
                todo=self._todo(kind, device, dtype),
                device="cpu" if device.runs_on_cpu else "cuda",
                threads=device.threads,
                budget_s=self._options.budget_s - (time.monotonic() - began) * bool(states),
                rounds=self._options.rounds,
                seed=self._options.seed,
                usual_reference_s=_usual(states),
                alike=kind.alike,
                is_head=kind.is_head,
                beside=device.neighbours,
            )
            held = self._rows
            for state in run(task, device):
                rows = held + tuple(self._new_rows(kind, device, state, task))
                if len(rows) > len(self._rows):
                    self._rows = rows
                    write_profiles(self._path, rows)
                report(before + len(state.measured) + state.too_large + state.under_way, count)
            before += len(state.measured) + state.too_large
            states.append(state)
        return [self._rows_of(kind, device, dtype) for kind in self.kinds], states

    def _rows_of(self, kind: TimedKind, device: Device, dtype: str) -> tuple[ProfileRow, ...]:
        return tuple(
            row
            for row in self._rows
            if row.layer == kind.layer
            and applies(row, device, dtype)
            and (row.beside or 0) == device.neighbours
        )

    def _todo(
        self, kind: TimedKind, device: Device, dtype: str
    ) -> dict[int, tuple[LayerWorkload, ...]]:
        """The design of every bitwidth without what the file has."""
        options = self._options
        done = {(row.bits, workload_of(row)) for row in self._rows_of(kind, device, dtype)}
        planned = [w for phase in PHASES for w in design(options.space, phase, options.points)]
        if kind.is_head:
            planned = [LayerWorkload("decode", rows, 0) for rows in options.space.batch_sizes]
        return {
            bits: tuple(each for each in planned if (bits, each) not in done)
            for bits in (HEAD_BITWIDTHS if kind.is_head else options.bits)
        }

    def _new_rows(
        self, kind: TimedKind, device: Device, state: ProfileState, task: ProfileTask
    ) -> Iterator[ProfileRow]:
        for each in state.measured:
            workload, is_prefill = each.workload, each.workload.phase == "prefill"
            yield ProfileRow(
                device=device.accelerator.name,
                model=kind.shape.name,
                layer=kind.layer,
                intermediate_size=kind.shape.intermediate_size,
                phase=workload.phase,
                bits=each.bits,
                batch_size=workload.batch_size,
                prompt_length=workload.length if is_prefill else 1,
                context_length=0 if is_prefill else workload.length,
                seconds=each.seconds,
                backend=each.backend,
                backend_version=state.torch_version,
                dtype=task.dtype,
                threads=device.threads,
                beside=task.beside or None,
                attention_s=each.attention_s,
                experts_s=each.experts_s,
                spread=each.spread,
                repetitions=each.repetitions,
                unlike=workload.unlike,
                source=self._path.name,
            )


def _usual(states: Sequence[ProfileState]) -> Mapping[Phase, float] | None:
    """The seconds of the reference work that times of earlier kinds were corrected to."""
    found = {**states[0].usual_reference_s} if states else {}
    return found if found.keys() == {*PHASES} else None


def workload_of(row: ProfileRow) -> LayerWorkload:
    length = row.prompt_length if row.phase == "prefill" else row.context_length
    return LayerWorkload(row.phase, row.batch_size, length, unlike=row.unlike)

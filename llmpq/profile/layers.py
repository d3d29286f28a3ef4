"""Profile of devices in a CSV file: rows measured already are kept, missing ones are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.profiles.design import LayerWorkload, ProfileOptions, design
from planner.profiles.fit import applies
from planner.profiles.rows import LayerTerms, ProfileRow, read_profiles, write_profiles
from planner.scheduling import PHASES
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from actors.profiling.task import ProfileState

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
    """One device of each kind.

    Raises `SpecError` where they are emulated, as their times would be the host's.
    """
    kinds: dict[tuple[str, int | None], Device] = {}
    for device in cluster.devices:
        if device.emulated:
            raise SpecError(
                f"{device.name} is emulated: measuring it would give the times of this machine; "
                "take `emulate` out of the cluster file"
            )
        kinds.setdefault((device.accelerator.name, device.threads), device)
    return tuple(kinds.values())


def check_equal_layers(shape: ModelShape) -> None:
    """Raise SpecError where one layer of attention and an MLP does not stand for all."""
    if shape.kinds or shape.experts is not None or shape.delta is not None:
        raise SpecError(
            f"model {shape.name}: its layers differ or have experts ({shape.model_type}) and are "
            "not timed; profile a model whose layers are alike, such as qwen3-8b: its measured "
            "times correct the estimates of this one too"
        )


class Profile:
    """The CSV at `path` while it grows by rows of the model of `config` and `shape`.

    `own` are the accelerators that the cluster file describes.
    """

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
        self._shape = shape
        self._options = options
        self._rows: tuple[ProfileRow, ...] = ()
        if path.exists():
            self._rows = read_profiles(path, torn_end=True, own=own)
        write_profiles(path, self._rows)  # a path that cannot be written is found out now

    def expected_s(self, device: Device) -> float:
        """Seconds that `measure` is expected to take, by the layer's datasheet times."""
        from actors.profiling.task import LEAST_ROUNDS

        options, latency = self._options, RooflineLatency(self._shape)
        dtype = device.compute_dtype(options.dtype)
        seconds = 0.0
        for bits, workloads in self._todo(device, dtype).items():
            for each in workloads:
                sizes = (device, bits, each.batch_size, each.length, dtype)
                is_prefill = each.phase == "prefill"
                layer = latency.layer_prefill_s if is_prefill else latency.layer_decode_s
                pass_s = LAYERS_PASSED * layer(*sizes)
                most_s = options.rounds * pass_s
                seconds += BESIDE_S + min(most_s, max(LEAST_ROUNDS * pass_s, LONG_S))
        return min(seconds, options.budget_s)

    def points(self, device: Device) -> int:
        """Number of points of the design on `device` that the file lacks."""
        return sum(map(len, self._todo(device, device.compute_dtype(self._options.dtype)).values()))

    def measure(
        self, device: Device, report: ReportParts
    ) -> tuple[tuple[ProfileRow, ...], ProfileState]:
        """Measure what the file lacks of the design on `device`, writing as it goes; needs Ray.

        Gives all rows of this model on it, old and new, and the state of the measurement at its
        end. `report` is told of points, also of those that are not written yet.
        """
        from actors.profiling.on_cluster import measure_on_cluster
        from actors.profiling.task import ProfileTask

        dtype = device.compute_dtype(self._options.dtype)
        todo = self._todo(device, dtype)
        count = sum(map(len, todo.values()))
        task = ProfileTask(
            config=self._config,
            dtype=dtype,
            todo=todo,
            device="cpu" if device.runs_on_cpu else "cuda",
            threads=device.threads,
            budget_s=self._options.budget_s,
            rounds=self._options.rounds,
            seed=self._options.seed,
        )
        report(0, count)
        before = self._rows
        for state in measure_on_cluster(task, device):
            rows = before + tuple(self._new_rows(device, dtype, state))
            if len(rows) > len(self._rows):
                self._rows = rows
                write_profiles(self._path, rows)
            report(len(state.measured) + state.too_large + state.under_way, count)
        return tuple(row for row in self._rows if self._is_ours(row, device, dtype)), state

    def _todo(self, device: Device, dtype: str) -> dict[int, tuple[LayerWorkload, ...]]:
        """The design of every bitwidth without what the file has."""
        options = self._options
        done = {
            (row.bits, workload_of(row)) for row in self._rows if self._is_ours(row, device, dtype)
        }
        planned = [w for phase in PHASES for w in design(options.space, phase, options.points)]
        return {
            bits: tuple(each for each in planned if (bits, each) not in done)
            for bits in options.bits
        }

    def _is_ours(self, row: ProfileRow, device: Device, dtype: str) -> bool:
        return row.layer == LayerTerms.of(self._shape) and applies(row, device, dtype)

    def _new_rows(self, device: Device, dtype: str, state: ProfileState) -> Iterator[ProfileRow]:
        for each in state.measured:
            workload, is_prefill = each.workload, each.workload.phase == "prefill"
            yield ProfileRow(
                device=device.accelerator.name,
                model=self._shape.name,
                layer=LayerTerms.of(self._shape),
                intermediate_size=self._shape.intermediate_size,
                phase=workload.phase,
                bits=each.bits,
                batch_size=workload.batch_size,
                prompt_length=workload.length if is_prefill else 1,
                context_length=0 if is_prefill else workload.length,
                seconds=each.seconds,
                backend=each.backend,
                backend_version=state.torch_version,
                dtype=dtype,
                threads=device.threads,
                attention_s=each.attention_s,
                spread=each.spread,
                repetitions=each.repetitions,
                unlike=workload.unlike,
                source=self._path.name,
            )


def workload_of(row: ProfileRow) -> LayerWorkload:
    length = row.prompt_length if row.phase == "prefill" else row.context_length
    return LayerWorkload(row.phase, row.batch_size, length, unlike=row.unlike)

"""Measured loading of layers, in a file beside the profile of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.profiling.loading import LoadTask, MeasuredLoad
from actors.profiling.on_cluster import time_loading_on_cluster
from llmpq.profile.layers import Report
from planner.cluster.device import Device
from planner.model.shape import ModelShape
from planner.profiles.csv_table import read_table, write_table
from planner.profiles.loading import LoadRow, loading_path


@dataclass(frozen=True)
class LoadProfile:
    """The file of loads beside `profile`, of the model with these values, at these bitwidths."""

    profile: Path
    config: Mapping[str, Any]
    shape: ModelShape
    bits: tuple[int, ...]
    dtype: str = "auto"

    def measure(self, device: Device, report: Report) -> tuple[LoadRow, ...]:
        """Measure what the file lacks on `device`; its rows of this model. Needs Ray."""
        path, dtype = loading_path(self.profile), device.compute_dtype(self.dtype)
        rows = read_table(path, LoadRow) if path.exists() else ()
        todo = tuple(b for b in self.bits if b not in {r.bits for r in self._own(rows, device)})
        if todo:
            report(f"{device.accelerator.name}: loading at {', '.join(map(str, todo))} bit")
            kind = "cpu" if device.runs_on_cpu else "cuda"
            task = LoadTask(self.config, dtype, todo, kind, device.threads)
            loads = time_loading_on_cluster(task, device)
            rows += tuple(self._rows(loads, device, dtype))
            write_table(path, LoadRow, rows)
        return tuple(row for row in self._own(rows, device) if row.bits in self.bits)

    def _own(self, rows: tuple[LoadRow, ...], device: Device) -> list[LoadRow]:
        mine = (
            device.accelerator.name,
            self.shape.name,
            2 * self.shape.layer_parameters,
            device.compute_dtype(self.dtype),
            device.threads or 0,
        )
        return [
            row
            for row in rows
            if (row.device, row.model, row.checkpoint_bytes, row.dtype, row.threads) == mine
        ]

    def _rows(
        self, loads: tuple[MeasuredLoad, ...], device: Device, dtype: str
    ) -> Iterator[LoadRow]:
        for load in loads:
            yield LoadRow(
                device=device.accelerator.name,
                model=self.shape.name,
                dtype=dtype,
                threads=device.threads or 0,
                bits=load.bits,
                backend=load.backend,
                origin=load.origin,
                seconds=load.seconds,
                checkpoint_bytes=load.checkpoint_bytes,
                held_bytes=load.held_bytes,
                repetitions=load.repetitions,
            )

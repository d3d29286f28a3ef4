"""Seconds and bytes of loading a model onto the GPU at each bitwidth, from files and the cache."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from benchmarks.gpu.findings import Cell, Findings, Place
from benchmarks.gpu.measurements.models import (
    backends_here,
    note_substitutes,
    quiet,
    release,
)
from benchmarks.lab import seconds_of
from benchmarks.speed.loading import (
    Way,
    bring_into_memory,
    config_of,
    dtype_on,
    load,
    write_checkpoint,
)
from quant.common.units import MIB
from quant.linear import dtype_name
from quant.scheme import BITWIDTHS

GB = 1e9
ROUNDS = 2


def run(findings: Findings, place: Place, _: str) -> None:
    """Load a random LLaMA of some 2 GB, its files in the system's cache."""
    quiet()
    folder, tiny, cache = (place.folder / name for name in ("llama", "llama-tiny", "packed"))
    write_checkpoint(folder, config_of(*place.size((16, 2048, 32000), (3, 256, 512))))
    write_checkpoint(tiny, config_of(1, 128, 96))
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    findings.note(f"the checkpoint has {stored / GB:.2f} GB in bfloat16, one file a layer")
    bitwidths = tuple(reversed(BITWIDTHS))
    dtype = dtype_name(dtype_on(place.device))
    backends = backends_here(place, bitwidths, dtype)
    note_substitutes(findings, place, backends, dtype)
    table = findings.table(
        "", bits="{}", backend="{}", source="{}", seconds="{:.2f}", GB_per_s_of_16_bit="{:.2f}",
        held="{:.0f} MiB", peak_beyond_held="{:.0f} MiB", host_peak_so_far="{:.0f} MiB",
    )  # fmt: skip
    for bits in bitwidths:
        load(tiny, Way("tiny", bits, cold=False), cache / "tiny", place.device, backends[bits])
        for source, how in (("files", "none"), ("files, writing the cache", "write"),
                            ("the cache", "hit")):  # fmt: skip
            if bits == 16 and how != "none":
                continue
            way = Way(source, bits, cold=False, cache=how)
            rounds = place.size(ROUNDS, 1) if how != "write" else 1
            best = min(
                (_one(folder, way, cache, backends[bits], place) for _ in range(rounds)),
                key=lambda each: float(each[0] or 0),
            )
            seconds = float(best[0] or 0)
            findings.row(
                table, bits, backends[bits], source, seconds, stored / GB / seconds, *best[1:],
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )  # fmt: skip


def _one(folder: Path, way: Way, cache: Path, backend: str, place: Place) -> list[Cell]:
    """Seconds of one load; MiB that are held then, and at most beyond that meanwhile."""
    device, kept = place.device, []
    bring_into_memory([folder, cache])
    release(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        before = torch.cuda.memory_allocated(device)
    seconds = seconds_of(device, lambda: kept.append(load(folder, way, cache, device, backend)))
    if not on_gpu:
        return [seconds, None, None]
    held = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    return [seconds, held / MIB, (peak - held) / MIB]

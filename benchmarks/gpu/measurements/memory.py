"""Bytes of a stage by the planner's rules, and as torch and the driver count them.

`reserved` is what torch's allocator took from the driver, `on the device` all that the process has
on the GPU, its CUDA context included; the plan promises that neither is more than its total.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.messages import Admission, MicroBatch, Sampling, TokenRange
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from benchmarks.gpu.findings import Findings, Place
from benchmarks.gpu.measurements.models import (
    IN_TURN,
    accelerator_of,
    backends_here,
    in_turn,
    note_substitutes,
    opt_checkpoint,
    planned_device,
    quiet,
    release,
)
from planner.cluster.device import Device
from planner.costs.memory import StageEnds, StageMemory, StageWork, fixed_stage_memory
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.model.finding import model_shape
from planner.workload import MicroBatches, Workload
from quant.common.units import MIB
from quant.devices import local_processor
from quant.scheme import BITWIDTHS, FULL_BITS, HEAD_BITWIDTHS


@dataclass(frozen=True)
class _Sizes:
    """A workload and its micro-batches, in requests."""

    workload: Workload
    prefill: int
    decode: int


def run(findings: Findings, place: Place, _: str) -> None:
    """Load one stage of the whole model at 16 bit and mixed, its ends at 16 bit and at the fewest;
    prefill and decode at full size.
    """
    quiet()
    before = _used_before(findings, place)
    accelerator_of(place)
    folder, device = opt_checkpoint(place), planned_device(place)
    dtype = device.compute_dtype()
    backends = backends_here(place, BITWIDTHS, dtype)
    note_substitutes(findings, place, backends, dtype)
    workload = Workload(*place.size((32, 512, 100), (2, 16, 4)))
    sizes = _Sizes(workload, place.size(8, 1), workload.global_batch)
    if place.dry_run:
        findings.note("a CPU counts no peaks: what tensors hold stands for what is allocated")
    table = findings.table(
        f"{workload.global_batch} slots of {workload.total_length} tokens, prefill in "
        f"micro-batches of {sizes.prefill}",
        bits="{}", what="{}", planned="{:.1f} MiB", measured="{:.1f} MiB",
        measured_over_planned="{:.3f}",
    )  # fmt: skip
    layers = model_shape(folder).layers
    fewest = min(HEAD_BITWIDTHS)
    for name, bits, ends in (
        ("16", (FULL_BITS,) * layers, FULL_BITS),
        (IN_TURN, in_turn(range(layers)), FULL_BITS),
        (f"{IN_TURN}, embedding and head {fewest}", in_turn(range(layers)), fewest),
    ):
        spec = StageSpec(
            0, 1, range(layers), bits, dtype, workload.global_batch, workload.total_length,
            workload.global_batch * workload.total_length, backends, head_bits=ends,
        )  # fmt: skip
        planned = _planned(folder, device, spec, sizes)
        measured = _measured(spec, folder, place, sizes, before)
        release(place.device)
        for what, own in measured.items():
            expected = planned[what]
            findings.row(
                table, name, what, expected / MIB, None if own is None else own / MIB,
                None if own is None else own / expected,
            )  # fmt: skip
            if own is not None and own > expected:
                findings.complain(f"{name} bit: {what}: {own} bytes where the plan has {expected}")


def _planned(folder: Path, device: Device, spec: StageSpec, sizes: _Sizes) -> dict[str, int]:
    """Bytes by the planner's rules, under the names of `_measured`."""
    shape, dtype = model_shape(folder).with_all(head_bits=spec.head_bits), spec.dtype
    bits, backends = spec.bitwidths, spec.backends
    batches = MicroBatches(sizes.prefill, sizes.decode)
    work = StageWork(shape, sizes.workload, batches, dtype, quantized=min(bits) < FULL_BITS)
    fixed: StageMemory = fixed_stage_memory(work, device, StageEnds.of(0, 1))
    weights = sum(layer_weight_bytes(shape, b, device, dtype, backends[b]) for b in bits)
    cache = len(bits) * kv_cache_bytes_per_layer(shape, sizes.workload, FULL_BITS, dtype)
    total = fixed.total + weights + cache
    return {
        "weights": weights + fixed.embedding + fixed.final,
        "KV cache": cache,
        "temporary of prefill": fixed.temporary,
        "temporary of decode": fixed.temporary,
        "reserved": total,
        "on the device": total,
    }


def _measured(
    spec: StageSpec, folder: Path, place: Place, sizes: _Sizes, before: int
) -> dict[str, int | None]:
    """Bytes of a stage that is loaded and computes; None where the device does not count them."""
    device = place.device
    stage = Stage(spec, folder, device, local_processor(device))
    stats = stage.stats()
    _prefill(stage, sizes, np.arange(1))  # libraries' workspaces are the runtime's, not temporary
    prefill = _peak(place, lambda: _prefill_all(stage, sizes))
    decode = _peak(place, lambda: _decode_last(stage, sizes))
    found: dict[str, int | None] = {
        "weights": stats.weight_bytes,
        "KV cache": stats.kv_cache_bytes,
        "temporary of prefill": prefill,
        "temporary of decode": decode,
        "reserved": None,
        "on the device": None,
    }
    if device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        found["on the device"] = total - free - before
    return found


def _peak(place: Place, work: Callable[[], object]) -> int | None:
    """Most bytes of tensors during `work` beyond those before it."""
    device = place.device
    if device.type != "cuda":
        work()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


def _prefill_all(stage: Stage, sizes: _Sizes) -> None:
    """Fill every slot with a prompt, in micro-batches."""
    slots = sizes.workload.global_batch
    for first in range(0, slots, sizes.prefill):
        _prefill(stage, sizes, np.arange(first, min(first + sizes.prefill, slots)))


def _prefill(stage: Stage, sizes: _Sizes, slots: np.ndarray) -> None:
    counts = np.full(len(slots), sizes.workload.prompt_length)
    begins = slots * sizes.workload.total_length
    batch = MicroBatch(slots, np.zeros_like(slots), counts, begins, _admissions(slots, sizes))
    stage.step(batch, torch.full((int(counts.sum()),), 3))


def _decode_last(stage: Stage, sizes: _Sizes) -> None:
    """The last token of every request, which attends to all the others."""
    slots = np.arange(sizes.workload.global_batch)
    length = sizes.workload.total_length
    starts = np.full(len(slots), length - 1)
    batch = MicroBatch(slots, starts, np.ones_like(slots), slots * length)
    stage.step(batch, torch.full((len(slots),), 3))


def _admissions(slots: np.ndarray, sizes: _Sizes) -> tuple[Admission, ...]:
    sampling = Sampling(temperature=1.0, top_k=50, ignore_eos=True)
    new_tokens, length = sizes.workload.new_tokens, sizes.workload.total_length
    return tuple(
        Admission(slot, f"r{slot}", new_tokens, sampling, room=TokenRange(slot * length, length))
        for slot in slots.tolist()
    )


def _used_before(findings: Findings, place: Place) -> int:
    """Bytes that other processes hold on the GPU: asked of the driver before CUDA comes up here."""
    if place.dry_run:
        return 0
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    chosen = f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
    try:
        done = subprocess.run(
            (*query, chosen), capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        findings.note(f"the GPU is taken to be unused before: nvidia-smi does not answer: {error}")
        return 0
    return int(done.stdout.split()[0]) * MIB

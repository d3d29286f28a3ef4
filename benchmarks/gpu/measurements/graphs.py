"""Gain of CUDA graphs: a stage's decode step with its kernels started one by one, and replayed.

The whole OPT-1.3b-like model is one stage: embedding, layers and final norm; LM head and sampling,
which the runtime does not record either, are left out. *one by one*: as without graphs (option
`no_cuda_graphs`). *replayed*: as the stage does it, with what it tells the GPU of each step. *the
graph alone*: the GPU's own time, all being told. *recording*: the first step of that size. *held*:
what the driver has given out for it, temporaries of later ones included.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from actors.messages import MicroBatch
from actors.stage.decode_graphs import DecodeGraphs
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage, run_in_passes
from benchmarks.gpu.findings import Cell, Findings, Place
from benchmarks.gpu.measurements.models import (
    backends_here,
    note_substitutes,
    opt_checkpoint,
    opt_config,
    quiet,
)
from benchmarks.lab import seconds_of
from benchmarks.speed.loading import dtype_on
from quant.common.units import MIB
from quant.devices import local_processor
from quant.linear import dtype_name

REPEATS = 15
_FIRST_TOKEN = 3


class DecodeStep:
    """One token more for `requests` requests, each of which has `length` tokens."""

    def __init__(self, stage: Stage, requests: int, length: int) -> None:
        # A benchmark of what the stage does not offer: its parts are taken as they are.
        self._model, self._cache, self.graphs = stage._model, stage._cache, stage._graphs
        slots = np.arange(requests)
        begins = slots * stage.spec.max_tokens
        self._batch = MicroBatch(slots, np.full(requests, length), np.ones_like(slots), begins)
        self._ids = torch.full((requests,), _FIRST_TOKEN, device=stage.device)

    def one_by_one(self) -> Tensor:
        """Hidden states `[requests, hidden_size]`."""
        return run_in_passes(self._model, self._cache, self._batch, self._ids)

    def replayed(self, graphs: DecodeGraphs) -> Tensor:
        return graphs.compute(self._batch, self._ids)


def run(findings: Findings, place: Place, argument: str) -> None:
    """Time decode steps of several sizes at one bitwidth, with graphs and without."""
    quiet()
    bits, folder, device = int(argument), opt_checkpoint(place), place.device
    dtype = dtype_name(dtype_on(device))
    backends = backends_here(place, [bits], dtype)
    note_substitutes(findings, place, backends, dtype)
    table = findings.table(
        "", requests="{}", tokens_before="{}", one_by_one="{:.2f} ms", replayed="{:.2f} ms",
        the_graph_alone="{:.2f} ms", one_by_one_over_replayed="{:.2f}", recording="{:.2f} s",
        held="{:.0f} MiB", largest_difference="{:.2g}",
    )  # fmt: skip
    sizes = place.size(((1, 128), (8, 512), (24, 1024), (32, 1024)), ((1, 16), (3, 40)))
    most = max(requests for requests, _ in sizes), max(length for _, length in sizes) + 1
    layers = range(opt_config(place).num_hidden_layers)
    spec = StageSpec(0, 1, layers, (bits,) * len(layers), dtype, *most, most[0] * most[1], backends)
    stage = Stage(spec, folder, device, local_processor(device))
    if stage._graphs is None:
        why = "a CPU has no graphs" if place.dry_run else "this stage records none"
        findings.note(f"{why}: only steps with kernels started one by one are timed")
    with torch.inference_mode(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for requests, length in sizes:
            cells = _measured(findings, DecodeStep(stage, requests, length), place)
            findings.row(table, requests, length, *cells)
    for each in {str(each.message) for each in warned if "CUDA graphs" in str(each.message)}:
        findings.complain(each)


def _measured(findings: Findings, step: DecodeStep, place: Place) -> list[Cell]:
    wanted = step.one_by_one().clone()  # also warms up

    def milliseconds(work: Callable[[], object]) -> float:
        repeats = range(place.size(REPEATS, 2))
        return 1e3 * median(seconds_of(place.device, work) for _ in repeats)

    plain = milliseconds(step.one_by_one)
    if step.graphs is None:
        return [plain, *[None] * 6]
    free, began_s = _free_bytes(place), time.perf_counter()
    step.replayed(step.graphs)
    recording_s = time.perf_counter() - began_s
    held = free - _free_bytes(place)
    found = step.replayed(step.graphs)
    replayed = milliseconds(partial(step.replayed, step.graphs))
    kept = list(step.graphs._kept.values())
    apart = float((found.float() - wanted.float()).abs().max())
    largest = float(wanted.float().abs().max())
    if not apart <= 0.05 * largest:
        findings.complain(f"the replayed step is off by {apart:.2g} where {largest:.2g} is largest")
    return [
        plain, replayed, milliseconds(kept[-1].replay) if kept else None, plain / replayed,
        recording_s, held / MIB, apart,
    ]  # fmt: skip


def _free_bytes(place: Place) -> int:
    """Bytes that the driver could still give, all that torch has no use for given back."""
    if place.device.type != "cuda":
        return 0
    torch.cuda.synchronize(place.device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(place.device)[0]

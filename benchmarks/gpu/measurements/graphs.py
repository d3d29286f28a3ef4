"""Gain of CUDA graphs: a stage's decode step as the runtime makes it, and replayed.

The whole OPT-1.3b-like model is one stage: embedding, layers, final norm and LM head, without
sampling. *as it runs*: addresses in the KV cache are made and copied to the GPU at each step.
*addresses kept*: the same step again and again. *replayed*: that one, recorded as a graph. The
runtime has no graphs: a step's addresses and lengths are part of what is launched, so that each
length would need a graph of its own, or kernels that read lengths from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor

from actors.attention.ragged import RaggedContext
from actors.messages import MicroBatch
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage, run_decoder
from benchmarks.gpu.findings import Cell, Findings, Place
from benchmarks.gpu.measurements.models import (
    Recorder,
    backends_here,
    note_substitutes,
    opt_checkpoint,
    opt_config,
    quiet,
)
from benchmarks.lab import seconds_of
from benchmarks.speed.loading import dtype_on
from quant.devices import local_processor
from quant.linear import dtype_name

REPEATS = 15
_FIRST_TOKEN = 3


class DecodeStep:
    """One token more for `requests` requests, each of which has `length` tokens."""

    def __init__(self, stage: Stage, requests: int, length: int) -> None:
        # A benchmark of what the stage does not offer: its parts are taken as they are.
        self._model, self._cache, self._device = stage._model, stage._cache, stage.device
        slots = np.arange(requests)
        begins = slots * stage.spec.max_tokens
        self._batch = MicroBatch(slots, np.full(requests, length), np.ones_like(slots), begins)
        self._ids = torch.full((requests,), _FIRST_TOKEN, device=self._device)
        self._kept = self._context()

    def as_it_runs(self) -> Tensor:
        """Logits `[requests, vocabulary]`."""
        return self._logits(self._context())

    def addresses_kept(self) -> Tensor:
        """Logits of the same step, without copies from the host."""
        return self._logits(self._kept)

    def _context(self) -> RaggedContext:
        return RaggedContext.of(self._cache, self._batch)

    def _logits(self, context: RaggedContext) -> Tensor:
        hidden = run_decoder(self._model, context, self._ids)
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits


def run(findings: Findings, place: Place, argument: str) -> None:
    """Time decode steps of several sizes at one bitwidth, eagerly and from a graph."""
    quiet()
    bits, folder, device = int(argument), opt_checkpoint(place), place.device
    dtype = dtype_name(dtype_on(device))
    backends = backends_here(place, [bits], dtype)
    note_substitutes(findings, place, backends, dtype)
    table = findings.table(
        "", requests="{}", tokens_before="{}", as_it_runs="{:.2f} ms", addresses_kept="{:.2f} ms",
        replayed="{:.2f} ms", runs_over_replayed="{:.2f}", largest_difference="{:.2g}",
    )  # fmt: skip
    if place.dry_run:
        findings.note("a CPU has no graphs: the plain step stands for the replayed one")
    sizes = place.size(((1, 128), (8, 512), (32, 512), (32, 1024)), ((1, 16), (2, 40)))
    most = max(requests for requests, _ in sizes), max(length for _, length in sizes) + 1
    layers = range(opt_config(place).num_hidden_layers)
    spec = StageSpec(0, 1, layers, (bits,) * len(layers), dtype, *most, most[0] * most[1], backends)
    stage = Stage(spec, folder, device, local_processor(device))
    recorder = Recorder(findings, device)
    with torch.inference_mode():
        for requests, length in sizes:
            step = DecodeStep(stage, requests, length)
            cells = _measured(findings, recorder, step, place)
            findings.row(table, requests, length, *cells)


def _measured(findings: Findings, recorder: Recorder, step: DecodeStep, place: Place) -> list[Cell]:
    wanted = step.as_it_runs().clone()  # also warms up

    def milliseconds(work: Callable[[], object]) -> float:
        repeats = range(place.size(REPEATS, 2))
        return 1e3 * median(seconds_of(place.device, work) for _ in repeats)

    plain: list[float] = [milliseconds(step.as_it_runs), milliseconds(step.addresses_kept)]
    recorded = recorder.record("the step", step.addresses_kept)
    if recorded is None:
        return [*plain, None, None, None]
    recorded.replay()
    replayed = milliseconds(recorded.replay)
    apart = float((recorded.output.float() - wanted.float()).abs().max())
    largest = float(wanted.float().abs().max())
    if not apart <= 0.05 * largest:
        findings.complain(f"the replayed step is off by {apart:.2g} where {largest:.2g} is largest")
    return [*plain, replayed, plain[0] / replayed, apart]

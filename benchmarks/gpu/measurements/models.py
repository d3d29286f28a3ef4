"""Models, devices, prompts and recorded graphs that several parts use."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import OPTConfig
from transformers.utils import logging

from actors.messages import Request, Sampling
from benchmarks.gpu.findings import Findings, NotRunError, Place
from benchmarks.lab import Captured, captured
from benchmarks.speed.loading import write_checkpoint
from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.device import Device
from quant.backends.table import KERNEL_RULES, backend_name
from quant.common.errors import SpecError
from quant.common.units import GIB
from quant.devices import local_processor
from quant.scheme import BITWIDTHS, LinearShape

IN_TURN = f"{'/'.join(map(str, BITWIDTHS))} in turn"
DRY_MEMORY_GIB = 4


def quiet() -> None:
    """No progress bars in the logs."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def opt_config(place: Place) -> OPTConfig:
    """OPT-1.3b, or a small OPT."""
    hidden, layers = place.size((2048, 24), (128, 4))
    return OPTConfig(
        hidden_size=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        word_embed_proj_dim=hidden,
        vocab_size=place.size(50272, 512),
        max_position_embeddings=place.size(2048, 256),
        architectures=["OPTForCausalLM"],
        dtype="bfloat16",
    )


def opt_checkpoint(place: Place) -> Path:
    """The folder of a random checkpoint of `opt_config`, which the first to ask writes."""
    folder = place.folder / "opt"
    if not folder.exists():
        unfinished = place.folder / "opt.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_checkpoint(unfinished, opt_config(place))
        unfinished.rename(folder)
    return folder


def accelerator_of(place: Place, number: int = 0) -> Accelerator:
    """The registry's entry of a GPU here; NotRunError for one that the planner does not know."""
    if place.dry_run:
        return find_accelerator("CPU")
    name = torch.cuda.get_device_name(number)
    try:
        return find_accelerator(name)
    except SpecError as error:
        raise NotRunError(
            f"the planner does not know {name!r} ({error}); add its datasheet to "
            f"planner/cluster/accelerators.toml, with {name.replace(' ', '_')!r} among the aliases"
        ) from error


def planned_device(place: Place, number: int = 0) -> Device:
    """A device here as the planner sees it."""
    accelerator = accelerator_of(place, number)
    memory_bytes = accelerator.usable_memory_bytes or DRY_MEMORY_GIB * GIB
    threads = torch.get_num_threads() if place.dry_run else None
    link = accelerator.link_bytes_per_s
    return Device(accelerator, "here", number, memory_bytes, link, threads)


def backends_here(place: Place, bitwidths: Sequence[int], dtype: str) -> Mapping[int, str]:
    """Kernel backend of each bitwidth: the preferred one, without bitsandbytes the next best."""
    processor = local_processor(place.device)
    if importlib.util.find_spec("bitsandbytes"):
        return {bits: backend_name(processor, bits, dtype) for bits in set(bitwidths)}
    usual = LinearShape(in_features=4096, out_features=4096)
    return {
        bits: next(
            rule.name
            for rule in KERNEL_RULES
            if rule.bits == bits
            and not rule.name.startswith("bnb")
            and rule.supports(processor, usual, dtype)
        )
        for bits in set(bitwidths)
    }


def note_substitutes(
    findings: Findings, place: Place, backends: Mapping[int, str], dtype: str
) -> None:
    """Say which backends stand in for preferred ones, whose times the planner estimates."""
    processor = local_processor(place.device)
    for bits, used in sorted(backends.items()):
        preferred = backend_name(processor, bits, dtype)
        if used != preferred:
            findings.note(
                f"{bits} bit runs with {used}, as bitsandbytes is missing; estimates are those "
                f"of {preferred}"
            )


def in_turn(layers: Iterable[int]) -> tuple[int, ...]:
    """Bits of layers by their numbers: all there are, one after another."""
    return tuple(BITWIDTHS[layer % len(BITWIDTHS)] for layer in layers)


def requests_of(count: int, prompt: int, new_tokens: int, vocabulary: int) -> list[Request]:
    """Random prompts of one length that all generate `new_tokens`."""
    draw = np.random.default_rng(0)
    sampling = Sampling(ignore_eos=True)
    return [
        Request(f"r{i}", tuple(draw.integers(3, vocabulary, prompt).tolist()), new_tokens, sampling)
        for i in range(count)
    ]


def release(device: torch.device) -> None:
    """Give back what models that are no longer used have left, and forget the peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def one_thread_a_stage() -> int:
    """Threads that each of two CPU stages may have."""
    return max(1, (os.cpu_count() or 2) // 2)


class Recorder:
    """Says in `findings` what cannot be recorded, and why; then it records no more.

    torch's allocator may not notice that a broken capture has ended, and refuses the next one.
    """

    def __init__(self, findings: Findings, device: torch.device) -> None:
        self._findings = findings
        self._device = device
        self._broken = False

    def record(self, what: str, work: Callable[[], Any]) -> Captured | None:
        """`work` as a graph; None where that is not possible."""
        if self._broken:
            return None
        try:
            return captured(self._device, work)
        except RuntimeError as error:
            self._broken = True
            reason = str(error).partition("\n")[0]
            self._findings.note(
                f"{what} cannot be recorded as a graph: {reason}; nothing is recorded after it"
            )
            return None

"""How decoder layers of random weights load on this process's device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from actors.processes.device import device_here
from actors.profiling.layers import LARGE_LAYER_BYTES, WEIGHT_SCALE, middle_stage, stack_of
from actors.stage.ends import path_of
from actors.stage.model_config import config_of_values, with_layers
from actors.stage.partial_model import architecture_of
from planner.profiles.links import Origin
from quant.backends.table import backend_name
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.devices import local_processor
from quant.linear import LayerForm, prepack_linears
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, loading, module_nbytes
from quant.scheme import FULL_BITS

_SMALL, _LARGE = (4, 3), (2, 1)  # layers of the checkpoint, and loads whose median counts


@dataclass(frozen=True)
class LoadTask:
    """The bitwidths at which to load a layer of the model of `config`.

    `threads` None: as many as torch takes.
    """

    config: Mapping[str, Any]
    dtype: str
    bits: tuple[int, ...]
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class MeasuredLoad:
    """Median `seconds` of a layer of `checkpoint_bytes`, which then holds `held_bytes`; where they
    differ, means of the first layers.
    """

    bits: int
    origin: Origin
    backend: str
    seconds: float
    checkpoint_bytes: int
    held_bytes: int
    repetitions: int


def time_loading(task: LoadTask) -> tuple[MeasuredLoad, ...]:
    """Time how decoder layers load on this process's device: quantized from a checkpoint, or packed
    from the cache.

    The checkpoint has random weights and lies in a temporary folder. Its files are in the system's
    cache: a disk that reads more slowly than layers are loaded adds the difference.
    """
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory(prefix="llmpq-profile-") as folder:
        return tuple(_Loads(task, Path(folder)).measured())


def _bytes_of_layer(config: PretrainedConfig) -> int:
    """Mean bytes of the layers of `config` in 16 bits."""
    stack = stack_of(middle_stage(config))
    return 2 * sum(parameter.numel() for parameter in stack.parameters()) // len(stack)


class _Loads:
    """A checkpoint of a few layers, and its loads."""

    def __init__(self, task: LoadTask, folder: Path) -> None:
        self._task, self._folder = task, folder
        config = config_of_values(task.config)
        is_large = _bytes_of_layer(with_layers(config, 1)) > LARGE_LAYER_BYTES
        layers, self._turns = _LARGE if is_large else _SMALL
        self._config = with_layers(config, layers)
        self.checkpoint_bytes = _bytes_of_layer(self._config)
        self._write(torch.Generator().manual_seed(task.seed))

    def measured(self) -> Iterator[MeasuredLoad]:
        """Load every bitwidth from the checkpoint, and from the cache where it would be cached."""
        for bits in self._task.bits:
            yield self._median(bits, "checkpoint", None)
            if bits != FULL_BITS:
                cache = ShardCache(self._folder / "cache", None)
                self._load(bits, cache)  # writes it
                yield self._median(bits, "cache", cache)

    def _median(self, bits: int, origin: Origin, cache: ShardCache | None) -> MeasuredLoad:
        self._load(bits, cache)  # warms up
        loads = [self._load(bits, cache) for _ in range(self._turns)]
        form = self._form(bits)
        return MeasuredLoad(
            bits,
            origin,
            backend_name(form.processor, bits, self._task.dtype),
            float(np.median([seconds for seconds, _ in loads])),
            self.checkpoint_bytes,
            loads[0][1],
            self._turns,
        )

    def _form(self, bits: int) -> LayerForm:
        device = device_here(self._task.device)
        dtype: torch.dtype = getattr(torch, self._task.dtype)
        return LayerForm(bits, local_processor(device), dtype, device)

    def _load(self, bits: int, cache: ShardCache | None) -> tuple[float, int]:
        """Seconds in which a stage would load a layer, and the bytes that the layer holds."""
        form, checkpoint = self._form(bits), Checkpoint(self._folder)
        model = middle_stage(self._config)
        stack = stack_of(model)
        path = path_of(model, stack)
        own = architecture_of(self._config).linears
        loads = [
            LayerLoad(layer, f"{path}.{index}", form, quantized=own)
            for index, layer in enumerate(stack)
        ]
        began = time.perf_counter()
        with loading(loads, [], checkpoint, cache):
            for load in loads:
                load_layer(load, checkpoint, cache)
                prepack_linears(load.module, form.processor)
        if form.device.type == "cuda":
            torch.cuda.synchronize(form.device)
        seconds = (time.perf_counter() - began) / len(loads)
        return seconds, sum(module_nbytes(load.module) for load in loads) // len(loads)

    def _write(self, generator: torch.Generator) -> None:
        model = middle_stage(self._config)
        stack = stack_of(model)
        path = path_of(model, stack)
        tensors = {
            f"{path}.{name}": (
                torch.randn(tensor.shape, generator=generator).mul_(WEIGHT_SCALE).bfloat16()
            )
            for name, tensor in stack.state_dict(keep_vars=True).items()
        }
        save_file(tensors, self._folder / SINGLE_FILE)

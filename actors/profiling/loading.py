"""Timing how decoder layers load: quantized from a checkpoint, or packed from the cache.

The checkpoint has random weights and lies in a temporary folder. Its files are in the system's
cache: a disk that reads more slowly than layers are loaded adds the difference.
"""

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
from transformers import PretrainedConfig, PreTrainedModel

from actors.processes.device import device_here
from actors.stage.model_config import config_of_values, with_layers
from actors.stage.partial_model import architecture_of, empty_model, keep_stage
from actors.stage.shard import path_of
from planner.profiles.links import Origin
from quant.backends.table import backend_name
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.devices import local_processor
from quant.linear import LayerForm, prepack_linears
from quant.loading.cache_folder import ShardCache
from quant.loading.loader import LayerLoad, load_layer, loading, module_nbytes
from quant.scheme import FULL_BITS

_SMALL, _LARGE = (4, 3), (2, 1)  # layers of the checkpoint, and loads whose median counts
_LARGE_LAYER_BYTES = 256 * 2**20
_WEIGHT_SCALE = 0.02


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
    """Median `seconds` of a layer of `checkpoint_bytes`, which then holds `held_bytes`."""

    bits: int
    origin: Origin
    backend: str
    seconds: float
    checkpoint_bytes: int
    held_bytes: int
    repetitions: int


def time_loading(task: LoadTask) -> tuple[MeasuredLoad, ...]:
    """Measure on this process's device."""
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory(prefix="llmpq-profile-") as folder:
        return tuple(_Loads(task, Path(folder)).measured())


class _Loads:
    """A checkpoint of a few layers, and its loads."""

    def __init__(self, task: LoadTask, folder: Path) -> None:
        self._task, self._folder = task, folder
        config = config_of_values(task.config)
        one = _bytes_of(_stage(with_layers(config, 1)))
        self._layers, self._turns = _LARGE if one > _LARGE_LAYER_BYTES else _SMALL
        self._config = with_layers(config, self._layers)
        self.checkpoint_bytes = one
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
        model, form, checkpoint = _stage(self._config), self._form(bits), Checkpoint(self._folder)
        path = _stack_path(model)
        loads = [
            LayerLoad(layer, f"{path}.{index}", form)
            for index, layer in enumerate(model.get_submodule(path).children())
        ]
        began = time.perf_counter()
        with loading(loads, [], checkpoint, cache):
            for load in loads:
                load_layer(load, checkpoint, cache)
                prepack_linears(load.module, form.processor)
        if form.device.type == "cuda":
            torch.cuda.synchronize(form.device)
        seconds = (time.perf_counter() - began) / len(loads)
        return seconds, module_nbytes(loads[0].module)

    def _write(self, generator: torch.Generator) -> None:
        model = _stage(self._config)
        path = _stack_path(model)
        tensors = {
            f"{path}.{name}": (
                torch.randn(parameter.shape, generator=generator).mul_(_WEIGHT_SCALE).bfloat16()
            )
            for name, parameter in model.get_submodule(path).named_parameters()
        }
        save_file(tensors, self._folder / SINGLE_FILE)


def _stage(config: PretrainedConfig) -> PreTrainedModel:
    """A middle stage of all layers of `config`, without memory."""
    model = empty_model(config)
    keep_stage(model, range(config.num_hidden_layers), False, False, has_head=False)
    return model


def _stack_path(model: PreTrainedModel) -> str:
    decoder = model.get_decoder()
    return f"{path_of(model, decoder)}.{architecture_of(model.config).layers}"


def _bytes_of(model: PreTrainedModel) -> int:
    """Bytes of the first layer in 16 bits."""
    first = next(iter(model.get_submodule(_stack_path(model)).children()))
    return 2 * sum(parameter.numel() for parameter in first.parameters())

"""Decoder layers of random weights on this process's device: as they run, and as they load."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention.kv_cache import CacheForm, KVCache
from actors.attention.timer import AttentionTimer
from actors.messages import MicroBatch, TokenIds
from actors.processes.device import device_here
from actors.stage.decode_graphs import DecodeGraphs, decode_graphs
from actors.stage.layer_cache import cache_shape, make_cache
from actors.stage.model_config import config_of_values, with_layers
from actors.stage.own_layers import put_own_layers
from actors.stage.partial_model import PassThrough, architecture_of, empty_model, keep_stage
from actors.stage.shard import path_of
from actors.stage.stage import run_in_passes
from planner.profiles.design import LayerWorkload
from planner.profiles.links import Origin
from quant.backends.table import backend_name
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.devices import local_processor
from quant.linear import LayerForm, prepack_linears, quantize_linear
from quant.loading.cache_folder import ShardCache
from quant.loading.cached_layer import put_submodule
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, loading, module_nbytes
from quant.scheme import FULL_BITS

# Decode passes take a millisecond a layer, of which the cost beside the layers is a notable share.
# Prefill passes take so long that it is none.
_DECODE_COPIES, _PREFILL_COPIES = 4, 2
_LARGE_LAYER_BYTES = 256 * 2**20  # a pass through two of these takes as long as several small ones
_WEIGHT_SCALE = 0.02  # as models are initialised


@dataclass(frozen=True)
class PreparedWorkload:
    """A pass to be timed: `inputs` `[tokens, hidden_size]`, a filled cache of `copies` layers, and
    what records it, as a stage has it for decode steps.
    """

    batch: MicroBatch
    cache: KVCache
    inputs: Tensor
    copies: int
    graphs: DecodeGraphs | None = None


class TimedLayers:
    """Copies of the decoder layer of `config` in one form, without a checkpoint; each holds
    `weight_bytes`.

    A few copies run in a row by the code of a stage, so that the cost of a pass beside its layers
    is spread over them as in a stage.
    """

    def __init__(self, config: PretrainedConfig, form: LayerForm, seed: int = 0) -> None:
        self._form = form
        self._generator = torch.Generator().manual_seed(seed)
        self._model = _middle_stage(with_layers(config, _DECODE_COPIES))
        rotary = getattr(self._model.get_decoder(), "rotary_emb", None)
        if rotary is not None:
            rotary.to(form.device)
        self._layers = list(_stack(self._model))
        self._fill(self._layers[0])
        self.weight_bytes = module_nbytes(self._layers[0])
        if self.weight_bytes > _LARGE_LAYER_BYTES:
            del self._layers[_PREFILL_COPIES:]
        for layer in self._layers[1:]:
            self._fill(layer)
        own = range(len(self._layers))
        cache = make_cache(config, own, 0, CacheForm(form.dtype, form.device))
        put_own_layers(self._model, own, cache, form.dtype)
        self._layers = list(_stack(self._model))[: len(own)]

    @torch.inference_mode()
    def prepare(self, workload: LayerWorkload) -> PreparedWorkload:
        """Make inputs, keys and values for `workload`, and pass once to warm up."""
        copies = len(self._layers) if workload.phase == "decode" else _PREFILL_COPIES
        batch = _micro_batch(workload)
        tokens = int(batch.counts.sum())
        inputs = torch.randn(tokens, self._model.config.hidden_size, generator=self._generator)
        prepared = PreparedWorkload(
            batch=batch,
            cache=self._filled_cache(workload, copies),
            inputs=inputs.to(self._form.device, self._form.dtype),
            copies=copies,
        )
        if workload.phase == "decode":
            self._use(copies)
            eager = partial(run_in_passes, self._model, prepared.cache)
            graphs = decode_graphs(
                self._model, prepared.cache, self._form.dtype, max(workload.lengths) + 1, eager
            )
            prepared = replace(prepared, graphs=graphs)
        self.pass_through(prepared)
        return prepared

    @torch.inference_mode()
    def pass_through(self, prepared: PreparedWorkload, timer: AttentionTimer | None = None) -> None:
        """Pass once through `prepared.copies` layers, as a stage does; `timer` times attention, in
        layers whose kernels are started one by one.
        """
        self._use(prepared.copies)
        if prepared.graphs is not None and timer is None:
            prepared.graphs.compute(prepared.batch, prepared.inputs)
            return
        run_in_passes(self._model, prepared.cache, prepared.batch, prepared.inputs, timer)

    def kv_bytes(self, workload: LayerWorkload) -> int:
        """Bytes of keys and values that `prepare` will allocate."""
        copies = len(self._layers) if workload.phase == "decode" else _PREFILL_COPIES
        shape = cache_shape(self._model.config, range(copies), workload.tokens)
        numbers = sum(heads * width for heads, width in shape.heads(range(copies)).values())
        element = torch.empty(0, dtype=self._form.dtype).element_size()
        return 2 * workload.tokens * numbers * element

    def _fill(self, layer: nn.Module) -> None:
        """Give `layer` random weights in the form."""
        form = self._form
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                weight = self._random(linear.weight.shape).to(torch.bfloat16)
                bias = None if linear.bias is None else self._random(linear.bias.shape)
                filled = quantize_linear(weight, bias, form)
                put_submodule(layer, name, filled)
        for owner in layer.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.is_meta:  # norms
                    ones = torch.ones(parameter.shape, dtype=form.dtype, device=form.device)
                    setattr(owner, name, nn.Parameter(ones, requires_grad=False))
        prepack_linears(layer, form.processor)

    def _random(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator) * _WEIGHT_SCALE

    def _use(self, copies: int) -> None:
        """Let the first `copies` layers run and pass through the others."""
        stack = _stack(self._model)
        tupled = architecture_of(self._model.config).layer_returns_tuple
        for index in range(len(stack)):
            stack[index] = self._layers[index] if index < copies else PassThrough(tupled)

    def _filled_cache(self, workload: LayerWorkload, copies: int) -> KVCache:
        """A cache with random keys and values of earlier tokens, in ranges as long as needed."""
        form, rooms = self._form, _rooms(workload)
        held = CacheForm(form.dtype, form.device, slots=workload.batch_size)
        cache = make_cache(self._model.config, range(copies), int(rooms.sum()), held)
        if workload.phase == "prefill":
            return cache
        longest = max(workload.lengths)
        begins = (np.cumsum(rooms) - rooms).tolist()
        for layer in cache.holding_layers:
            heads, _, width = cache.of_layer(layer)[0].numbers.shape
            made = torch.randn(longest, heads, width, generator=self._generator)
            made = made.to(form.device, form.dtype)
            for slot, (begin, past) in enumerate(zip(begins, workload.lengths, strict=True)):
                where = cache.addresses(MicroBatch(*np.array([[slot], [0], [past], [begin]])))
                cache.append(layer, where, made[:past], made[:past])
        return cache


def _middle_stage(config: PretrainedConfig) -> PreTrainedModel:
    """A middle stage of all layers of `config`, without memory."""
    model = empty_model(config)
    keep_stage(model, range(config.num_hidden_layers), False, False, has_head=False)
    return model


def _micro_batch(workload: LayerWorkload) -> MicroBatch:
    requests, lengths = workload.batch_size, np.array(workload.lengths)
    is_prefill = workload.phase == "prefill"
    rooms = _rooms(workload)
    return MicroBatch(
        slots=np.arange(requests),
        starts=np.zeros_like(lengths) if is_prefill else lengths,
        counts=lengths if is_prefill else np.ones_like(lengths),
        begins=np.cumsum(rooms) - rooms,
    )


def _rooms(workload: LayerWorkload) -> TokenIds:
    """Token slots of each request [requests]."""
    return np.array(workload.lengths) + (workload.phase == "decode")


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
    """Median `seconds` of a layer of `checkpoint_bytes`, which then holds `held_bytes`."""

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


class _Loads:
    """A checkpoint of a few layers, and its loads."""

    def __init__(self, task: LoadTask, folder: Path) -> None:
        self._task, self._folder = task, folder
        config = config_of_values(task.config)
        layer = _stack(_middle_stage(with_layers(config, 1)))[0]
        one = 2 * sum(parameter.numel() for parameter in layer.parameters())  # in 16 bits
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
        form, checkpoint = self._form(bits), Checkpoint(self._folder)
        model = _middle_stage(self._config)
        stack = _stack(model)
        path = path_of(model, stack)
        loads = [LayerLoad(layer, f"{path}.{index}", form) for index, layer in enumerate(stack)]
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
        model = _middle_stage(self._config)
        stack = _stack(model)
        path = path_of(model, stack)
        tensors = {
            f"{path}.{name}": (
                torch.randn(parameter.shape, generator=generator).mul_(_WEIGHT_SCALE).bfloat16()
            )
            for name, parameter in stack.named_parameters()
        }
        save_file(tensors, self._folder / SINGLE_FILE)


def _stack(model: PreTrainedModel) -> nn.ModuleList:
    stack: nn.ModuleList = getattr(model.get_decoder(), architecture_of(model.config).layers)
    return stack

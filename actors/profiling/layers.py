"""Decoder layers of random weights on this process's device, ready to be timed; no checkpoint.

A few copies of a layer run in a row by the code of a stage, so that the cost of a pass beside its
layers is spread over them as in a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention.kv_cache import CacheForm, KVCache
from actors.attention.ragged import AttentionTimer
from actors.messages import MicroBatch, TokenIds
from actors.stage.model_config import with_layers
from actors.stage.partial_model import PassThrough, architecture_of, empty_model, keep_stage
from actors.stage.stage import kv_shape, make_cache, run_in_passes
from planner.profiles.design import LayerWorkload
from quant.linear import LayerForm, prepack_linears, quantize_linear
from quant.loading.cached_layer import put_submodule
from quant.loading.loader import module_nbytes

# Decode passes take a millisecond a layer, of which the cost beside the layers is a notable share.
# Prefill passes take so long that it is none.
_DECODE_COPIES, _PREFILL_COPIES = 4, 2
_LARGE_LAYER_BYTES = 256 * 2**20  # a pass through two of these takes as long as several small ones
_WEIGHT_SCALE = 0.02  # as models are initialised


@dataclass(frozen=True)
class PreparedWorkload:
    """A pass to be timed: `inputs` `[tokens, hidden_size]`, a filled cache of `copies` layers."""

    batch: MicroBatch
    cache: KVCache
    inputs: Tensor
    copies: int


class TimedLayers:
    """Copies of the decoder layer of `config` in one form; each holds `weight_bytes`."""

    def __init__(self, config: PretrainedConfig, form: LayerForm, seed: int = 0) -> None:
        self._form = form
        self._generator = torch.Generator().manual_seed(seed)
        self._model, self._layers = self._empty_layers(config)
        self._fill(self._layers[0])
        self.weight_bytes = module_nbytes(self._layers[0])
        if self.weight_bytes > _LARGE_LAYER_BYTES:
            del self._layers[_PREFILL_COPIES:]
        for layer in self._layers[1:]:
            self._fill(layer)

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
        self.pass_through(prepared)
        return prepared

    @torch.inference_mode()
    def pass_through(self, prepared: PreparedWorkload, timer: AttentionTimer | None = None) -> None:
        """Pass once through `prepared.copies` layers, as a stage does; `timer` times attention."""
        self._use(prepared.copies)
        run_in_passes(self._model, prepared.cache, prepared.batch, prepared.inputs, timer)

    def kv_bytes(self, workload: LayerWorkload) -> int:
        """Bytes of keys and values that `prepare` will allocate."""
        config = self._model.config
        copies = len(self._layers) if workload.phase == "decode" else _PREFILL_COPIES
        kv_heads, width = kv_shape(config)
        element = torch.empty(0, dtype=self._form.dtype).element_size()
        return 2 * copies * workload.tokens * kv_heads * width * element

    def _empty_layers(self, config: PretrainedConfig) -> tuple[PreTrainedModel, list[nn.Module]]:
        """A middle stage of the most layers that a pass needs, without memory."""
        model = empty_model(with_layers(config, _DECODE_COPIES))
        keep_stage(model, range(_DECODE_COPIES), is_first=False, is_last=False, has_head=False)
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if rotary is not None:
            rotary.to(self._form.device)
        return model, list(self._stack(model))

    @staticmethod
    def _stack(model: PreTrainedModel) -> Any:
        return getattr(model.get_decoder(), architecture_of(model.config).layers)

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
        stack = self._stack(self._model)
        tupled = architecture_of(self._model.config).layer_returns_tuple
        for index in range(len(stack)):
            stack[index] = self._layers[index] if index < copies else PassThrough(tupled)

    def _filled_cache(self, workload: LayerWorkload, copies: int) -> KVCache:
        """A cache with random keys and values of earlier tokens, in ranges as long as needed."""
        form, rooms = self._form, _rooms(workload)
        held = CacheForm(form.dtype, form.device)
        cache = make_cache(self._model.config, range(copies), int(rooms.sum()), held)
        if workload.phase == "prefill":
            return cache
        longest = max(workload.lengths)
        made = torch.randn(longest, *kv_shape(self._model.config), generator=self._generator)
        made = made.to(form.device, form.dtype)
        begins = (np.cumsum(rooms) - rooms).tolist()
        for slot, (begin, past) in enumerate(zip(begins, workload.lengths, strict=True)):
            where = cache.addresses(MicroBatch(*np.array([[slot], [0], [past], [begin]])))
            for layer in range(copies):
                cache.append(layer, where, made[:past], made[:past])
        return cache


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

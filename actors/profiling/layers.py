"""Decoder layers of random weights as they run on this process's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention.delta.states import delta_mixer, layers_with_states
from actors.attention.kv_cache import CacheForm, KVCache
from actors.attention.timer import AttentionTimer
from actors.messages import MicroBatch, TokenIds
from actors.stage.decode_graphs import DecodeGraphs, decode_graphs
from actors.stage.layer_cache import SharedKeys, cache_shape, make_cache
from actors.stage.layers.own_layers import put_own_layers
from actors.stage.model_config import with_layers
from actors.stage.partial_model import (
    PassThrough,
    architecture_of,
    empty_model,
    keep_stage,
    numbers_of_layers,
)
from actors.stage.stage import run_in_passes
from planner.profiles.design import LayerWorkload
from quant.experts import (
    ExpertWeights,
    QuantizedExperts,
    expert_shapes,
    is_experts,
    packed_expert,
)
from quant.linear import LayerForm, prepack_linears, quantize_linear
from quant.loading.cached_layer import put_submodule
from quant.loading.expert_tensors import experts_like
from quant.loading.layer_load import held_dtype, plain_linears
from quant.loading.loader import module_nbytes
from quant.scheme import FULL_BITS

# Decode passes take a millisecond a layer, of which the cost beside the layers is a notable share.
# Prefill passes take so long that it is none; long ones are passed through one layer.
_DECODE_COPIES, _PREFILL_COPIES = 4, 2
_LONG_PREFILL_TOKENS = 256
LARGE_LAYER_BYTES = 256 * 2**20  # a pass through two of these takes as long as several small ones
WEIGHT_SCALE = 0.02  # as models are initialised


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
    `weight_bytes`. `alike`: the numbers of those layers of the model that are meant, where not all
    are alike.

    A few copies run in a row by the code of a stage, so that the cost of a pass beside its layers
    is spread over them as in a stage. Routers have random weights, so that random inputs ask all
    experts about as often.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        form: LayerForm,
        seed: int = 0,
        alike: Sequence[int] = (),
    ) -> None:
        self._form = form = replace(form, rounding="nearest")  # of which no time depends
        self._generator = torch.Generator().manual_seed(seed)
        config = config if alike else with_layers(config, _DECODE_COPIES)
        own = longest_range(alike) if alike else range(_DECODE_COPIES)
        self._model = middle_stage(config)
        rotary = getattr(self._model.get_decoder(), "rotary_emb", None)
        if rotary is not None:
            rotary.to(form.device)
        decoder = self._model.get_decoder()
        if numbers_of_layers(config):  # which later layers need, and these would only copy
            setattr(decoder, architecture_of(config).final[0], nn.Identity())
        stack = stack_of(self._model)
        self._fill(stack[own[0]])
        self.weight_bytes = module_nbytes(stack[own[0]])
        if self.weight_bytes > LARGE_LAYER_BYTES:
            own = own[:_PREFILL_COPIES]
        for index in own[1:]:
            self._fill(stack[index])
        cache = make_cache(config, own, 0, self._cache_form(0))
        put_own_layers(self._model, own, cache, form.dtype)
        self._own, self._layers = own, [stack[index] for index in own]
        self.held_bytes = len(own) * self.weight_bytes
        self._experts_timer: AttentionTimer | None = None
        self._time_experts()
        self._shared = SharedKeys.of(config)
        if self._shared.numbers:
            decoder.register_forward_pre_hook(self._with_shared, with_kwargs=True)

    @torch.inference_mode()
    def prepare(self, workload: LayerWorkload) -> PreparedWorkload:
        """Make inputs, keys and values for `workload`, and pass once to warm up."""
        copies, batch = self._copies(workload), _micro_batch(workload)
        tokens, config = int(batch.counts.sum()), self._model.config
        width = config.hidden_size + numbers_of_layers(config)
        inputs = torch.randn(tokens, width, generator=self._generator)
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
    def pass_through(
        self,
        prepared: PreparedWorkload,
        timer: AttentionTimer | None = None,
        experts: AttentionTimer | None = None,
    ) -> None:
        """Pass once through `prepared.copies` layers, as a stage does; `timer` times attention, in
        layers whose kernels are started one by one, and `experts` these.
        """
        self._use(prepared.copies)
        self._experts_timer = experts
        if prepared.graphs is not None and timer is None:
            prepared.graphs.compute(prepared.batch, prepared.inputs)
            return
        run_in_passes(self._model, prepared.cache, prepared.batch, prepared.inputs, timer)

    def kv_bytes(self, workload: LayerWorkload) -> int:
        """Bytes of keys, values and states that `prepare` will allocate."""
        config, own = self._model.config, self._own[: self._copies(workload)]
        shape = cache_shape(config, own, workload.tokens, alone=True)
        element = torch.empty(0, dtype=self._form.dtype).element_size()
        found = workload.tokens * shape.elements(own) * element
        stateful = layers_with_states(config, own)
        if not stateful:
            return found
        mixer = delta_mixer(config)
        state = 4 * mixer.state_elements + element * mixer.conv_elements
        return found + len(stateful) * workload.batch_size * state

    def _copies(self, workload: LayerWorkload) -> int:
        if workload.phase == "decode":
            return len(self._own)
        long = workload.tokens >= _LONG_PREFILL_TOKENS and self._form.device.type == "cpu"
        return 1 if long else len(self._own[:_PREFILL_COPIES])

    def _cache_form(self, slots: int) -> CacheForm:
        return CacheForm(self._form.dtype, self._form.device, slots=slots, alone=True)

    def _fill(self, layer: nn.Module) -> None:
        """Give `layer` random weights in the form, those of routers and gates in the type."""
        form, architecture = self._form, architecture_of(self._model.config)
        plain = replace(form, bits=FULL_BITS, backend=None)
        for name, linear in plain_linears(layer):
            weight = self._random(linear.weight.shape).to(torch.bfloat16)
            bias = None if linear.bias is None else self._random(linear.bias.shape)
            own = form if name in architecture.linears else plain
            put_submodule(layer, name, quantize_linear(weight, bias, own))
        for name, module in list(layer.named_modules()):
            if is_experts(module):
                put_submodule(layer, name, self._experts(name, module))
        for owner in layer.modules():
            kept = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
            for name, tensor in kept:
                if tensor.is_meta:
                    setattr(owner, name, self._plain(name, tensor))
        prepack_linears(layer, form.processor)

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        """What stands in for a tensor beside linears and experts: ones for norms and factors."""
        ones = torch.ones(tensor.shape) if tensor.dim() < 2 else self._random(tensor.shape)
        made = ones.to(self._form.device, held_dtype(name, tensor, self._form.dtype))
        return nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made

    def _experts(self, name: str, module: nn.Module) -> QuantizedExperts:
        """Experts like the fused `module`, all of the same random weights, each with its own
        copy.
        """
        form, held = self._form, list[ExpertWeights]()
        count, *shapes = expert_shapes(module)
        for shape in shapes:
            weights = ExpertWeights(shape, count)
            random = self._random(torch.Size((shape.out_features, shape.in_features))).bfloat16()
            for _ in range(count):
                weights.add(packed_expert(random, form, name, None), form.dtype)
            held.append(weights)
        return experts_like(module, held[0], held[1], form)

    def _time_experts(self) -> None:
        """Have experts enter and leave the timer of a pass, where it has one."""

        def enter(*_: object) -> None:
            if self._experts_timer is not None:
                self._experts_timer.__enter__()

        def leave(*_: object) -> None:
            if self._experts_timer is not None:
                self._experts_timer.__exit__()

        for module in (each for layer in self._layers for each in layer.modules()):
            if isinstance(module, QuantizedExperts):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def _with_shared(
        self, _: nn.Module, arguments: tuple[object, ...], named: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """Hand on the keys and values that an earlier layer would have made."""
        like = named["inputs_embeds"][0]
        numbers = like.new_ones(len(like), self._shared.numbers)
        return arguments, {**named, "shared_kv_states": self._shared.unpacked(numbers)}

    def _random(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator) * WEIGHT_SCALE

    def _use(self, copies: int) -> None:
        """Let the first `copies` layers run and pass through the others."""
        stack = stack_of(self._model)
        tupled = architecture_of(self._model.config).layer_returns_tuple
        for index in range(len(stack)):
            stack[index] = PassThrough(tupled)
        for index, layer in zip(self._own[:copies], self._layers, strict=False):
            stack[index] = layer

    def _filled_cache(self, workload: LayerWorkload, copies: int) -> KVCache:
        """A cache with random keys and values of earlier tokens, in ranges as long as needed."""
        form, rooms = self._form, _rooms(workload)
        held = self._cache_form(workload.batch_size)
        cache = make_cache(self._model.config, self._own[:copies], int(rooms.sum()), held)
        if cache.states is not None:
            cache.states.recurrent.normal_()
            cache.states.inputs.normal_()
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


def longest_range(numbers: Sequence[int]) -> range:
    """The longest range, up to `_DECODE_COPIES`, of equal steps among ascending `numbers`."""
    found = range(numbers[0], numbers[0] + 1)
    steps = {later - first for first, later in combinations(numbers, 2)}
    for first, step in product(numbers, sorted(steps)):
        most = range(first, first + step * _DECODE_COPIES, step)
        count = next((n for n, each in enumerate(most) if each not in numbers), len(most))
        if count > len(found):
            found = most[:count]
    return found


def middle_stage(config: PretrainedConfig) -> PreTrainedModel:
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


def stack_of(model: PreTrainedModel) -> nn.ModuleList:
    stack: nn.ModuleList = getattr(model.get_decoder(), architecture_of(model.config).layers)
    return stack

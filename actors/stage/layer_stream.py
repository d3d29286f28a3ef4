"""Running a model over a whole text one decoder layer at a time, for calibration and perplexity.

Only one layer's weights are held, so that a 70B model needs the memory of one layer (or of
embedding or head, where those are larger) and of the hidden states of all tokens, which stay in
host memory in the compute type: sequences x length x hidden size elements, overwritten in place;
of Gemma 4 with what each layer adds, and with the keys and values that later layers read, behind.
Layers, attention and loading are the same as in `actors.stage.stage.Stage`.

    stream = LayerStream(folder, compute_on(torch.device("cpu"), torch.float32))
    for layer in stream_layers(stream, token_ids):
        with hooks_on(layer.linears):
            layer.observe()                      # all tokens pass, nothing changes
        replace_weights_of(layer.module)
                                                 # then the text passes through the new weights
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import KVSharingDict

from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import RaggedContext
from actors.attention.stored import Stored
from actors.messages import MicroBatch
from actors.stage.ends import load_ends, path_of, round_embedding, round_head
from actors.stage.layer_cache import SharedKeys, cache_shape, make_cache
from actors.stage.model_config import read_config
from actors.stage.partial_model import (
    PassThrough,
    architecture_of,
    empty_model,
    keep_stage,
    logits_of,
    numbers_of_layers,
    plan_frequencies,
)
from actors.stage.spec import StageSpec
from actors.stage.stage import run_decoder
from planner.model.finding import model_shape
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from quant.devices import local_processor
from quant.experts import QuantizedExperts
from quant.linear import LayerForm, dtype_name
from quant.loading.emulated_kernels import Compute, LayerScheme, form_of, load_layer_as_planned
from quant.loading.expert_tensors import ExpertTensors
from quant.loading.layer_load import LayerLoad, plain_linears
from quant.loading.loader import loading
from quant.rounding.importance import InputStatistics, LayerImportance, RunningStatistics
from quant.scheme import FULL_BITS

TOKENS_AT_ONCE = 2048
"""Tokens of one pass through a layer: enough for full matrix speed, and few enough that the MLP's
temporaries stay below a layer's weights."""

_FIRST, _MIDDLE, _LAST = range(3)
_PLAIN = LayerScheme()

OnKeys = Callable[[Tensor], None]
"""Sees the keys `[tokens, kv_heads, head_dim]` that a cache is given."""


def compute_on(device: torch.device, dtype: torch.dtype) -> Compute:
    """The way to compute in `dtype` with the kernels that this machine's `device` runs."""
    return Compute(device, dtype, local_processor(device))


class LayerStream:
    """The parts of a checkpoint, each loaded when it is asked for and gone when it is dropped.

    `tokens_at_once`: tokens of one pass, at least one whole sequence. `layers_name`: full name of
    the list of decoder layers, such as `model.layers`. Raises `SpecError` for an
    architecture that stages do not run and `CheckpointError` for unusable weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        compute: Compute,
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        self.compute = compute
        self._tokens_at_once = tokens_at_once
        self._checkpoint = Checkpoint.of(checkpoint)
        self.config = read_config(self._checkpoint.folder)
        self._shared = SharedKeys.of(self.config)
        architecture = architecture_of(self.config)
        self.quantized = architecture.linears
        self.layers: int = self.config.num_hidden_layers
        self._middle = self._part(_MIDDLE, range(self.layers), compute)
        decoder = self._middle.get_decoder()
        self._stack = getattr(decoder, architecture.layers)
        self.layers_name = f"{path_of(self._middle, decoder)}.{architecture.layers}"
        self._empty = list(self._stack)
        self._pass_through = PassThrough(architecture.layer_returns_tuple)
        for index in range(self.layers):
            self._stack[index] = self._pass_through

    def _part(
        self, position: int, layers: range, compute: Compute, headless: bool = False
    ) -> PreTrainedModel:
        """The model without the parts of other positions; `layers` are still on the meta device."""
        spec = StageSpec(
            index=position,
            stages=_LAST + 1,
            layers=layers,
            bitwidths=(),
            dtype=dtype_name(compute.dtype),
            slots=0,
            max_tokens=0,
            kv_tokens=0,
            head_on_first=headless,
        )
        model = empty_model(self.config)
        keep_stage(model, layers, spec.is_first, spec.is_last, spec.has_head)
        form = LayerForm(FULL_BITS, compute.processor, compute.dtype, compute.device)
        load_ends(model, spec, self._checkpoint, form)
        return model

    def linear_shapes(self, index: int) -> dict[str, tuple[int, int]]:
        """`[out, in]` of each linear of decoder layer `index` by its name within the layer."""
        named = plain_linears(self._empty[index], self.quantized)
        return {name: (linear.out_features, linear.in_features) for name, linear in named}

    def stored_experts(self, index: int) -> Mapping[str, ExpertTensors]:
        """The experts of decoder layer `index`, as they are stored, by name within the layer."""
        return dict(self._load(index, self._empty[index]).experts(self._checkpoint))

    def embed(
        self,
        token_ids: Tensor,
        scheme: LayerScheme = _PLAIN,
        head_inputs: InputStatistics | None = None,
    ) -> Tensor:
        """Hidden states `[sequences, length, hidden_size]`, and what goes with them behind, that
        go into the first layer.

        `token_ids`: `[sequences, length]` int64; the embedding is held as `scheme` says, a tied
        one as the head is, by its inputs, unless a backend is named. Raises `SpecError` for ids
        beyond the vocabulary and sequences longer than the model has positions for.
        """
        self._check(token_ids)
        plan_frequencies(self._middle, token_ids.shape[1])
        first = self._part(_FIRST, range(0), self.compute.in_type(scheme.dtype))
        round_embedding(first, self._checkpoint, scheme, self.compute, head_inputs)
        sent = self.config.hidden_size + numbers_of_layers(self.config)
        width = sent + self._shared.numbers
        hidden = torch.zeros(*token_ids.shape, width, dtype=self.compute.dtype, device="cpu")
        for rows in self._rows(token_ids):
            hidden[rows, :, :sent] = self.one_pass(first, token_ids[rows])
        return hidden

    def layer(
        self,
        index: int,
        hidden: Tensor,
        scheme: LayerScheme | None = None,
        importance: LayerImportance | None = None,
    ) -> StreamedLayer:
        """Load decoder layer `index`, to be run on `hidden`; its weights are rounded by
        `importance`.

        Raises what `quant.loading.loader.load_layer` raises. Without a `scheme` its linears
        are plain ones in the compute type.
        """
        module, own = copy.deepcopy(self._empty[index]), scheme or LayerScheme()
        load = replace(self._load(index, module, own), importance=importance)
        represented = load_layer_as_planned(load, self._checkpoint, own)
        form = CacheForm(load.form.dtype, self.compute.device, own.kv_bits)
        layer = StreamedLayer(self, index, module, hidden, form, represented)
        layer.importance = importance
        return layer

    def reading_ahead(self, layers: range) -> AbstractContextManager[None]:
        """Have the disk read while `layers` are loaded in their order."""
        loads = [self._load(index, self._empty[index]) for index in layers]
        return loading(loads, (), self._checkpoint)

    def _load(self, index: int, module: nn.Module, scheme: LayerScheme | None = None) -> LayerLoad:
        form = form_of(scheme or LayerScheme(), self.compute)
        return LayerLoad(module, f"{self.layers_name}.{index}", form, quantized=self.quantized)

    def head_inputs(self, hidden: Tensor) -> InputStatistics:
        """What the LM head gets of `hidden` `[sequences, length, width]` after the last layer."""
        found, last = RunningStatistics(), range(self.layers, self.layers)
        norm = self._part(_LAST, last, self.compute, headless=True)
        for rows in self._rows(hidden):
            found.add(self.one_pass(norm, hidden[rows].to(self.compute.dtype)))
        return found.result()

    def tail(
        self, scheme: LayerScheme = _PLAIN, head_inputs: InputStatistics | None = None
    ) -> Tail:
        """Final norm and LM head, held as `scheme` says."""
        compute = self.compute.in_type(scheme.dtype)
        model = self._part(_LAST, range(self.layers, self.layers), compute)
        round_head(model, self._checkpoint, scheme, compute, head_inputs)
        return Tail(self, model, compute)

    def through_layer(
        self, layer: StreamedLayer, on_keys: OnKeys | None = None
    ) -> Generator[tuple[slice, Tensor]]:
        """Half-open ranges of sequences and the outputs of the layer's module, on the host."""
        length = layer.hidden.shape[1]
        sequences = min(self.sequences_at_once(length), len(layer.hidden))
        own = range(layer.index, layer.index + 1)
        tokens = sequences * length
        known = None if layer.importance is None else [layer.importance]
        form = replace(layer.form, slots=sequences, alone=True)
        cache = make_cache(self.config, own, tokens, form, known)
        if on_keys is not None and cache.holding_layers:
            shape = cache_shape(self.config, own, tokens, alone=True)
            cache = _WatchedCache(own, shape, layer.form, on_keys)
        self._stack[layer.index] = layer.module
        try:
            for rows in self._rows(layer.hidden):
                inputs = layer.hidden[rows].to(layer.form.dtype)
                yield rows, self.one_pass(self._middle, inputs, cache).to("cpu")
        finally:
            self._stack[layer.index] = self._pass_through

    def sequences_at_once(self, length: int) -> int:
        return max(1, self._tokens_at_once // length)

    def _rows(self, inputs: Tensor) -> Iterator[slice]:
        step = self.sequences_at_once(inputs.shape[1])
        for first in range(0, len(inputs), step):
            yield slice(first, min(first + step, len(inputs)))

    @torch.no_grad()
    def one_pass(
        self, model: PreTrainedModel, inputs: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """`inputs` `[sequences, length, ...]` to hidden states `[sequences, length, width]`."""
        count, length = inputs.shape[:2]
        device = self.compute.device
        batch = MicroBatch(
            slots=np.arange(count),
            starts=np.zeros(count, dtype=np.int64),
            counts=np.full(count, length, dtype=np.int64),
            begins=np.arange(count) * length,
        )
        if cache is None:  # no layer will ask for keys
            cache = make_cache(self.config, range(0), 0, CacheForm(self.compute.dtype, device))
        context = RaggedContext.of(cache, batch)
        hidden = self._decoded(model, context, inputs.flatten(0, 1).to(device))
        return hidden.view(count, length, -1)

    def _decoded(self, model: PreTrainedModel, context: RaggedContext, inputs: Tensor) -> Tensor:
        """Run the decoder; behind layers `[tokens, ...]` with the keys that later ones read."""
        numbers = self._shared.numbers
        if not (numbers and inputs.is_floating_point()):
            return run_decoder(model, context, inputs)
        sent, held = inputs.split([inputs.shape[-1] - numbers, numbers], -1)
        shared = KVSharingDict(self._shared.unpacked(held))
        out = run_decoder(model, context, sent, shared_kv_states=shared)
        return torch.cat([out, self._shared.packed(shared)], -1) if model is self._middle else out

    def _check(self, token_ids: Tensor) -> None:
        if token_ids.dim() != 2 or not token_ids.numel() or token_ids.is_floating_point():
            raise SpecError(
                f"token ids of shape {list(token_ids.shape)}; give [sequences, length] of at least "
                "one token"
            )
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self.config.vocab_size:
            raise SpecError(
                f"token ids from {int(token_ids.min())} to {int(token_ids.max())} where the "
                f"vocabulary has {self.config.vocab_size}; the text is of another tokenizer"
            )
        shape = model_shape(self._checkpoint.folder)
        if not shape.alibi and token_ids.shape[1] > shape.max_positions:
            raise SpecError(
                f"sequences of {token_ids.shape[1]} tokens, but the model has "
                f"{shape.max_positions} positions; use a smaller sequence length"
            )


class StreamedLayer:
    """One loaded decoder layer and the hidden states that it is for.

    `module` may be hooked and its linears replaced. `hidden` `[sequences, length, width]` as
    `LayerStream.embed` makes it, on the host, goes into the layer; `advance` overwrites it by the
    layer's outputs. The layer computes in the type of `form`, in which it also holds keys and
    values, at 8 bits by its `importance`. `represented` names the backends of another device that
    plain products stand for.
    """

    def __init__(
        self,
        stream: LayerStream,
        index: int,
        module: nn.Module,
        hidden: Tensor,
        form: CacheForm,
        represented: frozenset[str],
    ) -> None:
        self.index = index
        self.module = module
        self.hidden = hidden
        self.form = form
        self.represented = represented
        self.importance: LayerImportance | None = None
        self.advanced = False
        self._stream = stream

    @property
    def linears(self) -> Mapping[str, nn.Linear]:
        """The plain linears by their name within the layer, such as `self_attn.q_proj`, without
        those of routers and gates, which no bits are chosen for.
        """
        return dict(plain_linears(self.module, self._stream.quantized))

    @property
    def experts(self) -> Mapping[str, QuantizedExperts]:
        """Experts by the name of their module within the layer."""
        named = self.module.named_modules()
        return {name: child for name, child in named if isinstance(child, QuantizedExperts)}

    def outputs(self, on_keys: OnKeys | None = None) -> Generator[tuple[slice, Tensor]]:
        """Half-open ranges of sequences and their hidden states after the layer, on the host."""
        return self._stream.through_layer(self, on_keys)

    def observe(self) -> None:
        """Send all sequences through for hooks to see; the outputs are dropped."""
        for _ in self.outputs():
            pass

    def advance(self, on_keys: OnKeys | None = None) -> None:
        """Send all sequences through and overwrite `hidden` by the layer's outputs."""
        for rows, out in self.outputs(on_keys):
            self.hidden[rows] = out
        self.advanced = True


class _WatchedCache(KVCache):
    """A cache that shows `on_keys` what it is given."""

    def __init__(self, layers: range, shape: CacheShape, form: CacheForm, on_keys: OnKeys) -> None:
        super().__init__(layers, shape, form)
        self._on_keys = on_keys

    def append(
        self, layer: int, where: Any, key: Tensor, value: Tensor, held: Any = None
    ) -> tuple[Stored, Stored]:
        self._on_keys(key)
        return super().append(layer, where, key, value, held)


class Tail:
    """Final norm and LM head, loaded."""

    def __init__(self, stream: LayerStream, model: PreTrainedModel, compute: Compute) -> None:
        self._stream = stream
        self._model = model
        self._compute = compute

    def normed(self, hidden: Tensor) -> Tensor:
        """After the final norm (and projection), `[sequences, length, head_width]`, on the device.

        `hidden`: `[sequences, length, width]` after the last layer; few sequences, they pass at
        once.
        """
        return self._stream.one_pass(self._model, hidden.to(self._compute.dtype))

    @torch.no_grad()
    def logits(self, normed: Tensor) -> Tensor:
        """Logits `[..., vocabulary]` of rows `[..., head_width]` of `normed`."""
        return logits_of(self._model, normed)


def stream_layers(
    stream: LayerStream, token_ids: Tensor, schemes: Sequence[LayerScheme] | None = None
) -> Iterator[StreamedLayer]:
    """Every decoder layer in turn, loaded, with its inputs.

    `token_ids`: `[sequences, length]`; `schemes`: one a layer (None: all at 16 bit). When the loop
    asks for the next layer, the text is sent through the present one as it is by then, unless the
    loop's body called `advance` itself (so that its hooks see this pass).
    Raises `SpecError` for schemes that are not one a layer, and what `LayerStream` raises.
    """
    if schemes is not None and len(schemes) != stream.layers:
        raise SpecError(f"{len(schemes)} bitwidths for {stream.layers} layers; give one a layer")
    hidden = stream.embed(token_ids)
    for index in range(stream.layers):
        layer = stream.layer(index, hidden, None if schemes is None else schemes[index])
        yield layer
        if not layer.advanced:
            layer.advance()

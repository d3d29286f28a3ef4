"""One pipeline stage on one device: its shard of the model, its KV cache and, on the last stage,
the sampler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.attention.cpu import can_attend, warm_up
from actors.attention.cuda import range_attention
from actors.attention.delta.rule import warm_up_mixer
from actors.attention.kv_cache import CacheForm, KVCache
from actors.attention.ragged import RaggedContext, with_rows
from actors.attention.timer import AttentionTimer
from actors.messages import NOTHING_SAMPLED, MicroBatch, Sampled
from actors.stage.adapters import adapters_of
from actors.stage.decode_graphs import DecodeGraphs, decode_graphs
from actors.stage.handed_over import HeldKeysValues
from actors.stage.layer_cache import make_cache, most_kv_heads
from actors.stage.layers.own_layers import (
    have_own_attention,
    own_layers,
    put_own_layers,
    run_own_layers,
)
from actors.stage.log_probabilities import rows_at_once
from actors.stage.model_config import end_tokens, read_config
from actors.stage.partial_model import logits_of, numbers_of_layers, run_modules
from actors.stage.ranks import Order, join, send
from actors.stage.sampler import Sampler
from actors.stage.shard import load_shard, shares_of, weight_bytes
from actors.stage.spec import StageSpec
from actors.stage_figures import StageStats
from actors.transport.collectives import ALONE, RankGroup
from planner.cluster.device import CPU_TOKENS_AT_ONCE
from planner.model.finding import model_shape
from planner.model.tensor_parallel import spread
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import DeviceError
from quant.devices import on_device
from quant.experts import pad_products
from quant.loading.cache_folder import open_cache
from quant.loading.cache_settings import NO_CACHE, CacheSettings
from quant.rounding.importance import LayerImportance
from quant.scheme import Processor
from quant.warm_up import warm_up_kernels

FIXED_ROWS = 32
"""Rows of every product and norm of a deterministic stage, so that one kernel computes all of them:
libraries choose it, and with it the order of sums, by the number of rows. Of 16, 32 and 64 the one
that costs least where both phases count (docs/sampling.md)."""

_PROBES = 8


class Stage:
    """Loads the shard of `spec` from the checkpoint folder, layer by layer, or from the cache, and
    computes micro-batches.

    `importance`: one a layer, where the plan's rounding or its keys and values ask for it. A rank
    of a stage that is divided holds its part alone; it computes after `join`, rank 0 when it is
    asked, the others by `actors.stage.ranks.follow`.

    Raises `CheckpointError` for unusable weights and `DeviceError` when weights and KV cache exceed
    the planned limit.
    """

    def __init__(
        self,
        spec: StageSpec,
        checkpoint: Path,
        device: torch.device,
        processor: Processor,
        cache: CacheSettings = NO_CACHE,
        importance: Sequence[LayerImportance] | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        config = read_config(checkpoint)
        self._shards = open_cache(cache)  # kept, so that the files in use stay in its folder
        tensors = Checkpoint(checkpoint, spec.adapter)
        self._group: RankGroup = ALONE
        self._model = load_shard(spec, tensors, device, processor, self._shards, importance)
        shares, (windows, rooms) = shares_of(spec, tensors), spec.windows(model_shape(checkpoint))
        form = CacheForm(
            self.dtype,
            device,
            spec.kv_bits,
            spec.slots,
            shares=shares,
            windows=windows,
            rooms=rooms,
        )
        self._cache = make_cache(
            config, spec.layers, spec.kv_tokens, form, importance, spec.parked_tokens
        )
        own = shares[0].kv_heads if shares else range(most_kv_heads(config))
        self.keys_values = HeldKeysValues(self._cache, own)
        if device.type == "cpu":
            warm_up(self._cache.held_dtype)
        warm_up_kernels(self._model)
        for width in self._cache.head_widths:  # compiles it
            range_attention(width, self.dtype, form.held_dtype == torch.int8, device)
        if self._cache.states is not None:
            warm_up_mixer(self._cache.states, self.dtype)
        self._adapters = adapters_of(self._model)
        if not spec.deterministic:
            put_own_layers(self._model, spec.layers, self._cache, self.dtype)
        self._graphs: DecodeGraphs | None = None
        if spec.cuda_graphs and spec.degree == 1 and self._adapters is None:
            eager = partial(run_in_passes, self._model, self._cache)
            self._graphs = decode_graphs(
                self._model, self._cache, self.dtype, spec.max_tokens, eager
            )
        samples = spec.has_head and spec.rank == 0
        ends = end_tokens(checkpoint).sources if samples else ()
        self._sampler = Sampler(tuple(ends), folder=checkpoint) if samples else None
        self._weight_bytes = weight_bytes(self._model)
        self._check_memory()
        if spec.deterministic:
            pad_products(self._model, FIXED_ROWS)
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        """Raise `DeviceError` unless each module makes equal rows of equal rows, wherever they
        stand.

        Several threads may divide an element-wise operation where no whole vector ends, and what is
        left over is computed by another function.
        """
        if not can_attend(torch.empty(0, dtype=self._cache.held_dtype, device=self.device)):
            raise DeviceError(
                f"{self.spec.name} cannot be deterministic: that takes a CPU, and attention that "
                "numba compiles; pip install numba there, or leave out deterministic"
            )
        unequal: list[str] = []

        def compare(module: nn.Module, _: object, out: object) -> None:
            if isinstance(out, Tensor) and out.ndim > 1:
                rows = out.reshape(FIXED_ROWS, -1)
                if not torch.equal(rows, rows[:1].expand_as(rows)):
                    unequal.append(type(module).__name__)

        leaves = [each for each in self._model.modules() if not any(each.children())]
        hooks = [leaf.register_forward_hook(compare) for leaf in leaves]
        try:
            self._compute_equal_rows()
        finally:
            for hook in hooks:
                hook.remove()
        if unequal:
            raise DeviceError(
                f"{self.spec.name} cannot be deterministic with {torch.get_num_threads()} threads "
                f"here: of equal rows {unequal[0]} makes unequal ones; give its device one thread "
                "in the cluster file, or leave out deterministic"
            )

    @torch.inference_mode()
    def _compute_equal_rows(self) -> None:
        zeros = np.zeros(FIXED_ROWS, dtype=np.int64)
        batch = MicroBatch(zeros, zeros, zeros + 1, zeros)
        context = RaggedContext.of_tokens(self._cache, batch)
        draw = torch.Generator().manual_seed(0)
        chosen = 0 if self._adapters is None else len(self._adapters.folders) + 1
        for probe in range(_PROBES + chosen):
            if self._adapters is not None:
                self._adapters.choose(probe % chosen)
            one = torch.randn(1, self.hidden_size, generator=draw).to(self.dtype)
            if self.spec.is_first:
                one = torch.randint(int(self._model.config.vocab_size), (1,), generator=draw)
            run_decoder(self._model, context, one.repeat_interleave(FIXED_ROWS, 0))
            if self.spec.has_head:
                head = self._model.get_output_embeddings()
                hidden = torch.randn(1, head.in_features, generator=draw).to(self.dtype)
                logits_of(self._model, hidden.repeat_interleave(FIXED_ROWS, 0))

    def _check_memory(self) -> None:
        stats, limit = self.stats(), self.spec.memory_limit_bytes
        needed = stats.weight_bytes + stats.kv_cache_bytes
        if limit and needed > limit:
            raise DeviceError(
                f"{self.spec.name} holds {stats.weight_bytes} bytes of weights and "
                f"{stats.kv_cache_bytes} of KV cache, but {self.spec.device_name} was planned with "
                f"{limit} bytes; plan again with this version of llmpq"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between stages, with what each layer adds to them."""
        return int(self._model.config.hidden_size) + numbers_of_layers(self._model.config)

    @property
    def max_columns(self) -> int:
        """Most columns of hidden states between stages; some heads take fewer than layers do."""
        return max(self.hidden_size, getattr(self._model.config, "word_embed_proj_dim", 0))

    def join(self, group: RankGroup) -> None:
        """Compute with the other ranks of the stage from now on, or with their successors."""
        spec = self.spec
        if (group.rank, group.degree) != (spec.rank, spec.degree):
            raise ValueError(
                f"rank {spec.rank} of {spec.degree} cannot join as rank {group.rank} of "
                f"{group.degree}: it has loaded its own part of stage {spec.index}"
            )
        self._group = group
        join(self._model, group)

    def leave(self) -> None:
        """Leave the group; the other ranks fail at what they do with this one."""
        group, self._group = self._group, ALONE
        join(self._model, ALONE)
        group.close()

    @torch.inference_mode()
    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """Compute one micro-batch.

        `inputs`: token ids `[tokens]` on the first stage, hidden states `[tokens, hidden_size]` on
        the others. Returns hidden states of the same shape; on the last stage those that the LM
        head computes, `[head_rows, head_width]`, or the sampled tokens where it lives there too.
        """
        inputs = self._shared(Order.STEP, batch, inputs)
        self._cache.prepare(batch)
        if self._adapters is not None:
            self._adapters.admit(batch.admitted)
        hidden = self._hidden(batch, inputs)
        self._cache.keep(batch)
        is_cut = batch.samples is not None or batch.scored is not None or not batch.is_decode
        if self.spec.is_last and is_cut:
            hidden = hidden[on_device(self.device, batch.head_rows)[0]]
        samples = self.spec.is_last and self.spec.has_head
        result = self._sample(batch, hidden) if samples else hidden
        waited = isinstance(result, Sampled) and result.token_ids.size > 0
        if self.device.type != "cpu" and not waited:
            # or who times this would only see the launches; not what goes to other stages yet
            torch.cuda.current_stream(self.device).synchronize()
        self._group.check()
        return result

    def _hidden(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        if self._graphs is not None and batch.is_decode:
            return self._graphs.compute(batch, inputs)
        run = run_by_token if self.spec.deterministic else run_in_passes
        return run(self._model, self._cache, batch, inputs)

    @torch.inference_mode()
    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """Compute LM head and sampling on the first stage, of the final hidden states `[head_rows,
        head_width]` from the last stage.
        """
        sampled = self._sample(batch, self._shared(Order.FINISH, batch, last_hidden))
        self._group.check()
        return sampled

    def _sample(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        if not self.spec.has_head:
            raise ValueError(f"stage {self.spec.index} has no LM head")
        sampled, scored = last_hidden.tensor_split([len(batch.sampled_rows)])
        logits = self._logits(sampled) if len(sampled) else sampled
        at_once = rows_at_once(int(self._model.config.vocab_size))
        parts = (self._logits(part) for part in scored.split(at_once) if len(part))
        if self._sampler is None:  # rank 0 samples
            deque(parts, maxlen=0)
            return NOTHING_SAMPLED
        return self._sampler.sample(batch, logits, parts)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits of `hidden` `[rows, head_width]`, `[rows, vocabulary]`; on ranks other than 0
        only what they have computed of them.
        """
        if self.spec.deterministic:
            own = by_fixed_rows(lambda _, rows: logits_of(self._model, rows), hidden)
        else:
            own = logits_of(self._model, hidden)
        parts = spread(int(self._model.config.vocab_size), self.spec.degree)
        gathered = self._group.gather(own, [len(part) for part in parts])
        return own if gathered is None else gathered

    def _shared(self, order: Order, batch: MicroBatch, inputs: Tensor) -> Tensor:
        """Bring `inputs` to the device in the type that is computed in; all ranks have those of
        rank 0 then, and their order.
        """
        if self._group.degree != self.spec.degree:
            raise RuntimeError(
                f"rank {self.spec.rank} of stage {self.spec.index} has not joined yet"
            )
        dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
        inputs = inputs.to(self.device, dtype, non_blocking=True)
        if self.spec.rank == 0:
            send(self._group, order, batch)
        return self._group.broadcast(inputs)

    def empty_inputs(self, batch: MicroBatch, order: Order) -> Tensor:
        """Memory for what rank 0 computes `batch` from: see `step` and `finish`."""
        tokens = int(batch.counts.sum())
        if order == Order.FINISH:
            width = int(self._model.get_output_embeddings().in_features)
            return torch.empty(len(batch.head_rows), width, dtype=self.dtype, device=self.device)
        if self.spec.is_first:
            return torch.empty(tokens, dtype=torch.int64, device=self.device)
        return torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def forget_parked(self) -> None:
        """Free all host memory of requests and heads: their run has ended."""
        if self.spec.rank == 0:
            send(self._group, Order.FORGET_PARKED)
        self._cache.parked.clear()

    def stats(self) -> StageStats:
        """The bytes that it holds; its process counts what it computes."""
        return StageStats(weight_bytes=self._weight_bytes, kv_cache_bytes=self._cache.nbytes)


def run_in_passes(
    model: PreTrainedModel,
    cache: KVCache,
    batch: MicroBatch,
    inputs: Tensor,
    timer: AttentionTimer | None = None,
) -> Tensor:
    """`run_decoder` over a whole micro-batch, on a CPU in parts of `CPU_TOKENS_AT_ONCE`; `timer`
    times attention.
    """

    def one(part: MicroBatch, tokens: Tensor) -> Tensor:
        context = RaggedContext.of(cache, part, own_kernels=have_own_attention(own_layers(model)))
        return run_decoder(model, replace(context, timer=timer) if timer else context, tokens)

    if inputs.device.type != "cpu" or len(inputs) <= CPU_TOKENS_AT_ONCE:
        return one(batch, inputs)
    passes = batch.passes(CPU_TOKENS_AT_ONCE)
    tokens = inputs.split([int(part.counts.sum()) for part in passes])
    return torch.cat([one(*each) for each in zip(passes, tokens, strict=True)])


def run_by_token(
    model: PreTrainedModel, cache: KVCache, batch: MicroBatch, inputs: Tensor
) -> Tensor:
    """`run_decoder` over a whole micro-batch, so that a token's result is the same bit for bit in
    any micro-batch: in passes of `FIXED_ROWS`, each token a decode step.
    """
    tokens = batch.by_token

    def one(rows: slice, padded: Tensor) -> Tensor:
        return run_decoder(model, RaggedContext.of_tokens(cache, tokens.of_rows(rows)), padded)

    return by_fixed_rows(one, inputs)


def by_fixed_rows(compute: Callable[[slice, Tensor], Tensor], inputs: Tensor) -> Tensor:
    """What `compute` makes of the rows of `inputs`, which it is given `FIXED_ROWS` at a time, the
    last ones with zeros behind them.
    """
    results = []
    for first in range(0, len(inputs), FIXED_ROWS):
        rows = slice(first, first + FIXED_ROWS)
        own = inputs[rows]
        results.append(compute(rows, with_rows(own, FIXED_ROWS))[: len(own)])
    return torch.cat(results)


def run_decoder(
    model: PreTrainedModel, context: RaggedContext, inputs: Tensor, **others: object
) -> Tensor:
    """Pass a flattened batch through the part of the decoder that `keep_stage` has left.

    `inputs`: token ids `[tokens]` where the embedding is, else hidden states `[tokens,
    hidden_size]`; returns hidden states. Rows beyond the tokens of the context are nobody's.
    `others` are further arguments of transformers' forward.
    """
    own, adapters = own_layers(model), adapters_of(model)
    if adapters is not None:
        adapters.begin(context.where.batch, inputs.device)
    if own:
        if have_own_attention(own):
            context.tell(own[0].group(context.cache))
        return run_own_layers(model, own, context, inputs)
    return run_modules(model, context, inputs, **others)

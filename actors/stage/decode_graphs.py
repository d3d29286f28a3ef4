"""Decode steps of a stage as CUDA graphs: recorded once for each size, replayed afterwards.

A graph starts the kernels of all layers by one call; they find what differs from step to step in
memory that stays where it is. Requests are padded to a few numbers of rows, of which the last ones
are nobody's: they have no new token and write nothing. LM head and sampling are not recorded:
logits would be most of what a graph holds, and their kernels are few.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.attention.addresses import MOST_ROWS, Addresses, TokenNumbers, tell
from actors.attention.cuda import RangeAttention, range_attention
from actors.attention.kv_cache import KVCache
from actors.attention.layouts import Layout, Part, RaggedContext
from actors.attention.windows import WindowPass
from actors.messages import MicroBatch, TokenIds
from actors.stage.own_layers import own_layers, run_own_layers
from planner.costs.memory import MOST_GRAPHS, padded_rows
from quant.devices import ALIGNMENT

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Gives a function that does again what the function it is given does, without its Python code: on
the same memory, with the numbers that it had when it was recorded."""

_WARM_UPS = 2
"""Passes before a recording, in which libraries take what they keep and kernels are chosen."""

_IDLE_STEPS = 200
"""Steps after which a graph that was not replayed gives way: recording takes as long as some ten
steps, so that sizes that take turns must not drive each other out."""

_TOLERANCE = 1e-3
"""Of the largest number: a replay starts the same kernels as the pass that it is compared with."""

_NOWHERE = -1
"""Token slot of a row that is nobody's."""

_NOBODY = MicroBatch(*4 * (np.zeros(0, dtype=np.int64),))


@dataclass(frozen=True)
class GraphSize:
    """Rows of a step, and the most tokens of a request that its kernels are started for."""

    rows: int
    longest: int


class Step(Protocol):
    """The memory of a decode step of one size, whose rows are nobody's at first, and the pass over
    it.
    """

    def fill(self, batch: MicroBatch, inputs: Tensor) -> None:
        """Put what differs from step to step where `compute` reads it; the rows beyond those of
        `batch` are nobody's.
        """

    def compute(self) -> Tensor:
        """Hidden states of all rows."""


class DecodeGraphs:
    """Computes decode steps by replaying what `record` makes of steps that `make` makes, and by
    `eager` where there is none. At most `MOST_GRAPHS` are kept.

    Where a step cannot be recorded, or a replay does not do the same, none is used from then on; a
    RuntimeWarning says why.
    """

    def __init__(
        self,
        eager: Callable[[MicroBatch, Tensor], Tensor],
        size_of: Callable[[MicroBatch], GraphSize],
        make: Callable[[GraphSize, Tensor], Step],
        record: Record,
    ) -> None:
        self._eager, self._size_of, self._make, self._record = eager, size_of, make, record
        self._kept: OrderedDict[GraphSize, _Recorded] = OrderedDict()  # the longest unused first
        self._steps = 0
        self._works = True

    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        """Hidden states of a decode step, `[requests, hidden_size]`, of `inputs` `[requests,
        ...]`.
        """
        if not self._works:
            return self._eager(batch, inputs)
        self._steps += 1
        size = self._size_of(batch)
        found = self._kept.get(size)
        if found is None:
            return self._first(size, batch, inputs)
        self._kept.move_to_end(size)
        found.last_used = self._steps
        return found.compute(batch, inputs)

    def _first(self, size: GraphSize, batch: MicroBatch, inputs: Tensor) -> Tensor:
        """Compute a step of a new size, and record it if there is room."""
        if len(self._kept) == MOST_GRAPHS:
            oldest = next(iter(self._kept.values()))
            if self._steps - oldest.last_used < _IDLE_STEPS:
                return self._eager(batch, inputs)
            self._kept.popitem(last=False)
        try:
            # Recorded while all rows are nobody's, which writes nothing, and in which any number
            # that is not found in memory is wrong for the step that it is tested with.
            step = self._make(size, inputs)
            recorded = _Recorded(step, self._record(step.compute), self._steps)
            found = recorded.compute(batch, inputs)
            # This and the replay write the same keys and values into the same token slots.
            wanted = step.compute()[: len(inputs)]
        except RuntimeError as error:
            self._give_up(str(error).partition("\n")[0])
            return self._eager(batch, inputs)
        if _agree(found, wanted):
            self._kept[size] = recorded
            return wanted
        self._give_up("a replay has other results than the pass that was recorded")
        return self._eager(batch, inputs)

    def _give_up(self, reason: str) -> None:
        self._works = False
        self._kept.clear()
        warnings.warn(
            f"decode steps are not recorded as CUDA graphs: {reason}; their kernels are started "
            "one by one, which is slower where they are short",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass
class _Recorded:
    step: Step
    replay: Compute
    last_used: int

    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        self.step.fill(batch, inputs)
        return self.replay()[: len(inputs)].clone()  # its memory is another graph's soon


def _agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether numbers are equal but for rounding; those that are not finite equal themselves."""
    found, wanted = found.float(), wanted.float()
    largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    close = torch.isclose(found, wanted, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
    return bool(close.all())


@functools.cache
def cuda_recorder(device: torch.device) -> Record:
    """Records the CUDA graphs of a process, which share one pool of memory: none runs beside
    another, or reads what another has left.

    Without `torch.cuda.graph`, which first waits for the whole device, and so for what other stages
    have not taken yet.
    """
    pool: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(compute: Compute) -> Compute:
        for _ in range(_WARM_UPS):
            compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # threads that send and receive may use the GPU meanwhile
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = compute()
                graph.capture_end()
            except BaseException:
                _end_broken(graph, device, pool)
                raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def _end_broken(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a recording that has failed, also for torch's allocator, which otherwise may not notice,
    and then gives no cached memory back.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(AttributeError, RuntimeError):  # of another torch, or it has noticed
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)


@dataclass(frozen=True)
class PaddedAddresses(Addresses):
    """Addresses of a decode step; of the rows of `batch` those beyond `requests` are nobody's.
    Its requests count as `size.longest` tokens long.
    """

    requests: int = 0
    size: GraphSize = GraphSize(0, 0)

    @classmethod
    def of_step(cls, batch: MicroBatch, size: GraphSize, device: torch.device) -> PaddedAddresses:
        requests = len(batch.slots)

        def padded(numbers: TokenIds, filler: int = 0) -> TokenIds:
            rows = np.full(size.rows, filler)
            rows[:requests] = numbers
            return rows

        begins, starts, slots = map(padded, (batch.begins, batch.starts, batch.slots))
        whole = MicroBatch(slots, starts, padded(batch.counts, 1), begins)
        return cls(whole, device, (), None, 0, requests=requests, size=size)

    @property
    def longest(self) -> int:
        return self.size.longest

    @property
    def _numbers(self) -> tuple[TokenNumbers, TokenNumbers]:
        positions, slots = super()._numbers
        slots[self.requests :] = _NOWHERE
        return positions, slots

    def _tables(self, group: int) -> tuple[TokenNumbers, TokenNumbers]:
        requests, tiles = super()._tables(group)
        requests[self.requests :, 3] = 0  # new tokens
        return requests, tiles

    def told_bytes(self, group: int) -> int:
        """Bytes on the device of what kernels are told."""
        arrays = *self._numbers, *self._tables(group)
        return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)


class LayersStep:
    """A step through the `OwnLayer`s of a stage, with what else of the decoder it has."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, size: GraphSize, like: Tensor
    ) -> None:
        self._model, self._layers, self._size = model, own_layers(model), size
        self._group = self._layers[0].group(cache)
        self._inputs = like.new_zeros(size.rows, *like.shape[1:])
        self._cache = cache
        whole, windows = self._addresses(_NOBODY, like.device)
        self._context = RaggedContext(
            cache, _layout(whole), {window: _layout(*own) for window, own in windows.items()}
        )
        every = (whole, *(where for where, _ in windows.values()))
        told = sum(where.told_bytes(self._group) for where in every)
        self._told = like.new_empty(told, dtype=torch.uint8)
        self._context.tell(self._group, self._told)  # its tensors are views of that from now on

    def fill(self, batch: MicroBatch, inputs: Tensor) -> None:
        whole, windows = self._addresses(batch, inputs.device)
        every = (whole, *(where for where, _ in windows.values()))
        tell(self._group, [(where, [where]) for where in every], into=self._told)
        self._inputs[: len(inputs)].copy_(inputs)

    def _addresses(
        self, batch: MicroBatch, device: torch.device
    ) -> tuple[PaddedAddresses, dict[int, tuple[PaddedAddresses, WindowPass]]]:
        """Addresses of `batch` in layers that keep all tokens, and by window in the others."""
        rows, longest = self._size.rows, self._size.longest
        return PaddedAddresses.of_step(batch, self._size, device), {
            window: (
                PaddedAddresses.of_step(own.read, GraphSize(rows, min(longest, own.room)), device),
                own,
            )
            for window, own in self._cache.enter(batch).items()
        }

    def compute(self) -> Tensor:
        return run_own_layers(self._model, self._layers, self._context, self._inputs)


def _layout(where: Addresses, window: WindowPass | None = None) -> Layout:
    return Layout(where, (Part("decode", slice(None), where),), window)


def decode_graphs(
    model: PreTrainedModel,
    cache: KVCache,
    dtype: torch.dtype,
    most_tokens: int,
    eager: Callable[[MicroBatch, Tensor], Tensor],
) -> DecodeGraphs | None:
    """What records the decode steps of a stage that computes in `dtype`, of requests of up to
    `most_tokens` tokens; None where layers or attention are not kernels of ours.
    """
    layers = own_layers(model)
    if not layers or len(layers) != len(cache.layers):
        return None
    keys = cache.of_layer(layers[0].index)[0]
    kv_heads, _, head_dim = keys.numbers.shape
    device = keys.numbers.device
    attention = range_attention(head_dim, dtype, keys.scales is not None, device)
    if attention is None:
        return None
    sizes = functools.partial(step_size, attention, kv_heads, layers[0].group(cache), most_tokens)
    return DecodeGraphs(
        eager, sizes, functools.partial(LayersStep, model, cache), cuda_recorder(device)
    )


def step_size(
    attention: RangeAttention, kv_heads: int, group: int, most_tokens: int, batch: MicroBatch
) -> GraphSize:
    """The size that a step is padded to: powers of two for the longest request, of which those
    whose ranges are split alike are one.
    """
    rows, longest = padded_rows(len(batch.slots)), 1 << (int(batch.lengths.max()) - 1).bit_length()
    blocks = rows * -(-group // MOST_ROWS) * kv_heads
    splits = attention.splits(blocks, longest)
    while longest < most_tokens and attention.splits(blocks, 2 * longest) == splits:
        longest *= 2
    return GraphSize(rows, longest)

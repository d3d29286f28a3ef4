"""Decode steps of a stage as CUDA graphs: recorded once for each size, replayed afterwards.

A graph starts the kernels of all layers by one call; they find what differs from step to step in
memory that stays where it is. Requests are padded to a few numbers of rows, of which the last ones
are nobody's: they have no new token and write nothing. LM head and sampling are not recorded:
logits would be most of what a graph holds, and their kernels are few.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.attention.addresses import MOST_ROWS, Addresses, TokenNumbers, tell
from actors.attention.cuda import RangeAttention, range_attention
from actors.attention.delta.rule import delta_kernels
from actors.attention.delta.states import TokenRuns
from actors.attention.kv_cache import KVCache
from actors.attention.layouts import Layout, Part, RaggedContext
from actors.attention.ragged import NewTokens
from actors.attention.stored import Stored
from actors.attention.windows import WindowPass
from actors.messages import MicroBatch, TokenIds
from actors.stage.layers.cuda_layer import layer_kernels
from actors.stage.layers.own_layers import own_layers, run_own_layers
from actors.stage.partial_model import run_modules
from planner.costs.memory import MOST_GRAPHS, padded_rows
from quant.backends.cuda.driver import Compute, Record, cuda_recorder
from quant.devices import ALIGNMENT, on_device
from quant.experts import QuantizedExperts

_IDLE_STEPS = 200
"""Steps after which a graph that was not replayed gives way: recording takes as long as some ten
steps, so that sizes that take turns must not drive each other out."""

_TOLERANCE = 1e-3
"""Of the largest number: a replay starts the same kernels as the pass that it is compared with."""

_COMPARED = 4
"""Requests of a step with states in whose results a replay is compared with the pass: both change
the states, of which a request may have 100 MB, so that these are kept aside meanwhile."""

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

    def saved(self, batch: MicroBatch) -> tuple[MicroBatch, Callable[[], None]]:
        """Copy what computing a step twice would spoil; returns the first requests of `batch`, in
        which a replay is compared, and what brings back the copies.
        """


class DecodeGraphs:
    """Computes decode steps by replaying what `record` makes of steps that `make` makes, and by
    `eager` where there is none, as for more than `most_rows`. At most `MOST_GRAPHS` are kept.

    Where a step cannot be recorded, or a replay does not do the same, none is used from then on; a
    RuntimeWarning says why.
    """

    def __init__(
        self,
        eager: Callable[[MicroBatch, Tensor], Tensor],
        size_of: Callable[[MicroBatch], GraphSize],
        make: Callable[[GraphSize, Tensor], Step],
        record: Record,
        most_rows: float = math.inf,
    ) -> None:
        self._most_rows = most_rows
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
        if size.rows > self._most_rows:
            return self._eager(batch, inputs)
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
        restore: Callable[[], None] = lambda: None  # noqa: E731
        try:
            # Recorded while all rows are nobody's, which writes nothing, and in which any number
            # that is not found in memory is wrong for the step that it is tested with.
            step = self._make(size, inputs)
            recorded = _Recorded(step, self._record(step.compute), self._steps)
            few, restore = step.saved(batch)
            own = inputs[: len(few.slots)]
            found = recorded.compute(few, own)
            # This and the replay write the same keys and values into the same token slots.
            restore()
            wanted = step.compute()[: len(own)]
        except RuntimeError as error:
            restore()
            self._give_up(str(error).partition("\n")[0])
            return self._eager(batch, inputs)
        if _agree(found, wanted):
            self._kept[size] = recorded
            if len(own) == len(inputs):
                return wanted
            restore()
            return recorded.compute(batch, inputs)
        restore()
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
    """A step through the layers of a stage, with what else of the decoder it has; kernels are told
    of it for each of `groups` of queries that share a head of keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        groups: Sequence[int],
        size: GraphSize,
        like: Tensor,
    ) -> None:
        self._model, self._layers, self._states = model, own_layers(model), cache.states
        self._size = size
        self._inputs = like.new_zeros(size.rows, *like.shape[1:])
        self._cache = cache
        self._slots = like.new_full((size.rows,), _NOWHERE, dtype=torch.int64)
        whole, windows = self._addresses(_NOBODY, like.device)
        store = None if self._layers else functools.partial(_store, model.config.hidden_size)
        layouts = {window: _layout(*own) for window, own in windows.items()}
        self._context = RaggedContext(cache, _layout(whole), layouts, store=store)
        self._context.__dict__["runs"] = TokenRuns.of_step(self._slots)
        every = (whole, *(where for where, _ in windows.values()))
        self._told = [
            (group, like.new_empty(sum(w.told_bytes(group) for w in every), dtype=torch.uint8))
            for group in groups
        ]
        for group, told in self._told:
            self._context.tell(group, told)  # its tensors are views of that from now on

    def fill(self, batch: MicroBatch, inputs: Tensor) -> None:
        whole, windows = self._addresses(batch, inputs.device)
        every = (whole, *(where for where, _ in windows.values()))
        for group, told in self._told:
            tell(group, [(where, [where]) for where in every], into=told)
        self._inputs[: len(inputs)].copy_(inputs)
        if self._states is not None:
            slots = np.full(self._size.rows, _NOWHERE)
            slots[: len(batch.slots)] = batch.slots
            self._slots.copy_(on_device(inputs.device, slots)[0])

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
        if self._layers:
            return run_own_layers(self._model, self._layers, self._context, self._inputs)
        return run_modules(self._model, self._context, self._inputs)

    def saved(self, batch: MicroBatch) -> tuple[MicroBatch, Callable[[], None]]:
        """States go on from what they are; they are copied to the host, where they take no memory
        that was planned.
        """
        parts: list[Tensor] = []
        if self._states is not None:
            own = batch.slots, batch.starts, batch.counts, batch.begins
            slots, starts, counts, begins = (each[:_COMPARED] for each in own)
            batch = MicroBatch(slots, starts, counts, begins)
            for slot in batch.slots.tolist():
                parts += [layer for held in self._states.of_slot(slot) for layer in held]
        kept = [part.to("cpu", copy=True) for part in parts]

        def restore() -> None:
            for part, before in zip(parts, kept, strict=True):
                part.copy_(before)

        return batch, restore


def _store(width: int, new: NewTokens, token_slots: Tensor, held: tuple[Stored, Stored]) -> None:
    """Write keys and values as `OwnLayer`s of `width` do, turned as they are already."""
    kernels = layer_kernels(*_form_of(width, new.query.dtype, held[0]))
    assert kernels is not None, "steps are recorded where there are some"
    kernels.turn_and_store(new, None, (), token_slots, held)


def _form_of(
    width: int, dtype: torch.dtype, keys: Stored
) -> tuple[int, int, torch.dtype, bool, torch.device]:
    numbers = keys.numbers
    return width, numbers.shape[-1], dtype, keys.scales is not None, numbers.device


@dataclass(frozen=True)
class Shared:
    """How layers read keys: by which kernels, with how many heads of keys, each for `group`
    queries.
    """

    attention: RangeAttention
    kv_heads: int
    group: int


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
    `most_tokens` tokens; None where attention or states are not kernels of ours, for latents, and
    where experts ask the host.
    """
    if not cache.layers:
        return None
    device, config = cache.device, model.config
    found: dict[tuple[int, int], Shared] = {}
    for layer in cache.holding_layers:
        keys, values = cache.of_layer(layer)
        if values is keys:  # latents: what writes their codes is operations of PyTorch
            return None
        form = _form_of(config.hidden_size, dtype, keys)
        attention = range_attention(*form[1:])
        if attention is None or (not own_layers(model) and layer_kernels(*form) is None):
            return None
        kv_heads = len(keys.numbers)
        group = config.num_attention_heads // kv_heads
        found[form[1], kv_heads] = Shared(attention, kv_heads, group)
    if cache.states is not None and delta_kernels(cache.states.mixer, dtype, device) is None:
        return None
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    names = ("num_experts_per_tok", "top_k_experts")  # the latter is Gemma's
    per_token = next((int(each) for name in names if (each := getattr(config, name, 0))), 1)
    most_rows = min((each.rows_without_waiting(per_token) for each in experts), default=math.inf)
    if not most_rows:
        return None
    shared = list(found.values())
    groups = sorted({each.group for each in shared}) or [1]
    return DecodeGraphs(
        eager,
        functools.partial(step_size, shared, most_tokens),
        functools.partial(LayersStep, model, cache, groups),
        cuda_recorder(device),
        most_rows,
    )


def step_size(shared: Sequence[Shared], most_tokens: int, batch: MicroBatch) -> GraphSize:
    """The size that a step is padded to: powers of two for the longest request, of which those
    whose ranges are split alike, in all layers, are one.
    """
    rows, longest = padded_rows(len(batch.slots)), 1 << (int(batch.lengths.max()) - 1).bit_length()

    def splits(longest: int) -> list[int]:
        return [
            each.attention.splits(rows * -(-each.group // MOST_ROWS) * each.kv_heads, longest)
            for each in shared
        ]

    while longest < most_tokens and splits(longest) == splits(2 * longest):
        longest *= 2
    return GraphSize(rows, longest)

"""What requests keep of all their tokens in layers without keys, a row for each slot: the state of
the gated delta rule, and the last inputs of its convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from actors.messages import MicroBatch, TokenIds
from planner.model.layer_parts import DeltaMixer
from quant.devices import on_device

if TYPE_CHECKING:  # drivers know of caches without transformers
    from transformers import PretrainedConfig

LINEAR_ATTENTION = "linear_attention"
"""What transformers calls a layer with such a state."""


class ConstantStates:
    """States of requests in `slots` slots, in some `layers` of a stage.

    `recurrent` `[layers, slots, value_heads, key_dim, value_dim]` is float32: no narrower type is
    exact enough over thousands of tokens. `inputs` `[layers, slots, conv_width - 1, channels]` are
    in the compute type. Nothing is cleared: a request whose tokens begin at position 0 does not
    read what is there.
    """

    def __init__(
        self,
        layers: Sequence[int],
        mixer: DeltaMixer,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.mixer = tuple(layers), mixer
        self._places = {layer: place for place, layer in enumerate(layers)}
        count = len(self.layers)
        state = mixer.value_heads, mixer.key_dim, mixer.value_dim
        self.recurrent = torch.zeros(count, slots, *state, device=device)
        kept = mixer.conv_width - 1, mixer.conv_channels
        self.inputs = torch.zeros(count, slots, *kept, dtype=dtype, device=device)
        self._tokens = np.zeros(slots, dtype=np.int64)

    def __contains__(self, layer: int) -> bool:
        return layer in self._places

    @property
    def nbytes(self) -> int:
        return self.recurrent.nbytes + self.inputs.nbytes

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's `recurrent` and `inputs` of all slots."""
        place = self._places[layer]
        return self.recurrent[place], self.inputs[place]

    def places(self, layers: range) -> slice:
        """Where those of `layers` that have states stand among all that have."""
        own = [place for layer, place in self._places.items() if layer in layers]
        return slice(own[0], own[-1] + 1) if own else slice(0, 0)

    def of_slot(self, slot: int) -> list[Tensor]:
        """Views of what a request has in all layers, `[layers, ...]`."""
        return [self.recurrent[:, slot], self.inputs[:, slot]]

    def follow(self, batch: MicroBatch) -> None:
        """Take in that the new tokens of `batch` will be computed.

        Raises RuntimeError where the state of a request is not of the tokens before them: unlike a
        key, a token that comes twice is not written to the same place.
        """
        slots = batch.slots
        if int(slots.max()) >= len(self._tokens):
            raise RuntimeError(
                f"a request is in slot {int(slots.max())}, of {len(self._tokens)} that have states"
            )
        wrong = np.flatnonzero((batch.starts > 0) & (self._tokens[slots] != batch.starts))
        if len(wrong):
            row = int(wrong[0])
            raise RuntimeError(
                f"the request in slot {int(slots[row])} goes on at token {int(batch.starts[row])}, "
                f"but its state is of {int(self._tokens[slots[row]])}"
            )
        self._tokens[slots] = batch.lengths

    def restored(self, slot: int, tokens: int) -> None:
        """Note that the state in `slot` is now one of so many tokens."""
        self._tokens[slot] = tokens


def delta_mixer(config: PretrainedConfig) -> DeltaMixer:
    """The mixer of a model of `config` in its layers of linear attention."""
    return DeltaMixer(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )


def layers_with_states(config: PretrainedConfig, layers: range) -> tuple[int, ...]:
    """Those of `layers` whose requests have a constant state in place of keys and values."""
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(layer for layer in layers if LINEAR_ATTENTION in kinds[layer : layer + 1])


class Projected(NamedTuple):
    """A mixer's projections of new tokens, in the compute type.

    `mixed` `[tokens, channels]`: queries, keys and values; `gate` `[tokens, value_width]`; `beta`
    and `decay` `[tokens, value_heads]`.
    """

    mixed: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor

    def of(self, rows: slice | Tensor) -> Projected:
        return Projected(*(each[rows] for each in self))


@dataclass(frozen=True)
class DeltaWeights:
    """What a mixer has beside its projections.

    `convolution` `[channels, 1, conv_width]` in the compute type; `taps`, the same as `[conv_width,
    channels]`, the heads' `rates` of decay (below 0) and `biases` in float32. `norm` is that of a
    head's results, with a gate.
    """

    sizes: DeltaMixer
    convolution: Tensor
    taps: Tensor
    rates: Tensor
    biases: Tensor
    norm: nn.Module

    @property
    def norm_weight(self) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor), "a norm with a gate has a weight"
        return weight

    @property
    def norm_eps(self) -> float:
        eps: Any = self.norm.variance_epsilon
        return float(eps)


@dataclass(frozen=True)
class DeltaInputs:
    """What the gated delta rule takes in, float32: queries, keys and values behind the convolution,
    `mixed` `[tokens, channels]`; `log_decay` and `beta` `[tokens, value_heads]`.
    """

    mixed: Tensor
    log_decay: Tensor
    beta: Tensor


@dataclass(frozen=True)
class EqualRuns:
    """Requests with `count` new tokens each, at rows `tokens` of the flattened batch; `slots`
    `[requests]` on the device. `is_fresh`: whether their tokens are their first ones.
    """

    tokens: slice | Tensor
    slots: Tensor
    count: int
    is_fresh: bool

    @property
    def is_step(self) -> bool:
        """Whether each request goes on by one token."""
        return self.count == 1 and not self.is_fresh


@dataclass(frozen=True)
class TokenRuns:
    """The new tokens of a micro-batch by requests, for what goes through them in their order.

    `told` `[4, requests]`: slot, start, first row in the batch, and number of new tokens.
    """

    told: TokenIds
    device: torch.device

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> TokenRuns:
        """The runs of `batch`; neighbours that are tokens of one request after each other are
        one.
        """
        slots, starts, counts = batch.slots, batch.starts, batch.counts
        goes_on = (slots[1:] == slots[:-1]) & (starts[1:] == (starts + counts)[:-1])
        edges = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        rows = np.cumsum(counts) - counts
        joined = np.add.reduceat(counts, edges)
        return cls(np.stack([slots[edges], starts[edges], rows[edges], joined]), device)

    @classmethod
    def of_step(cls, slots: Tensor) -> TokenRuns:
        """Requests in `slots` `[rows]` on the device, which go on by one token each; those in slot
        -1 are nobody's. What the host is told of them may change: only `equal` is asked of these.
        """
        made = cls(np.zeros((4, 0), dtype=np.int64), slots.device)
        made.__dict__["equal"] = (EqualRuns(slice(None), slots, 1, False),)
        return made

    @cached_property
    def equal(self) -> tuple[EqualRuns, ...]:
        """Requests with as many new tokens, and with or without earlier ones, together."""
        slots, starts, firsts, counts = self.told
        kinds, kind = np.unique(np.stack([counts, starts == 0]), axis=1, return_inverse=True)
        found = []
        for number, (count, is_fresh) in enumerate(kinds.T.tolist()):
            own = np.flatnonzero(kind.ravel() == number)
            ends = firsts[own] + count
            rows: slice | Tensor = slice(int(firsts[own[0]]), int(ends[-1]))
            if (firsts[own[1:]] != ends[:-1]).any():
                each = (firsts[own][:, None] + np.arange(count)).ravel()
                rows = on_device(self.device, each)[0]
            there = on_device(self.device, slots[own])[0]
            found.append(EqualRuns(rows, there, count, bool(is_fresh)))
        return tuple(found)

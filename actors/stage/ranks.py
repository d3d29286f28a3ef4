"""A stage as a group of ranks: the modules that they share out, and the orders of rank 0."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.messages import MicroBatch, Sampled
from actors.stage.partial_model import architecture_of
from actors.transport.collectives import ALONE, RankGroup
from actors.transport.message_format import decode, encode
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import RankShare, layer_cuts, vocabulary_cut
from quant.common.errors import StageLostError
from quant.loading.cached_layer import put_submodule
from quant.scheme import Cut


class OfGroup(nn.Module):
    """A module that computes with the other ranks of `group`."""

    group: RankGroup = ALONE


class SummedLinear(OfGroup):
    """A row-parallel linear layer: the sum of the ranks' products, and the bias added once."""

    def __init__(self, linear: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in of the rank]` to `[..., out]`, the same on every rank."""
        out = self.group.all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias


class VocabularyPart(OfGroup):
    """The rows of the token embedding from `begin` on that a rank holds; what is looked up is
    multiplied by `factor` (Gemma).
    """

    def __init__(self, rows: int, width: int, begin: int, factor: float | None = None) -> None:
        super().__init__()
        self.begin = begin
        self.factor = factor
        weight = torch.empty(rows, width, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """The embeddings `[..., width]` of ids, of which one rank knows each."""
        own = token_ids - self.begin
        is_other = (own < 0) | (own >= len(self.weight))
        found = F.embedding(own.masked_fill(is_other, 0), self.weight)
        if self.factor is not None:
            found = found * torch.tensor(self.factor).to(found.dtype)
        return self.group.all_reduce(found.masked_fill_(is_other[..., None], 0.0))


def divide(model: PreTrainedModel, shape: ModelShape, share: RankShare, layers: range) -> None:
    """Give the stage's modules, on the meta device, the sizes of the rank's part."""
    architecture = architecture_of(model.config)
    decoder = model.get_decoder()
    stack = getattr(decoder, architecture.layers)
    cuts = layer_cuts(shape, share, architecture)
    holder = architecture.attention[0].rpartition(".")[0]
    for index in layers:
        for name, cut in cuts.items():
            put_submodule(stack[index], name, _part(stack[index].get_submodule(name), cut))
        _keep_heads(stack[index].get_submodule(holder), share)
    cut = vocabulary_cut(shape, share)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        factor = getattr(embedding, "scalar_embed_scale", None)
        part = VocabularyPart(cut.length, embedding.embedding_dim, cut.begin, factor)
        setattr(decoder, architecture.embedding[0], part)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(_part(head, cut))


def sum_over_ranks(model: PreTrainedModel, layer: nn.Module) -> None:
    """Put the sum over the ranks behind the row-parallel linears of a loaded layer."""
    architecture = architecture_of(model.config)
    for name in (architecture.attention[-1], architecture.mlp[-1]):
        linear: Any = layer.get_submodule(name)
        bias, linear.bias = linear.bias, None
        put_submodule(layer, name, SummedLinear(linear, bias))


def join(model: PreTrainedModel, group: RankGroup) -> None:
    """Have the stage's modules compute with `group` from now on."""
    for module in model.modules():
        if isinstance(module, OfGroup):
            module.group = group


def _part(linear: nn.Module, cut: Cut) -> nn.Linear:
    assert isinstance(linear, nn.Linear), "no weight is loaded yet"
    out, into = linear.weight[cut.index].shape
    return nn.Linear(into, out, bias=linear.bias is not None, device="meta")


def _keep_heads(attention: Any, share: RankShare) -> None:
    """Tell a family's attention of the heads that it has left, where it counts them itself."""
    if hasattr(attention, "num_heads"):
        attention.num_heads = len(share.heads)
    if hasattr(attention, "qkv_proj"):  # takes it apart by these
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = len(share.heads)
        attention.num_key_value_heads = len(share.kv_heads)
    if hasattr(attention, "alibi_slopes"):
        attention.alibi_slopes = attention.alibi_slopes[share.heads.start : share.heads.stop]


class Order(IntEnum):
    STEP = 0
    FINISH = 1
    FORGET_PARKED = 2


class Follower(Protocol):
    """The part of a stage that follows orders."""

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """As of `Stage`, which the other methods are of too."""

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled: ...
    def forget_parked(self) -> None: ...
    def empty_inputs(self, batch: MicroBatch, order: Order) -> Tensor: ...


def send(group: RankGroup, order: Order, batch: MicroBatch | None = None) -> None:
    """Order the other ranks to do something with `batch`; does nothing where there are none."""
    if group.degree == 1:
        return
    message = b""
    if batch is not None:
        message = encode(batch, torch.empty(_rows(batch, order), 0)).numpy().tobytes()
    group.broadcast_bytes(bytes([order]) + message)


def receive(group: RankGroup) -> tuple[Order, MicroBatch | None]:
    """The next order of rank 0; `StageLostError` for what it does not send."""
    data = group.broadcast_bytes(None)
    if not data or data[0] not in Order._value2member_map_:
        raise StageLostError("rank 0 of a stage sends what is no order; its version is another one")
    order = Order(data[0])
    if order not in (Order.STEP, Order.FINISH):
        return order, None
    try:
        decoded = decode(torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8))
    except (ValueError, struct.error) as error:  # too short for any message
        raise StageLostError("rank 0 of a stage sends a part of an order") from error
    if isinstance(decoded, Sampled):
        raise StageLostError("rank 0 of a stage sends tokens; its version is another one")
    return order, decoded[0]


def follow(
    stage: Follower,
    group: RankGroup,
    computing: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
) -> NoReturn:
    """Do what rank 0 orders, micro-batches in the context of `computing`; the work of every other
    rank, which ends by an error: those of the stage, and `StageLostError` where another rank has
    left or is lost.
    """
    while True:
        order, batch = receive(group)
        if order == Order.FORGET_PARKED:
            stage.forget_parked()
            continue
        assert batch is not None, "these orders bring one"
        inputs = stage.empty_inputs(batch, order)
        with computing(batch):
            if order == Order.STEP:
                stage.step(batch, inputs)
            else:
                stage.finish(batch, inputs)


def _rows(batch: MicroBatch, order: Order) -> int:
    return len(batch.sampled_rows) if order == Order.FINISH else int(batch.counts.sum())

"""A stage as a group of ranks: the modules that they share out, and the orders of rank 0."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Mapping
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
from planner.model.tensor_parallel import (
    RankShare,
    layer_cuts,
    rank_share,
    summed_modules,
    vocabulary_cut,
)
from quant.common.errors import StageLostError
from quant.loading.cached_layer import put_submodule
from quant.scheme import Cut


class OfGroup(nn.Module):
    """A module that computes with the other ranks of `group`."""

    group: RankGroup = ALONE


class Summed(OfGroup):
    """A module of which each rank computes a summand: a row-parallel linear, or experts. The first
    of its results is the sum, to which `bias` is added once.
    """

    def __init__(self, part: nn.Module, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.part = part
        self.bias = bias

    def forward(self, *inputs: Any) -> Any:
        found = self.part(*inputs)
        if isinstance(found, tuple):
            return self.group.all_reduce(found[0]), *found[1:]
        out = self.group.all_reduce(found)
        return out if self.bias is None else out + self.bias


class NormOfAllRanks(OfGroup):
    """An RMSNorm over `width` numbers of which each rank has some (OLMo's of all queries, or all
    keys). Those that a rank before it has too are not `counted`.
    """

    def __init__(self, norm: Any, width: int, counted: bool) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon
        self.width, self.counted = width, counted

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., numbers of the rank]`, normed as the whole is."""
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        total = self.group.all_reduce(squares if self.counted else torch.zeros_like(squares))
        normed: Tensor = self.weight * (wide * torch.rsqrt(total / self.width + self.eps))
        return normed.to(x.dtype)


class VocabularyPart(OfGroup):
    """The rows of the token embedding from `begin` on that a rank holds; what is looked up is
    multiplied by `factor` (Gemma).
    """

    def __init__(self, rows: int, width: int, begin: int, factor: float | None = None) -> None:
        super().__init__()
        self.begin = begin
        self.factor = factor
        self.rows = rows
        weight = torch.empty(rows, width, device="meta")
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.coded: nn.Module | None = None

    def hold(self, coded: nn.Module) -> None:
        """Look rows up in `coded` from now on, which multiplies with the factor too."""
        self.weight, self.factor, self.coded = None, None, coded

    def forward(self, token_ids: Tensor) -> Tensor:
        """The embeddings `[..., width]` of ids, of which one rank knows each."""
        own = token_ids - self.begin
        is_other = (own < 0) | (own >= self.rows)
        known = own.masked_fill(is_other, 0)
        if self.weight is not None:
            found = F.embedding(known, self.weight)
        else:
            assert self.coded is not None, "which holds what the weight held"
            found = self.coded(known)
        if self.factor is not None:
            found = found * torch.tensor(self.factor).to(found.dtype)
        return self.group.all_reduce(found.masked_fill_(is_other[..., None], 0.0))


def divide(
    model: PreTrainedModel, shape: ModelShape, whole: RankShare, layers: range
) -> list[Mapping[str, Cut]]:
    """Give the stage's modules, on the meta device, the sizes of the part of the rank that has the
    share `whole` of the model; returns what is cut in each of its `layers`.
    """
    architecture = architecture_of(model.config)
    decoder = model.get_decoder()
    stack = getattr(decoder, architecture.layers)
    found = []
    for index in layers:
        kind = shape.layer(index)
        share = rank_share(kind, whole.degree, whole.rank)
        cuts = layer_cuts(kind, share, architecture)
        for name, cut in cuts.items():
            _divide(stack[index], name, cut)
        names = architecture.of_kind(kind.kind)
        attention: Any = stack[index].get_submodule(names.attention[0].rpartition(".")[0])
        _keep_heads(attention, share)
        if kind.qk_norm_width:
            _share_norms(attention, kind, share)
        if share.rank and kind.experts is not None:  # which are added once
            stack[index].get_submodule(str(names.experts)).down_proj_bias = None
        found.append(cuts)
    cut = vocabulary_cut(shape, whole)
    for name in architecture.embedding:
        embedding = getattr(decoder, name, None)
        if isinstance(embedding, nn.Embedding) and "positions" not in name:
            factor = getattr(embedding, "scalar_embed_scale", None)
            part = VocabularyPart(cut.length, embedding.embedding_dim, cut.begin, factor)
            setattr(decoder, name, part)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        _shrink(head, cut)
    return found


def sum_over_ranks(model: PreTrainedModel, kind: ModelShape, layer: nn.Module) -> None:
    """Put the sum over the ranks behind what each computes a summand of, in a loaded layer."""
    for name in summed_modules(kind, architecture_of(model.config)):
        part: Any = layer.get_submodule(name)
        bias = getattr(part, "bias", None)
        if bias is not None:
            part.bias = None
        put_submodule(layer, name, Summed(part, bias))


def join(model: PreTrainedModel, group: RankGroup) -> None:
    """Have the stage's modules compute with `group` from now on."""
    for module in model.modules():
        if isinstance(module, OfGroup):
            module.group = group


def _divide(layer: nn.Module, name: str, cut: Cut) -> None:
    """Give a parameter of this name, or those of a module, the size of the part."""
    owner_name, _, attribute = name.rpartition(".")
    owner = layer.get_submodule(owner_name)
    part = getattr(owner, attribute)
    if isinstance(part, nn.Module):
        _shrink(part, cut)
    elif part.dim() == 3:
        setattr(owner, attribute, _of_experts(owner, part, cut))
    else:
        setattr(owner, attribute, _of(part, cut))


def _shrink(module: nn.Module, cut: Cut) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if cut.reaches(parameter.dim()):
            setattr(module, name, _of(parameter, cut))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _of(parameter: Tensor, cut: Cut) -> nn.Parameter:
    assert parameter.is_meta, "no weight is loaded yet"
    return nn.Parameter(parameter[cut.index], requires_grad=False)


def _of_experts(experts: Any, parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """The part of the weights `[experts, out, in]` of all experts, of which `cut` is each's."""
    is_transposed = bool(getattr(experts, "is_transposed", False))
    each = parameter.transpose(1, 2) if is_transposed else parameter
    part = each[(slice(None), *cut.index)]
    return nn.Parameter(part.transpose(1, 2) if is_transposed else part, requires_grad=False)


def _share_norms(attention: Any, kind: ModelShape, share: RankShare) -> None:
    """Have the norms over all heads take in those of the other ranks."""
    before = rank_share(kind, share.degree, share.rank - 1) if share.rank else None
    is_first = before is None or before.kv_heads != share.kv_heads
    attention.q_norm = NormOfAllRanks(attention.q_norm, kind.query_width, True)
    attention.k_norm = NormOfAllRanks(attention.k_norm, kind.kv_width, is_first)


def _keep_heads(attention: Any, share: RankShare) -> None:
    """Tell a family's attention of the heads that it has left, where it counts them itself."""
    if hasattr(attention, "num_heads"):
        attention.num_heads = len(share.heads)
    if hasattr(attention, "qkv_proj"):  # takes it apart by these
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = len(share.heads)
        attention.num_key_value_heads = len(share.kv_heads)
    if hasattr(attention, "num_v_heads"):
        attention.num_v_heads, attention.num_k_heads = len(share.heads), len(share.kv_heads)
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
    return len(batch.head_rows) if order == Order.FINISH else int(batch.counts.sum())

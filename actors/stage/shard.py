"""Loading a stage's shard of the model: its quantized layers, and embedding, norm and head where
they belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from actors.stage.adapters import NAME, StageAdapters
from actors.stage.ends import CodedEnds, load_ends, path_of, shares_head
from actors.stage.model_config import read_config
from actors.stage.partial_model import (
    architecture_of,
    empty_model,
    keep_stage,
    plan_frequencies,
)
from actors.stage.ranks import divide, sum_over_ranks
from actors.stage.spec import StageSpec
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import RankShare, rank_share, vocabulary_cut
from quant.checkpoint.reader import Checkpoint
from quant.hosted_experts import HostedExperts
from quant.linear import HostForm, LayerForm, prepack, prepack_linears
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import (
    load_layer,
    loading,
    module_nbytes,
    return_freed_memory,
)
from quant.rounding.importance import LayerImportance
from quant.scheme import WEIGHTED, Cut, Processor


def load_shard(
    spec: StageSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    processor: Processor,
    cache: ShardCache | None,
    importance: Sequence[LayerImportance] | None = None,
) -> PreTrainedModel:
    """The stage's part of the model, quantized while it is read, or taken from the cache.

    The parts of other stages are pass-throughs, and of a stage that is divided only the part of
    `spec.rank` is loaded. `importance`: one a layer, by which weights are rounded where
    `spec.rounding` is weighted.
    """
    config = read_config(checkpoint.folder)
    architecture = architecture_of(config)
    model = empty_model(config)
    keep_stage(model, spec.layers, spec.is_first, spec.is_last, spec.has_head)
    plan_frequencies(model, spec.max_tokens)
    whole_shape = model_shape(str(checkpoint.folder))
    cuts, vocabulary = _divided(model, spec, whole_shape)
    decoder = model.get_decoder()
    stack = f"{path_of(model, decoder)}.{architecture.layers}"
    weighing = importance if importance and spec.rounding == WEIGHTED else [None] * len(spec.layers)
    forms = [_form(spec, bits, processor, device) for bits in spec.bitwidths]
    loads = [
        LayerLoad(
            module=getattr(decoder, architecture.layers)[index],
            name_prefix=f"{stack}.{index}",
            form=form,
            importance=own,
            cuts=own_cuts,
            quantized=architecture.linears,
            experts_form=_experts_form(spec, index, form),
        )
        for index, form, own, own_cuts in zip(spec.layers, forms, weighing, cuts, strict=True)
    ]
    names = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    own_form = _head_form(spec, processor, device)
    last = weighing[-1] if spec.is_last and weighing else None
    inputs = None if last is None else last.of_head
    coded = CodedEnds.of(model, spec, checkpoint, own_form, vocabulary, inputs)
    elsewhere = (f"{stack}.", *(f"{load.name_prefix}." for load in coded.to_load))
    ends = [name for name in names if not name.startswith(elsewhere)]
    with loading([*loads, *coded.to_load], ends, checkpoint, cache):
        for index, load in zip(spec.layers, loads, strict=True):
            load_layer(load, checkpoint, cache)
            if spec.degree > 1:
                sum_over_ranks(model, whole_shape.layer(index), load.module)
            prepack_linears(load.module, processor)
            return_freed_memory()
        coded.load(model, checkpoint, cache)
        load_ends(model, spec, checkpoint, own_form, vocabulary)
    if spec.adapters:
        model.add_module(NAME, _adapters(spec, whole_shape, loads))
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(prepack(head, processor, shares_head(config, spec)))
    return model


def _adapters(spec: StageSpec, shape: ModelShape, loads: Sequence[LayerLoad]) -> StageAdapters:
    beside = StageAdapters(spec.adapters, spec.slots, spec.deterministic)
    beside.load(shape, spec.layers, loads)
    return beside


def _divided(
    model: PreTrainedModel, spec: StageSpec, shape: ModelShape
) -> tuple[Sequence[Mapping[str, Cut]], Cut | None]:
    """Leave the part of `spec.rank`; what is cut of each layer, and of the vocabulary."""
    if spec.degree == 1:
        return [{}] * len(spec.layers), None
    whole = rank_share(shape, spec.degree, spec.rank)
    return divide(model, shape, whole, spec.layers), vocabulary_cut(shape, whole)


def _form(spec: StageSpec, bits: int, processor: Processor, device: torch.device) -> LayerForm:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return LayerForm(bits, processor, dtype, device, spec.backends.get(bits), spec.rounding)


def _head_form(spec: StageSpec, processor: Processor, device: torch.device) -> LayerForm:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return LayerForm(spec.head_bits, processor, dtype, device)


def _experts_form(spec: StageSpec, layer: int, form: LayerForm) -> LayerForm | None:
    """The form of a layer's experts, where it is not that of the layer."""
    given = spec.expert_bitwidths
    bits = given[layer - spec.layers.start] if given else form.bits
    if layer in spec.hosted_experts:
        return HostForm.beside(form, bits, spec.streams_from)
    return None if bits == form.bits else replace(form, bits=bits, backend=spec.backends.get(bits))


def shares_of(spec: StageSpec, checkpoint: Checkpoint) -> tuple[RankShare, ...] | None:
    """What the rank of `spec` holds of each layer; None where nothing is divided, SpecError where
    the model cannot be divided so often.
    """
    if spec.degree == 1:
        return None
    shape = model_shape(str(checkpoint.folder))
    return tuple(rank_share(shape.layer(each), spec.degree, spec.rank) for each in spec.layers)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes on the device of all tensors that came from the checkpoint: all but the rotary
    frequencies, and experts in the host's memory.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    others = module_nbytes(rotary) if rotary is not None else 0
    hosted = sum(each.nbytes for each in model.modules() if isinstance(each, HostedExperts))
    return module_nbytes(model) - others - hosted

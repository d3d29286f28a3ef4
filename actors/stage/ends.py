"""Embedding, final norm and LM head of a stage: loading them at the bits of the plan, and rounding
them so where a model is evaluated layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.stage.partial_model import architecture_of
from actors.stage.ranks import VocabularyPart
from actors.stage.spec import StageSpec
from quant.backends.base import PackedWeight
from quant.backends.kernel_classes import BACKENDS
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import fallback_rule, rule_for
from quant.checkpoint.reader import Checkpoint
from quant.embedding import QuantizedEmbedding
from quant.linear import LayerForm, dtype_name, quantize_linear
from quant.loading.cache_folder import ShardCache
from quant.loading.coded_ends import end_load, load_end, reads_rows
from quant.loading.emulated_kernels import (
    Compute,
    LayerScheme,
    RepresentedLinear,
    represented_product,
)
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_tensors, read_weight
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import FULL_BITS, Cut, LinearShape


def shares_head(config: PretrainedConfig, spec: StageSpec) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False)) and spec.is_first


@dataclass(frozen=True)
class CodedEnds:
    """Embedding of tokens and head of a stage that have fewer than 16 bits. Those that are tied are
    one weight, where rows can be read in the layout of the head's kernel.
    """

    head: LayerLoad | None = None
    embedding: LayerLoad | None = None
    are_tied: bool = False

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        spec: StageSpec,
        checkpoint: Checkpoint,
        form: LayerForm,
        vocabulary: Cut | None,
        inputs: InputStatistics | None,
    ) -> CodedEnds:
        """`vocabulary`: the rows of both that a rank holds; None: all. `inputs`: those that the
        head is rounded by. Raises `CheckpointError` for missing weights.
        """
        if form.bits == FULL_BITS:
            return cls()
        head = embedding = None
        if spec.has_head:
            name, own = _head_prefix(model, checkpoint), model.get_output_embeddings()
            head = end_load(own, name, checkpoint, form, vocabulary, inputs)
        if spec.is_first:
            decoder, child = _place_of_embedding(model)
            name, own = f"{path_of(model, decoder)}.{child}", getattr(decoder, child)
            by_rows = replace(form, backend=fallback_rule(form.bits).name)
            embedding = end_load(own, name, checkpoint, by_rows, vocabulary, None)
        return cls(head, embedding, shares_head(model.config, spec))

    @property
    def to_load(self) -> list[LayerLoad]:
        """Those that are expected to be loaded, in turn."""
        embedding = None if self.head is not None and self.are_tied else self.embedding
        return [each for each in (self.head, embedding) if each is not None]

    def load(
        self, model: PreTrainedModel, checkpoint: Checkpoint, cache: ShardCache | None
    ) -> None:
        """Put them into `model`. Raises `CheckpointError` for unusable weights."""
        packed: PackedWeight | None = None
        if self.head is not None:
            coded, sample = load_end(self.head, checkpoint, cache)
            model.set_output_embeddings(coded)
            if self.are_tied and reads_rows(coded.packed, sample, coded.out_features):
                packed = coded.packed
        if self.embedding is None:
            return
        if packed is None:
            packed = load_end(self.embedding, checkpoint, cache)[0].packed
        decoder, child = _place_of_embedding(model)
        embedding = getattr(decoder, child)
        is_part = isinstance(embedding, VocabularyPart)
        factor = embedding.factor if is_part else getattr(embedding, "scalar_embed_scale", None)
        width, dtype = embedding.weight.shape[1], self.embedding.form.dtype
        found = QuantizedEmbedding(packed, width, dtype, factor)
        if is_part:
            embedding.hold(found)
        else:
            setattr(decoder, child, found)


def _place_of_embedding(model: PreTrainedModel) -> tuple[nn.Module, str]:
    return model.get_decoder(), architecture_of(model.config).embedding[0]


def load_ends(
    model: PreTrainedModel,
    spec: StageSpec,
    checkpoint: Checkpoint,
    form: LayerForm,
    vocabulary: Cut | None = None,
) -> None:
    """Load the parts of a stage beside its layers and `CodedEnds`: embedding, final norm, head,
    frequencies.

    `vocabulary`: the rows of embedding and head that a rank holds; None: all. Raises
    `CheckpointError` for unusable weights.
    """
    architecture = architecture_of(model.config)
    decoder = model.get_decoder()
    path = path_of(model, decoder)
    owned = (architecture.embedding if spec.is_first else ()) + (
        architecture.final if spec.is_last else ()
    )
    for child in owned:
        module = getattr(decoder, child, None)
        if module is not None:
            cuts = _cuts(vocabulary if isinstance(module, VocabularyPart) else None)
            load_tensors(module, checkpoint, f"{path}.{child}", form.dtype, form.device, cuts)
    if spec.has_head and form.bits == FULL_BITS:
        head = model.get_output_embeddings()
        if shares_head(model.config, spec):
            head.weight = model.get_input_embeddings().weight
        else:
            prefix = _head_prefix(model, checkpoint)
            load_tensors(head, checkpoint, prefix, form.dtype, form.device, _cuts(vocabulary))
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is not None:
        rotary.to(form.device)


def _head_prefix(model: PreTrainedModel, checkpoint: Checkpoint) -> str:
    """Where the LM head is stored: with the embedding where both are one tensor."""
    architecture = architecture_of(model.config)
    if getattr(model.config, "tie_word_embeddings", False):
        return f"{path_of(model, model.get_decoder())}.{architecture.embedding[0]}"
    stored, names = set(checkpoint.names()), architecture.head_names
    return next((name for name in names if f"{name}.weight" in stored), names[0])


def _cuts(vocabulary: Cut | None) -> Mapping[str, Cut]:
    """The cut of a module that has nothing but rows of the vocabulary."""
    return {} if vocabulary is None else {"": vocabulary}


def path_of(model: nn.Module, wanted: nn.Module) -> str:
    """Full name of the module `wanted` within `model`."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    return names[id(wanted)]


def round_embedding(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    scheme: LayerScheme,
    compute: Compute,
    head_inputs: InputStatistics | None,
) -> None:
    """Give the embedding of tokens the numbers that `scheme` rounds it to."""
    if scheme.bits == FULL_BITS:
        return
    decoder, child = _place_of_embedding(model)
    embedding = getattr(decoder, child)
    name = f"{path_of(model, decoder)}.{child}"
    weight = read_weight(embedding, checkpoint, name, None)
    rule, rounding = fallback_rule(scheme.bits), DEFAULT
    if getattr(model.config, "tie_word_embeddings", False) and scheme.backend is None:
        rule, rounding = _planned_rule(weight.shape, scheme, compute), Rounding(inputs=head_inputs)
    rounded = BACKENDS[rule.name].represent(weight.float(), rounding)
    embedding.weight.data.copy_(rounded)


def round_head(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    scheme: LayerScheme,
    compute: Compute,
    inputs: InputStatistics | None,
) -> None:
    """Replace the LM head by one of `scheme`, whose kernel computes where it runs here."""
    if scheme.bits == FULL_BITS:
        return
    head, name = model.get_output_embeddings(), _head_prefix(model, checkpoint)
    weight = read_weight(head, checkpoint, name, None)
    rule = _planned_rule(weight.shape, scheme, compute)
    form = LayerForm(scheme.bits, compute.processor, compute.dtype, compute.device)
    if form.rule_of(LinearShape(weight.shape[1], weight.shape[0])) is rule:
        rounded = quantize_linear(weight, None, form, name, inputs)
        rounded.bias = head.bias
    else:
        rounding = Rounding(inputs=inputs)
        product = represented_product(rule.name, weight.float(), compute.dtype, rounding)
        rounded = RepresentedLinear(product, head.bias)
    model.set_output_embeddings(rounded)


def _planned_rule(shape: tuple[int, ...], scheme: LayerScheme, compute: Compute) -> KernelRule:
    """The kernel of a head `[vocabulary, width]` where it is planned, else here."""
    rows, columns = shape
    wanted = scheme.bits, LinearShape(columns, rows)
    if scheme.planned_for is None:
        return rule_for(compute.processor, *wanted, dtype_name(compute.dtype))
    return rule_for(scheme.planned_for, *wanted, scheme.planned_dtype)

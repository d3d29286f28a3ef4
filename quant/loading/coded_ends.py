"""Embedding of tokens and LM head of fewer than 16 bits, rounded or from the cache, as layers are.

Either is loaded as a linear `[vocabulary, width]` beside a sample of its rows, by which one tells
whether a kernel's layout, just made or from the cache, can be read row by row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from quant.backends.base import PackedWeight, copy_of
from quant.checkpoint.reader import Checkpoint
from quant.linear import LayerForm, QuantizedLinear, quantize_linear
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import fill_with_cache, load_tensors, read_weight
from quant.rounding.importance import InputStatistics, LayerImportance
from quant.scheme import Cut

_LINEAR = "linear"
_SAMPLED_ROWS = 16
_TOLERANCE = 0.1
"""Relative error of decoded rows; 8 bit costs 0.01, 6 bit 0.02, rows that are others' have 1.4."""


class CodedEnd(nn.Module):
    """An embedding or head while it is loaded; `sample` `[rows, width]` in the compute type."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        weight: nn.Parameter = end.get_parameter("weight")
        rows, width = weight.shape
        linear = nn.Linear(width, rows, bias=False, device="meta")
        linear.weight = weight
        linear.register_parameter("bias", getattr(end, "bias", None))
        self.linear: nn.Module = linear
        self.sample: Tensor
        sampled = len(_sampled(rows))
        self.register_buffer("sample", torch.empty(sampled, width, device="meta"))


def end_load(
    end: nn.Module,
    name: str,
    checkpoint: Checkpoint,
    form: LayerForm,
    vocabulary: Cut | None,
    inputs: InputStatistics | None,
) -> LayerLoad:
    """What is to be loaded of `end`, on the meta device, whose weight is stored below `name`;
    `vocabulary`: the rows that are held; `inputs` weigh its columns. CheckpointError if missing.
    """
    stored = checkpoint.find(f"{name}.weight", name.partition(".")[0])
    importance = None if inputs is None else LayerImportance({_LINEAR: inputs}, torch.zeros(0, 0))
    cuts = {} if vocabulary is None else {_LINEAR: vocabulary}
    return LayerLoad(CodedEnd(end), stored.removesuffix(".weight"), form, importance, cuts)


def load_end(
    load: LayerLoad, checkpoint: Checkpoint, cache: ShardCache | None
) -> tuple[QuantizedLinear, Tensor]:
    """Load what `end_load` made; return it with the sample of its rows."""
    fill = partial(_round, load, checkpoint)
    if cache is None:
        fill()
    else:
        fill_with_cache(load, checkpoint, cache, fill)
    end = load.module
    assert isinstance(end, CodedEnd)
    assert isinstance(end.linear, QuantizedLinear)
    return end.linear, end.sample


def reads_rows(packed: PackedWeight, sample: Tensor, count: int) -> bool:
    """Whether an embedding of `count` rows, `sample` among them, can look them up in `packed`."""
    found = packed.rows(_sampled(count).to(sample.device))
    if found is None:
        return False
    return float((found - sample.float()).norm()) <= _TOLERANCE * float(sample.float().norm())


def _sampled(rows: int) -> Tensor:
    return torch.arange(0, rows, max(1, rows // _SAMPLED_ROWS))


def _round(load: LayerLoad, checkpoint: Checkpoint) -> None:
    end, form, name, cut = load.module, load.form, load.name_prefix, load.cuts.get(_LINEAR)
    assert isinstance(end, CodedEnd)
    weight = read_weight(end.linear, checkpoint, name, cut)
    inputs = None if load.importance is None else load.importance.inputs[_LINEAR]
    coded = quantize_linear(weight, None, form, name, inputs)
    coded.bias = end.linear.bias  # on the meta device still, where there is one
    cuts = {} if cut is None else {"": cut}
    load_tensors(coded, checkpoint, name, form.dtype, form.device, cuts)
    end.linear = coded
    end.sample = copy_of(weight[_sampled(len(weight))], form.dtype, form.device)

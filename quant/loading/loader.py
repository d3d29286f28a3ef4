"""Filling the layers of a stage from a checkpoint or the cache, and telling who asked of each."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from quant.backends.base import PackedWeight, copy_of
from quant.checkpoint.read_ahead import READ_AHEAD_BYTES, FileRange
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import KEY_TENSORS, is_adapter, is_bias, is_harmless, is_norm
from quant.common.errors import CheckpointError
from quant.embedding import QuantizedEmbedding
from quant.experts import QuantizedExperts
from quant.linear import (
    LayerForm,
    PrepackedLinear,
    QuantizedLinear,
    linear_of_codes,
    quantize_linear,
)
from quant.loading.cache_folder import CacheKey, ShardCache, file_range
from quant.loading.cached_layer import (
    all_tensors,
    fill_from,
    layer_key,
    new_entry,
    put_submodule,
    read_layer,
)
from quant.loading.expert_tensors import load_experts
from quant.loading.layer_load import LayerLoad, expert_inputs, held_dtype
from quant.rounding.canonical import part_of
from quant.rounding.gptq_format import StoredWeight, to_canonical
from quant.scheme import COLUMNS, FULL_BITS, ROWS, Cut, LinearShape, group_size

_note: ContextVar[Callable[[], None] | None] = ContextVar("note of a loaded layer", default=None)


@contextmanager
def noting_layers(note: Callable[[], None]) -> Iterator[None]:
    before = _note.set(note)
    try:
        yield
    finally:
        _note.reset(before)


def note_layer() -> None:
    note = _note.get()
    if note is not None:
        note()


def load_layer(load: LayerLoad, checkpoint: Checkpoint, cache: ShardCache | None = None) -> None:
    """Fill a layer on the meta device and replace its `nn.Linear`s, from `cache` where it is there,
    else put there if anything was quantized. CheckpointError names a tensor that is missing, wrong,
    or has no place in the module.
    """
    _check_left_out(load, checkpoint)
    fill = partial(_fill_layer, load, checkpoint)
    if cache is not None and _is_quantized_here(load, checkpoint):
        fill_with_cache(load, checkpoint, cache, fill)
    else:
        fill()
    note_layer()
    return_freed_memory()


@contextmanager
def loading(
    layers: Sequence[LayerLoad],
    others: Sequence[str],
    checkpoint: Checkpoint,
    cache: ShardCache | None = None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
) -> Iterator[None]:
    """Read ahead (`read_ahead_bytes`, 0: not) and cache in the background around `load_layer` of
    `layers` in turn and `load_tensors` of `others`, full names.
    """
    with ExitStack() as stack:
        if cache is not None:
            stack.enter_context(cache)
        if read_ahead_bytes:
            ranges = [r for load in layers for r in _ranges_of_layer(load, checkpoint, cache)]
            ranges += _ranges(others, checkpoint)
            ahead = stack.enter_context(checkpoint.reading_ahead(ranges, read_ahead_bytes))
            if cache is not None:
                cache.ahead = ahead
        yield


def _is_quantized_here(load: LayerLoad, checkpoint: Checkpoint) -> bool:
    """Whether a layer is worth caching: 16-bit ones and stored codes would only be copied. Experts
    are nearly all of theirs.
    """
    form = next(map(load.form_of, load.expert_names), load.form)
    if form.bits == FULL_BITS or not checkpoint.keeps_codes:
        return form.bits != FULL_BITS
    is_kept = load.stored_bits(checkpoint) in (form.bits, load.form.bits)
    return not is_kept or checkpoint.is_changed(load.name_prefix)


def _key(load: LayerLoad, checkpoint: Checkpoint) -> CacheKey:
    return layer_key(load, checkpoint.fingerprint(load.name_prefix))


def fill_with_cache(
    load: LayerLoad, checkpoint: Checkpoint, cache: ShardCache, fill: Callable[[], None]
) -> None:
    """Fill the module of `load` from `cache`, else by `fill`, and put it there."""
    key = _key(load, checkpoint)
    restored = cache.restore(key, lambda cached: read_layer(load, cached))
    if restored is not None:
        fill_from(load.module, restored)
        return
    fill()
    entry = new_entry(load, key, module_nbytes(load.module))
    if entry is not None and checkpoint.is_unchanged(load.name_prefix):
        cache.store(entry)


def _fill_layer(load: LayerLoad, checkpoint: Checkpoint) -> None:
    module, form, layer_bits = load.module, load.form, load.stored_bits(checkpoint)
    for name, linear in load.linears:
        filled = _filled_linear(load, name, linear, checkpoint, layer_bits)
        filled.bias = linear.bias  # still on meta: `load_tensors` fills it
        put_submodule(module, name, filled)
    for name, tensors in load.experts(checkpoint):
        own = load.form_of(name)
        inputs = expert_inputs(load, name)
        experts = load_experts(tensors, own, inputs, layer_bits=layer_bits)
        load_tensors(experts, checkpoint, tensors.name, own.dtype, own.device, tensors.cuts)
        put_submodule(module, name, experts)
    load_tensors(module, checkpoint, load.name_prefix, form.dtype, form.device, load.cuts)


def _check_left_out(load: LayerLoad, checkpoint: Checkpoint) -> None:
    """Refuse a stored bias, norm or adapter that `load.module` lacks, as the planner does: a node
    may have other weights. A bias of zeros changes nothing.
    """
    taken = {name for name, _ in all_tensors(load.module)}
    modules = {name for name, _ in load.module.named_modules()}
    attention = getattr(load.module, "self_attn", None)
    if getattr(attention, "is_kv_shared_layer", False):
        taken |= {*KEY_TENSORS}
    place = f"{load.name_prefix.partition('.')[2]}."
    for stored in checkpoint.names_below(load.name_prefix):
        name = stored.partition(place)[2]
        if name in taken or is_harmless(name):
            continue
        is_refused = is_adapter(name) or is_norm(name)
        if is_refused or (is_bias(name, modules) and bool(checkpoint.read(stored).any())):
            raise CheckpointError(
                f"tensor {stored} in {checkpoint.place}: the model's configuration has no place "
                "for it, and without it answers would be wrong; plan again for these weights, "
                "which says what to do"
            )


def _filled_linear(
    load: LayerLoad, name: str, linear: nn.Linear, checkpoint: Checkpoint, layer_bits: int
) -> nn.Module:
    """A linear as it is stored, where the plan gives the layer its own bits (`layer_bits`) or the
    linear's, else rounded to those of the plan.
    """
    full_name, form, cut = f"{load.name_prefix}.{name}", load.form, load.cuts.get(name)
    if checkpoint.keeps_codes and form.bits in (layer_bits, checkpoint.stored_bits(full_name)):
        shape = _whole(load, name, linear)
        with _named(f"{full_name}.weight", checkpoint):
            filled = linear_as_stored(checkpoint, full_name, shape, form, cut)
        if filled is not None:
            return filled
        form = form.with_bits(checkpoint.stored_bits(full_name))  # as it is
        if checkpoint.coded(full_name) is not None:  # by kernels of codes, which were planned
            planned = LinearShape(shape[1], shape[0], group_size(shape[1]))
            form = replace(form, backend=form.rule_of(planned).name)
    weight = _read(checkpoint, f"{full_name}.weight", linear.weight, cut)
    inputs = None if load.importance is None else load.importance.inputs.get(name)
    with _named(f"{full_name}.weight", checkpoint):
        return quantize_linear(weight, None, form, full_name, inputs, cut)


def linear_as_stored(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, int],
    form: LayerForm,
    cut: Cut | None = None,
) -> nn.Module | None:
    """Load the linear `module`, stored with `shape` `[out, in]`, or the part of it that `cut`
    takes, without bias, with the codes that it is stored with; None where it has none.
    CheckpointError for columns that cannot be cut.
    """
    if not checkpoint.has_codes(module):
        return None
    rows = slice(None) if cut is None or cut.dimension == COLUMNS else cut.index[ROWS]
    stored = checkpoint.read_codes(module, shape, rows)
    form, weight = form.with_bits(stored.bits), to_canonical(stored)
    if cut is not None and cut.dimension == COLUMNS:
        weight = _columns(weight, cut)
    return linear_of_codes(weight.canonical, weight.input_order, form)


def _columns(weight: StoredWeight, cut: Cut) -> StoredWeight:
    if weight.input_order is not None:
        raise CheckpointError(
            f"the groups of its {cut.size} columns lie apart (desc_act), so that no rank can hold "
            f"{cut.length} of them; quantize the model without desc_act, or give each stage one "
            "device"
        )
    return StoredWeight(part_of(weight.canonical, cut), None)


def _whole(load: LayerLoad, name: str, linear: nn.Linear) -> tuple[int, int]:
    held, cut = (linear.out_features, linear.in_features), load.cuts.get(name)
    rows, columns = held if cut is None else cut.whole_shape(held)
    return rows, columns


def _ranges_of_layer(
    load: LayerLoad, checkpoint: Checkpoint, cache: ShardCache | None
) -> list[FileRange]:
    if cache is not None and _is_quantized_here(load, checkpoint):
        path = cache.path_of(_key(load, checkpoint))
        if path.is_file():
            return [file_range(path)]
    weights = [f"{name}.weight" for name, _ in load.linears]
    names = [*weights, *(name for name, _ in all_tensors(load.module))]
    ranges = _ranges([f"{load.name_prefix}.{name}" for name in names], checkpoint)
    return list(dict.fromkeys([*ranges, *checkpoint.ranges_below(load.name_prefix)]))


def _ranges(full_names: Sequence[str], checkpoint: Checkpoint) -> list[FileRange]:
    found = ((name, name.partition(".")[0]) for name in full_names)
    stored = (checkpoint.find(*each) for each in found if checkpoint.has(*each))
    return [checkpoint.range_of(name) for name in stored]


def load_tensors(
    module: nn.Module,
    checkpoint: Checkpoint,
    name_prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> None:
    """Fill what is still on the meta device, unquantized, in `dtype`. A tied head takes the
    embedding's `name_prefix`; `cuts` are parts of tensors within `module`, by their name or their
    module's.
    """
    for owner_name, owner in module.named_modules():
        for name, tensor in _meta_tensors(owner):
            full_name = ".".join(part for part in (name_prefix, owner_name, name) if part)
            cut = cuts.get(f"{owner_name}.{name}".removeprefix("."), cuts.get(owner_name))
            cut = cut if cut is not None and cut.reaches(tensor.dim()) else None
            stored = _read(checkpoint, full_name, tensor, cut)
            stored = stored if cut is None else stored[cut.index]
            with _named(full_name, checkpoint):
                filled = copy_of(stored, held_dtype(name, tensor, dtype), device)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(owner, name, nn.Parameter(filled, False) if is_parameter else filled)


def read_weight(
    linear: nn.Module, checkpoint: Checkpoint, name_prefix: str, cut: Cut | None
) -> torch.Tensor:
    """The part that `cut` takes of the stored weight of `linear`, which is on the meta device."""
    wanted: torch.Tensor = linear.get_parameter("weight")
    stored = _read(checkpoint, f"{name_prefix}.weight", wanted, cut)
    return stored if cut is None else stored[cut.index]


def module_nbytes(module: nn.Module) -> int:
    packed: list[PackedWeight | QuantizedExperts] = []
    for child in module.modules():
        if isinstance(child, QuantizedLinear | QuantizedEmbedding):
            packed.append(child.packed)
        elif isinstance(child, QuantizedExperts):
            packed.append(child)
    tensors = (tensor for _, tensor in all_tensors(module) if not tensor.is_meta)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    quantized = sum({id(weight): weight.nbytes for weight in packed}.values())
    prepacked = [m.packed_bytes for m in module.modules() if isinstance(m, PrepackedLinear)]
    return sum(storages.values()) + quantized + sum(prepacked)


@contextmanager
def _named(full_name: str, checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"tensor {full_name} in {checkpoint.place}: {error}") from error


def return_freed_memory() -> None:
    """glibc keeps freed blocks of up to 32 MB below the packed weights that follow: without this a
    LLaMA-7B stage at 4 bit grows by 11 MB a layer above its packed size (measured).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _meta_tensors(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = itertools.chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
    return ((name, tensor) for name, tensor in list(own) if tensor.is_meta)


def _read(
    checkpoint: Checkpoint, full_name: str, wanted: torch.Tensor, cut: Cut | None
) -> torch.Tensor:
    """Read the whole tensor of `wanted`; it may be stored without its name's first part."""
    stored_name = checkpoint.find(full_name, prefix=full_name.partition(".")[0])
    stored_shape = checkpoint.shape_of(stored_name)
    shape = tuple(wanted.shape) if cut is None else cut.whole_shape(wanted.shape)
    if stored_shape != shape:
        raise CheckpointError(
            f"tensor {stored_name} in {checkpoint.place} is {list(stored_shape)} but the model's "
            f"configuration wants {list(shape)}; the checkpoint is of another model"
        )
    tensor = checkpoint.read(stored_name)
    is_codes = not tensor.is_floating_point() or tensor.element_size() < 2
    if is_codes and wanted.is_floating_point():
        raise CheckpointError(
            f"tensor {stored_name} in {checkpoint.place} holds {tensor.dtype}: the checkpoint is "
            "quantized already; give the original one in 16 or 32 bit"
        )
    return tensor

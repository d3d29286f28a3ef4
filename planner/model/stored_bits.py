"""With which bits the linears and experts of each kind of layers are stored, where a checkpoint has
integer codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.coded_weights import weight_tensors
from quant.checkpoint.stored_config import StoredConfig, StoredLinear
from quant.checkpoint.stored_tensors import stored_name
from quant.scheme import FULL_BITS, LinearShape


def as_configured(config: StoredConfig, shape: ModelShape) -> ModelShape:
    """Return `shape` with what `config` says of its linears."""

    def stored(module: str, linear: LinearShape) -> StoredLinear:
        scheme = config.scheme_of(module)
        if scheme is None or scheme.bits == FULL_BITS:
            return StoredLinear(FULL_BITS, linear.in_features)
        return StoredLinear(scheme.bits, scheme.group_size)

    return _of_layers(config, shape, stored)


def as_stored(config: StoredConfig, shape: ModelShape, folder: Path) -> ModelShape | None:
    """Return `shape` with bits and groups of the weights in `folder`, as rules (`dynamic`) may
    change them; `mixed` where layers of a kind differ. None where not all weights are here.
    """
    tensors, base = weight_tensors(folder), FAMILIES[shape.model_type].architecture.base
    if any(tensor.shape is None for tensor in tensors.values()) or not tensors:
        return None

    def stored(module: str, linear: LinearShape) -> StoredLinear:
        found = stored_name(tensors, f"{module}.weight", base)
        own = None if found is None else tensors[found].linear
        return own or StoredLinear(FULL_BITS, linear.in_features)

    return _of_layers(replace(config, mixed=False), shape, stored)


def _of_layers(
    config: StoredConfig, shape: ModelShape, stored: Callable[[str, LinearShape], StoredLinear]
) -> ModelShape:
    names = FAMILIES[shape.model_type].architecture
    by_kind = [list[list[StoredLinear]]() for _ in shape.kind_shapes]
    for index, kind in enumerate(shape.kind_of_layer):
        layer, linears = f"{names.layers_path}.{index}", _linears(shape.kind_shapes[kind])
        by_kind[kind].append([stored(f"{layer}.{name}", linear) for name, linear in linears])
    if all(own.bits == FULL_BITS for layers in by_kind for each in layers for own in each):
        return shape.with_all(stored=None, decoded=config.words)
    if any(len({tuple(each.bits for each in own) for own in layers}) > 1 for layers in by_kind):
        return shape.with_all(stored=replace(config, mixed=True))
    finest = [
        [min(place, key=lambda each: each.group_size) for place in zip(*layers, strict=True)]
        for layers in by_kind
    ]
    return _of_linears(config, shape, finest)


def _linears(kind: ModelShape) -> list[tuple[str, LinearShape]]:
    """Linears of a layer of a kind by name, behind them those of its first expert."""
    names = FAMILIES[kind.model_type].architecture.of_kind(kind.kind)
    found = list(zip((*names.attention, *names.mlp), kind.layer_linears, strict=False))
    expert = f"{names.experts}.0"
    gate = "gate_up_proj" if names.experts_by_inputs else "gate_proj"
    parts = zip((f"{expert}.{gate}", f"{expert}.down_proj"), kind.expert_linears, strict=False)
    return [*found, *parts]


def _of_linears(
    config: StoredConfig, shape: ModelShape, by_kind: Sequence[Sequence[StoredLinear]]
) -> ModelShape:
    """Return `shape` with each kind's own linears; bits of most weights, or `mixed` bits."""
    weights, kinds = Counter[int](), list[ModelShape]()
    for own, kind in zip(by_kind, shape.kind_shapes, strict=True):
        for stored, (_, linear) in zip(own, _linears(kind), strict=True):
            weights[stored.bits] += linear.parameters
    usual = config.bits if config.bits in weights else weights.most_common(1)[0][0]
    plain = replace(config, bits=usual, linears=())
    if any(usual not in {each.bits for each in own} for own in by_kind):
        return shape.with_all(stored=replace(plain, mixed=True))
    for own, kind in zip(by_kind, shape.kind_shapes, strict=True):
        both = [replace(kind, stored=each) for each in (plain, replace(plain, linears=tuple(own)))]
        same = all(
            one == other
            for one, other in zip(*([x for _, x in _linears(each)] for each in both), strict=True)
        )
        kinds.append(both[0] if same else both[1])
    if not shape.kinds:
        return kinds[0]
    return replace(shape, stored=plain, kinds=tuple(kinds))

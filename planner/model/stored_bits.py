"""With which bits the linears and experts of each kind of layers are stored in GPTQ checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.gptq_config import GptqConfig, StoredLinear, bits_of_words
from quant.checkpoint.stored_tensors import StoredTensor, stored_name, stored_tensors
from quant.scheme import FULL_BITS, LinearShape


def as_configured(config: GptqConfig, shape: ModelShape) -> ModelShape:
    """Return `shape` with what the modules that `config` names say of its linears."""
    if not config.modules:
        return shape.with_all(stored=config)
    size, by_kind = config.group_size, list[list[StoredLinear]]()
    for kind in shape.kind_shapes:
        given = [
            any(f".{module}".endswith(f".{name}") for module in config.modules)
            for name, _ in _linears(kind)
        ]
        linears = [StoredLinear(config.bits if each else FULL_BITS, size) for each in given]
        by_kind.append(linears)
    return _of_linears(config, shape, by_kind)


def as_stored(config: GptqConfig, shape: ModelShape, folder: Path) -> ModelShape | None:
    """Return `shape` with bits and groups of the weights in `folder`, as rules (`dynamic`) may
    change them; `mixed` where layers of a kind differ. None where not all weights tell.
    """
    tensors = stored_tensors(folder)
    if not tensors:
        return None
    names = FAMILIES[shape.model_type].architecture
    by_kind = [list[list[StoredLinear]]() for _ in shape.kind_shapes]
    for index, kind in enumerate(shape.kind_of_layer):
        layer, linears = f"{names.layers_path}.{index}", _linears(shape.kind_shapes[kind])
        found = [
            _stored(linear, *_parts(f"{layer}.{name}", names.base, tensors))
            for name, linear in linears
        ]
        by_kind[kind].append([each for each in found if each is not None])
        if len(by_kind[kind][-1]) < len(linears):  # not here yet, or damaged: checking will tell
            return None
    if any(len({tuple(each.bits for each in own) for own in layers}) > 1 for layers in by_kind):
        return shape.with_all(stored=replace(config, mixed=True))
    finest = [
        [min(place, key=lambda each: each.group_size) for place in zip(*layers, strict=True)]
        for layers in by_kind
    ]
    return _of_linears(replace(config, mixed=False), shape, finest)


def _linears(kind: ModelShape) -> list[tuple[str, LinearShape]]:
    """Linears of a layer of a kind by name, behind them those of its first expert."""
    names = FAMILIES[kind.model_type].architecture.of_kind(kind.kind)
    found = list(zip((*names.attention, *names.mlp), kind.layer_linears, strict=False))
    expert = f"{names.experts}.0"
    gate = "gate_up_proj" if names.experts_by_inputs else "gate_proj"
    parts = zip((f"{expert}.{gate}", f"{expert}.down_proj"), kind.expert_linears, strict=False)
    return [*found, *parts]


def _parts(
    module: str, base: str, tensors: Mapping[str, StoredTensor]
) -> tuple[StoredTensor | None, StoredTensor | None]:
    found = (stored_name(tensors, f"{module}.{part}", base) for part in ("qweight", "scales"))
    words, scales = (None if name is None else tensors[name] for name in found)
    return words, scales


def _stored(
    linear: LinearShape, words: StoredTensor | None, scales: StoredTensor | None
) -> StoredLinear | None:
    if words is None:
        return StoredLinear(FULL_BITS, linear.in_features)
    if not words.shape or scales is None or not scales.shape:
        return None
    bits = bits_of_words(words.shape[0], linear.in_features)
    size = -(-linear.in_features // max(1, scales.shape[0]))
    return None if bits is None else StoredLinear(bits, size)


def _of_linears(
    config: GptqConfig, shape: ModelShape, by_kind: Sequence[Sequence[StoredLinear]]
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

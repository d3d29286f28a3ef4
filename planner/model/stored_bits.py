"""With which bits the linears and experts of each kind of layers are stored, where a checkpoint has
integer codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from quant.checkpoint.coded_weights import weight_tensors
from quant.checkpoint.stored_config import WHOLE_ROW, StoredConfig, StoredLinear
from quant.checkpoint.stored_tensors import stored_name
from quant.scheme import FULL_BITS, LinearShape

ADDED_ERRORS = {8: 0.009, 6: 0.018, 5: 0.035, 4: 0.07, 3: 0.149}
"""What rounding adds to weights that were decoded from FP8, MXFP8, MXFP4, NVFP4, nf4 or codes of 4
bit: root of the mean square beside what was stored, the largest of these formats, which hardly
differ (`benchmarks.quantization.rounded_again`)."""

MOST_ADDED = 0.02
"""Beyond this what is added is more than what 8 bits lose by far, and is told with a remedy."""


def stored_words(shape: ModelShape) -> str:
    """How the weights of a quantized checkpoint are stored; nothing of others."""
    stored = shape.stored
    if stored is None:
        return shape.decoded
    layers, linears = Counter[int](), set[int]()
    for kind, count in zip(shape.kind_shapes, shape.kind_counts, strict=True):
        if kind.stored is not None:
            layers[kind.stored.bits] += count
            linears |= {each.bits for each in kind.stored.linears}
    words = stored.words
    if len(layers) > 1:
        each = ", ".join(f"{count} with {bits}" for bits, count in sorted(layers.items()))
        words = f"layers of different bits ({stored.method}: {each} bits)"
    beside = ", ".join(map(str, sorted(linears - set(layers))))
    return f"{words}, beside linears of {beside} bits" if beside else words


def as_configured(config: StoredConfig, shape: ModelShape) -> ModelShape:
    """Return `shape` with what `config` says of its linears."""

    def stored(module: str, linear: LinearShape) -> StoredLinear:
        scheme = config.scheme_of(module)
        if scheme is None or scheme.bits == FULL_BITS:
            return StoredLinear(FULL_BITS, linear.in_features)
        return StoredLinear(scheme.bits, scheme.group_size)

    return _of_layers(config, shape, stored)


def as_stored(config: StoredConfig, shape: ModelShape, folder: Path) -> ModelShape | None:
    """Return `shape` with bits and groups of the weights in `folder`, which tell them whatever the
    configuration says. None where not all weights are here.
    """
    tensors, base = weight_tensors(folder), FAMILIES[shape.model_type].architecture.base
    if any(tensor.shape is None for tensor in tensors.values()) or not tensors:
        return None

    def stored(module: str, linear: LinearShape) -> StoredLinear:
        found = stored_name(tensors, f"{module}.weight", base)
        own = None if found is None else tensors[found].linear
        return own or StoredLinear(FULL_BITS, linear.in_features)

    return _of_layers(config, shape, stored)


def _of_layers(
    config: StoredConfig, shape: ModelShape, stored: Callable[[str, LinearShape], StoredLinear]
) -> ModelShape:
    """Return `shape`, of whose kinds each has its own linears: layers of a kind that are stored
    with other bits, or another form of scales, are another one. Groups are the finest of the
    layers.
    """
    names, found = FAMILIES[shape.model_type].architecture, list[list[StoredLinear]]()
    for index, kind in enumerate(shape.kind_of_layer):
        layer, linears = f"{names.layers_path}.{index}", _linears(shape.kind_shapes[kind])
        found.append([stored(f"{layer}.{name}", linear) for name, linear in linears])
    if all(own.bits == FULL_BITS for linears in found for own in linears):
        return shape.with_all(stored=None, decoded=config.words)
    keys = [
        (kind, tuple((own.bits, own.form) for own in linears))
        for kind, linears in zip(shape.kind_of_layer, found, strict=True)
    ]
    order = sorted(dict.fromkeys(keys), key=lambda key: key[0])
    kinds = []
    for key in order:
        alike = (linears for own, linears in zip(keys, found, strict=True) if own == key)
        finest = [min(each, key=_group_size) for each in zip(*alike, strict=True)]
        kinds.append(_with_linears(config, shape.kind_shapes[key[0]], finest))
    if len(kinds) == 1 and not shape.kinds:
        return kinds[0]
    most = Counter(kinds[order.index(key)].stored for key in keys).most_common(1)[0][0]
    return replace(
        shape,
        stored=most and replace(most, linears=()),
        kinds=tuple(kinds),
        pattern=tuple(map(order.index, keys)),
    )


def _group_size(linear: StoredLinear) -> float:
    return inf if linear.group_size == WHOLE_ROW else linear.group_size


def _linears(kind: ModelShape) -> list[tuple[str, LinearShape]]:
    """Linears of a layer of a kind by name, behind them those of its first expert."""
    names = FAMILIES[kind.model_type].architecture.of_kind(kind.kind)
    found = list(zip((*names.attention, *names.mlp), kind.layer_linears, strict=False))
    expert = f"{names.experts}.0"
    gate = "gate_up_proj" if names.experts_by_inputs else "gate_proj"
    parts = zip((f"{expert}.{gate}", f"{expert}.down_proj"), kind.expert_linears, strict=False)
    return [*found, *parts]


def _with_linears(
    config: StoredConfig, kind: ModelShape, own: Sequence[StoredLinear]
) -> ModelShape:
    """Return `kind` with linears that are stored so, named one by one where they are not alike."""
    weights = Counter[int]()
    for stored, (_, linear) in zip(own, _linears(kind), strict=True):
        weights[stored.bits] += linear.parameters
    plain = replace(config, bits=config.bits_of_layer(weights), linears=())
    alike, each = (
        replace(kind, stored=stored) for stored in (plain, replace(plain, linears=tuple(own)))
    )
    pairs = zip(_linears(alike), _linears(each), strict=True)
    return alike if all(one == other for one, other in pairs) else each

"""LoRA adapters beside a model, chosen by each request: their names, what of the layers they change
and what that takes; without torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from planner.model.families import FAMILIES
from planner.model.shape import ModelShape
from planner.model.tensor_shapes import layer_tensors
from quant.checkpoint.adapter import Adapter, LowRank
from quant.checkpoint.stored_tensors import other_parts, spellings
from quant.common.errors import CheckpointError, SpecError

MOST_RANK = 64
"""The largest rank of an adapter that is not merged: beyond it merging is what pays."""

MOST_NAME = 200
"""Characters of an adapter's name."""

Ranks = tuple[tuple[str, int], ...]
"""Modules of a layer with the sum of the ranks that all adapters add to each."""

NamedFolders = Mapping[str, str | Path] | Iterable[str]
"""Folders of adapters by name, or `NAME=FOLDER` of each."""


def named_adapters(given: NamedFolders) -> tuple[str, ...]:
    """`NAME=FOLDER` of each adapter, folders absolute; SpecError for no names, or one twice."""
    pairs = given.items() if isinstance(given, Mapping) else [_pair(each) for each in given]
    found: dict[str, str] = {}
    for name, folder in pairs:
        if not (0 < len(name) <= MOST_NAME and name.isprintable() and "=" not in name):
            raise SpecError(
                f"adapters has the name {name!r:.80}; give 1 to {MOST_NAME} printable characters "
                "without ="
            )
        if name in found:
            raise SpecError(f"adapters has {name!r:.80} twice; give each name once")
        found[name] = str(Path(folder).expanduser().absolute())
    return tuple(f"{name}={folder}" for name, folder in found.items())


def _pair(text: str) -> tuple[str, str]:
    name, separator, folder = str(text).partition("=")
    if not separator or not folder:
        raise SpecError(f"adapters has {text!r:.200}; give NAME=FOLDER")
    return name, folder


def adapter_folders(adapters: Sequence[str]) -> dict[str, str]:
    """Folders by name, in the order given."""
    return dict(_pair(each) for each in adapters)


def in_layers(adapter: Adapter, shape: ModelShape) -> dict[int, dict[str, LowRank]]:
    """What `adapter` adds in each layer, by the name of the module in it. CheckpointError names a
    module that the layer has not, that is of another size, or that no adapter changes unmerged.
    """
    names, found = FAMILIES[shape.model_type].architecture, dict[int, dict[str, LowRank]]()
    stacks = "|".join(map(re.escape, spellings(names.layers_path, names.base)))
    for module, added in adapter.modules.items():
        if other_parts((module,)):  # which are not run
            continue
        match = re.fullmatch(rf"(?:{stacks})\.(\d{{1,6}})\.(.+)", module)
        layer, name = (int(match[1]), match[2]) if match else (-1, module)
        sizes = _changeable(shape.layer(layer)) if 0 <= layer < shape.layers else {}
        if sizes.get(name) != added.shape:
            what = f"is {list(sizes[name])} there" if name in sizes else "is none that is changed"
            raise CheckpointError(
                f"adapter {adapter.folder} changes {module:.200} by {list(added.shape)}, which in "
                f"{shape.name} {what}: linears of attention and MLP can be; merge the adapter "
                "instead (--adapter), or give one of this model"
            )
        if added.rank > MOST_RANK:
            raise CheckpointError(
                f"adapter {adapter.folder} has rank {added.rank} in {module:.200}, at most "
                f"{MOST_RANK} is taken unmerged; merge it (--adapter)"
            )
        found.setdefault(layer, {})[name] = added
    return found


@cache
def _changeable(kind: ModelShape) -> dict[str, tuple[int, ...]]:
    """Sizes `[out, in]` of the linears that adapters change, by their name within a layer."""
    names, tensors = FAMILIES[kind.model_type].architecture.of_kind(kind.kind), layer_tensors(kind)
    attention = names.attention if kind.delta is None else ()
    return {name: tensors[f"{name}.weight"] for name in (*attention, *names.mlp)}


def ranks_of(adapters: Mapping[str, str], shape: ModelShape) -> tuple[Ranks, ...]:
    """What all adapters, folders by name, ask of the layers of each kind: the most that one has."""
    layers: dict[int, Counter[str]] = {}
    for folder in adapters.values():
        for layer, modules in in_layers(Adapter(folder), shape).items():
            sums = layers.setdefault(layer, Counter())
            for name, added in modules.items():
                sums[name] += added.rank
    found: list[dict[str, int]] = [{} for _ in shape.kind_shapes]
    for layer, sums in layers.items():
        own = found[shape.kind_of_layer[layer]]
        for name, rank in sums.items():
            own[name] = max(own.get(name, 0), rank)
    return tuple(tuple(sorted(each.items())) for each in found)


def with_adapters(shape: ModelShape, ranks: Sequence[Ranks]) -> ModelShape:
    """`shape` whose layers hold adapters of `ranks`, one for each kind (none: none)."""
    if not ranks:
        return shape
    if not shape.kinds:
        return replace(shape, adapter_ranks=ranks[0])
    own = zip(shape.kinds, ranks, strict=True)
    return replace(shape, kinds=tuple(replace(kind, adapter_ranks=each) for kind, each in own))


@cache
def adapter_parameters(kind: ModelShape) -> int:
    """Numbers of all adapters in a layer of this kind, or in what a rank has of it: of a linear
    that is cut by rows `up`, of one that is cut by columns `down`.
    """
    sizes = _changeable(kind) if kind.adapter_ranks else {}
    return sum(rank * sum(sizes[name]) for name, rank in kind.adapter_ranks)


def adapter_widths(kind: ModelShape) -> int:
    """Most numbers of a token that one linear's adapters take at once: its input, what is between,
    and what is added.
    """
    sizes = _changeable(kind) if kind.adapter_ranks else {}
    each = (min(rank, MOST_RANK) + sum(sizes[name]) for name, rank in kind.adapter_ranks)
    return max(each, default=0)

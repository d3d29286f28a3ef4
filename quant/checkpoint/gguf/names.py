"""Names of tensors in a GGUF file and in transformers, by an architecture of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quant.checkpoint.gguf.orders import Change, RowOrder

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)$")
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.(\w+)$")


@dataclass(frozen=True)
class GgufArchitecture:
    """`model_type` in transformers, and names there by those in the file: of modules outside the
    layers (`ends`) and within one (`layer`), of a tensor where its last part differs too. `experts`
    are the projections of one expert in a tensor that holds all of a layer's, within the module
    `experts_module`; `joined` tensors of the file that are one in transformers, by its name there.
    `orders` and `changes` are by modules of the file, those of `joined` by its name.
    """

    model_type: str
    layers: str
    ends: Mapping[str, str]
    layer: Mapping[str, str]
    orders: Mapping[str, RowOrder] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    norms_plus_one: bool = False
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts_module: str = "mlp.experts"
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def full_name(self, stored: str) -> str:
        """The name in transformers of `stored`; an unknown one keeps its own, below that of its
        layer.
        """
        index, tensor = _within(stored)
        module, dot, part = _module_of(tensor)
        if index is None:
            return f"{self.ends[module]}.{part}" if module in self.ends else stored
        inner = self.layer.get(tensor) or f"{self.layer.get(module, module)}{dot}{part}"
        return f"{self.layers}.{index}.{inner}"

    def expert_names(self, stored: str, count: int) -> list[str]:
        """The names in transformers of each expert's parts in `stored`, in its order; none if it is
        not of experts.
        """
        index, tensor = _within(stored)
        module, _, part = _module_of(tensor)
        names = {} if index is None or self._is_own(tensor) else self.experts
        layer = f"{self.layers}.{index}.{self.experts_module}"
        return [
            f"{layer}.{expert}.{name}.{part}"
            for expert in range(count)
            for name in names.get(module, ())
        ]

    def joined_name(self, stored: str) -> str | None:
        """The name in transformers of what `stored` is joined into."""
        index, tensor = _within(stored)
        for name, parts in self.joined.items():
            if index is not None and tensor in parts:
                return f"{self.layers}.{index}.{name}"
        return None

    def parts_of(self, full_name: str) -> list[str]:
        """The tensors of the file that are joined into one."""
        index, inner = self._inner(full_name)
        return [f"blk.{index}.{part}" for part in self.joined[inner]]

    def order(self, stored: str) -> RowOrder:
        """That of a tensor in the file, or by its name within a layer of one that is joined."""
        module = _module_of(_within(stored)[1])[0]
        return self.orders.get(module, self.orders.get(stored, "as stored"))

    def change(self, stored: str) -> Change:
        found = self.changes.get(_module_of(_within(stored)[1])[0])
        if found is not None:
            return found
        return "plus one" if self.norms_plus_one and stored.endswith("norm.weight") else "none"

    def stored_name(self, full_name: str) -> str:
        module, _, part = full_name.rpartition(".")
        index, inner = self._inner(full_name)
        if not inner:
            names = {own: name for name, own in self.ends.items()}
            return f"{names.get(module, module)}.{part}"
        stem = f"blk.{index}."
        of_expert = _OF_EXPERT.match(inner)
        if of_expert is not None and of_expert[1] == self.experts_module:
            names = {own: name for name, each in self.experts.items() for own in each}
            fused = names.get(of_expert[3], inner)
            return f"{stem}{fused}.{of_expert[4]} (expert {of_expert[2]})"
        if inner in self.joined:
            return " and ".join(f"{stem}{name}" for name in self.joined[inner])
        names = {own: name for name, own in self.layer.items()}
        if inner in names:
            return f"{stem}{names[inner]}"
        module = inner.rpartition(".")[0]
        return f"{stem}{names.get(module, module)}.{part}"

    def _is_own(self, tensor: str) -> bool:
        """Whether a tensor within a layer has a name of its own, or is joined with others."""
        return tensor in self.layer or any(tensor in parts for parts in self.joined.values())

    def _inner(self, full_name: str) -> tuple[str, str]:
        """The layer's number and the name within it; empty outside the layers."""
        if not full_name.startswith(f"{self.layers}."):
            return "", ""
        index, _, inner = full_name.removeprefix(f"{self.layers}.").partition(".")
        return index, inner


def _within(stored: str) -> tuple[str | None, str]:
    """The number of a tensor's layer, None outside them, and its name there."""
    match = _LAYER.match(stored)
    return (None, stored) if match is None else (match[1], match[2])


def _module_of(tensor: str) -> tuple[str, str, str]:
    module, dot, part = tensor.rpartition(".")
    return (module, dot, part) if dot else (tensor, "", "")


def layer_of(stored: str) -> int | None:
    """The number of a tensor's layer; None: it is outside them."""
    index = _within(stored)[0]
    return None if index is None else int(index)

"""What a checkpoint that is written says of how it is quantized, without torch: the counterpart of
`quant.checkpoint.stored_methods`. A method is an entry of `METHODS`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any

from quant.checkpoint.stored_config import (
    AWQ,
    COMPRESSED,
    GPTQ_METHOD,
    NARROW_LAYOUT,
    OWN_BITS,
    STORED_BITS,
    WHOLE_ROW,
    period_of,
)
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS, GROUP_SIZES, GptqOptions, group_size

ANY_EXPERT = "*"
"""In names of linears, in place of the number of an expert."""

_SMALL = 16
"""Linears of so many times fewer weights than the largest one of a layer are small."""


@dataclass(frozen=True)
class WrittenLayout:
    """How decoder layers are written by a `method`. `layers_name`: full name of their list;
    `linears`: of each layer `[out, in]` by name within it, those of all experts as one;
    `expert_bitwidths`: of each layer those of its experts; `head_names`: those that the LM head may
    be stored under. SpecError where nothing is to be quantized, or the method cannot hold a linear.
    """

    layers_name: str
    bitwidths: Sequence[int]
    expert_bitwidths: Sequence[int]
    linears: Sequence[Mapping[str, tuple[int, int]]]
    head_names: Sequence[str]
    method: str = GPTQ_METHOD
    options: GptqOptions = field(default_factory=GptqOptions)

    def __post_init__(self) -> None:
        check_bits(self.method, (*self.bitwidths, *self.expert_bitwidths), self.options.narrow)
        below = [
            (index, name, shape)
            for index, name, shape in self.every()
            if self.bits_of(index, name) != FULL_BITS
        ]
        for index, name, (rows, columns) in below:
            bits = self.bits_of(index, name)
            if not fills_words(rows, columns, bits):
                raise SpecError(
                    f"{self.layers_name}.{index}.{name} of {rows} x {columns} does not fill "
                    f"whole words at {bits} bits, as kernels for {self.method} ask; plan with "
                    "other --bits for this model (3 needs multiples of 32, 4 of 8, 8 of 4)"
                )
        if METHODS[self.method].one_group and self.one_group not in GROUP_SIZES:
            widths = sorted({columns for *_, (_, columns) in below})
            raise SpecError(
                f"{self.method} has one group size for all linears, but none of "
                f"{', '.join(map(str, GROUP_SIZES))} divides all of their {widths} inputs; write "
                f"--format {GPTQ_METHOD} or {COMPRESSED}"
            )

    def every(self) -> Iterator[tuple[int, str, tuple[int, int]]]:
        for index, linears in enumerate(self.linears):
            for name, shape in linears.items():
                yield index, name, shape

    def bits_of(self, index: int, name: str) -> int:
        """The bits of a linear of layer `index`; small ones stay in 16 that words cannot hold, such
        as the rates of a mixer's heads.
        """
        is_expert, linears = ANY_EXPERT in name.split("."), self.linears[index]
        bits = (self.expert_bitwidths if is_expert else self.bitwidths)[index]
        rows, columns = linears[name]
        if bits == FULL_BITS or fills_words(rows, columns, bits):
            return bits
        largest = max(one * other for one, other in linears.values())
        return FULL_BITS if rows * columns * _SMALL < largest else bits

    def group_of(self, index: int, name: str) -> int:
        columns = self.linears[index][name][1]
        group = self.options.group(columns, self.bits_of(index, name))
        return group if group in GROUP_SIZES else WHOLE_ROW

    @cached_property
    def one_group(self) -> int:
        """The most columns that share a scale in every linear."""
        quantized = (s for i, name, s in self.every() if self.bits_of(i, name) != FULL_BITS)
        return gcd(*(group_size(columns) for _, columns in quantized))

    def settings(self, plain: Collection[tuple[int, str]]) -> dict[str, Any]:
        """What `config.json` says; `plain`: layer and name of matrices beside `linears`."""
        own = {(i, name) for i, name, _ in self.every() if self.bits_of(i, name) == FULL_BITS}
        return METHODS[self.method].settings(self, sorted(own.union(plain)))


def check_bits(method: str, bitwidths: Collection[int], narrow: bool = False) -> None:
    """Raise SpecError where `method`, or llmpq's own `narrow` format, cannot hold these bits, or
    there is nothing to quantize.
    """
    if {*bitwidths} <= {FULL_BITS}:
        raise SpecError("all layers have 16 bits: there is nothing to quantize; use the model")
    known = (*(OWN_BITS if narrow else METHODS[method].bits), FULL_BITS)
    other = sorted({*bitwidths}.difference(known))
    if other:
        remedy = f"write --format {GPTQ_METHOD} or {COMPRESSED}"
        if not {*other} <= {*STORED_BITS}:
            remedy = "load the model as it is: plans of --rounding gptq and weighted have all bits"
        raise SpecError(
            f"{method} holds {' and '.join(map(str, known))} bit, and layers are to have "
            f"{' and '.join(map(str, other))}; plan with --format {method}, or {remedy}"
        )


def fills_words(rows: int, columns: int, bits: int) -> bool:
    """Whether the codes of `columns` inputs and the zeros of `rows` outputs fill whole words, as
    kernels require.
    """
    period = period_of(bits)
    return rows % period == 0 and columns % period == 0


Plain = Sequence[tuple[int, str]]
"""Layer and name of modules that stay in 16 bit, in order."""


def _gptq(layout: WrittenLayout, plain: Plain) -> dict[str, Any]:
    """Modules with other bits than most, or with 16, are `dynamic` rules: patterns of names, of
    which the first match decides.
    """
    bits = Counter(layout.bits_of(index, name) for index, name, _ in layout.every())
    del bits[FULL_BITS]
    groups = Counter(layout.group_of(index, name) for index, name, _ in layout.every())
    usual_bits, usual_group = (each.most_common(1)[0][0] for each in (bits, groups))
    rules: dict[str, dict[str, int]] = {}
    for index in range(len(layout.bitwidths)):
        rules |= _rules(layout, index, usual_bits, usual_group)
    form = "gptq" if layout.options.symmetric else "gptq_v2"
    form = NARROW_LAYOUT if layout.options.narrow else form
    return {
        "bits": usual_bits,
        "group_size": usual_group,
        "sym": layout.options.symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": form,
        "format": form,
        "pack_dtype": "int32",
        "dynamic": rules,
        "meta": {"quantizer": ["llmpq"], "damp_percent": layout.options.damping},
    }


def _rules(
    layout: WrittenLayout, index: int, usual_bits: int, usual_group: int
) -> dict[str, dict[str, int]]:
    """What a layer has that is not as usual, single linears first."""
    layer, rules = re.escape(f"{layout.layers_name}.{index}."), dict[str, dict[str, int]]()
    own_bits = {name: layout.bits_of(index, name) for name in layout.linears[index]}
    if {*own_bits.values()} <= {FULL_BITS}:
        return {f"-:{layer}.*": {}}
    for name, bits in own_bits.items():
        pattern, group = layer + _pattern(name), layout.group_of(index, name)
        if bits == FULL_BITS:
            rules[f"-:{pattern}"] = {}
        elif group != usual_group or bits != layout.bitwidths[index]:
            other_bits = {} if bits == usual_bits else {"bits": bits}
            other_group = {} if group == usual_group else {"group_size": group}
            if other_bits or other_group:
                rules[f"+:{pattern}"] = other_bits | other_group
    if layout.bitwidths[index] not in (usual_bits, FULL_BITS):
        rules[f"+:{layer}.*"] = {"bits": layout.bitwidths[index]}
    return rules


def _compressed(layout: WrittenLayout, plain: Plain) -> dict[str, Any]:
    alike: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for index, name, _ in layout.every():
        bits = layout.bits_of(index, name)
        if bits != FULL_BITS:
            alike.setdefault((bits, layout.group_of(index, name)), []).append((index, name))
    form = "pack-quantized"
    groups = {
        f"group_{number}": {
            "targets": _targets(layout, modules),
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": layout.options.symmetric,
                "strategy": "channel" if group == WHOLE_ROW else "group",
                "group_size": None if group == WHOLE_ROW else group,
            },
            "format": form,
        }
        for number, ((bits, group), modules) in enumerate(sorted(alike.items()))
    }
    return {
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*layout.head_names, *_targets(layout, plain)],
    }


def _targets(layout: WrittenLayout, modules: Plain) -> list[str]:
    """Patterns of the names of `modules`, one for all that lie in the same layers."""
    layers_of: dict[str, list[int]] = {}
    for index, name in modules:
        layers_of.setdefault(name, []).append(index)
    names_in: dict[tuple[int, ...], list[str]] = {}
    for name, layers in layers_of.items():
        names_in.setdefault(tuple(layers), []).append(_pattern(name))
    base = re.escape(layout.layers_name)
    return [
        rf"re:{base}\.(?:{'|'.join(map(str, layers))})\.(?:{'|'.join(names)})$"
        for layers, names in names_in.items()
    ]


def _awq(layout: WrittenLayout, plain: Plain) -> dict[str, Any]:
    """Readers look for the names of modules that are left out within full names."""
    base = layout.layers_name
    names = (f"{base}.{index}.{name.partition(f'.{ANY_EXPERT}.')[0]}" for index, name in plain)
    return {
        "bits": METHODS[AWQ].bits[0],
        "group_size": layout.one_group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [*layout.head_names, *dict.fromkeys(names)],
    }


@dataclass(frozen=True)
class _Method:
    """The `bits` that it has beside 16, whether all linears have `one_group` size, and how it says
    what it holds.
    """

    bits: tuple[int, ...]
    one_group: bool
    settings: Callable[[WrittenLayout, Plain], dict[str, Any]]


METHODS: Mapping[str, _Method] = {
    GPTQ_METHOD: _Method(STORED_BITS, False, _gptq),
    COMPRESSED: _Method(STORED_BITS, False, _compressed),
    AWQ: _Method((4,), True, _awq),
}


def _pattern(name: str) -> str:
    return re.escape(name).replace(re.escape(ANY_EXPERT), r"\d+")

"""What each method of quantization says of its weights, without torch: from its settings to
`StoredConfig`. `SpecError` names place, entry, value and remedy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quant.checkpoint.formats.libraries import (
    MX_BLOCK,
    REMEDY,
    checked_bits,
    checked_block,
    checked_size,
    compressed,
    modelopt,
    torchao,
)
from quant.checkpoint.stored_config import (
    AWQ,
    BITSANDBYTES,
    COMPRESSED,
    FP8,
    GPTQ_METHOD,
    MODELOPT,
    MOST_PATTERNS,
    NARROW_LAYOUT,
    OWN_BITS,
    STORED_BITS,
    TORCHAO,
    WHOLE_ROW,
    Modules,
    Scheme,
    StoredConfig,
)
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0, NARROW_LAYOUT: 0}
"""Formats of GPTQ, with what has to be added to their zeros: the first one stores them less one."""


def _gptq(values: Mapping[str, Any], place: str) -> StoredConfig:
    layout = str(values.get("format") or values.get("checkpoint_format") or "gptq").lower()
    if values.get("is_marlin_format") is True:
        layout = "marlin"
    words = str(values.get("pack_dtype") or "int32").removeprefix("torch.")
    if layout not in _ZERO_OFFSETS or words != "int32":
        raise SpecError(
            f"{place}: its GPTQ weights are in format {layout:.40} of {words:.40} words; "
            f"{' and '.join(_ZERO_OFFSETS)} of int32 words can be read: {REMEDY}"
        )
    known = OWN_BITS if layout == NARROW_LAYOUT else STORED_BITS
    bits = checked_bits(values.get("bits"), known, "GPTQ", place)
    size = checked_size(values.get("group_size", WHOLE_ROW), "group_size", place)
    modules = _modules(values.get("modules_in_block_to_quantize"), place)
    within = frozenset(_OF_LAYER.sub("", name) for name in modules)
    return StoredConfig(
        bits=bits,
        group_size=size,
        desc_act=bool(values.get("desc_act", False)),
        zero_offset=_ZERO_OFFSETS[layout],
        schemes=(
            *_rules(values.get("dynamic"), (bits, size), known, place),
            Scheme(Modules(not within, within=within), bits, size, symmetric=False),
        ),
    )


_OF_LAYER = re.compile(r"^(?:\w+\.)*?(?:layers|h)\.\d+\.")
"""What names of modules begin with where they are given in full."""


def _awq(values: Mapping[str, Any], place: str) -> StoredConfig:
    layout = str(values.get("version") or values.get("format") or "gemm").lower()
    if values.get("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != "gemm":
        raise SpecError(
            f"{place}: its AWQ weights are packed for {layout:.40}, of which only gemm is read; "
            f"quantize with version GEMM, or {REMEDY}"
        )
    if values.get("zero_point", True) is not True:
        raise SpecError(
            f"{place}: zero_point is {values['zero_point']!r:.40}; AWQ weights are read with zero "
            f"points alone: {REMEDY}"
        )
    bits = checked_bits(values.get("bits", values.get("w_bit")), (4,), "AWQ", place)
    key = "group_size" if "group_size" in values else "q_group_size"
    size = checked_size(values.get(key), key, place)
    scheme = Scheme(bits=bits, group_size=size, symmetric=False)
    ignored = Modules.of_names(values, "modules_to_not_convert", place)
    return StoredConfig(bits, size, method=AWQ, schemes=(scheme,), ignored=ignored)


def _auto_round(values: Mapping[str, Any], place: str) -> StoredConfig:
    """GPTQ or AWQ as AutoRound packs it."""
    layout = str(values.get("packing_format") or "gptq").lower().removeprefix("auto_round:")
    layout = layout.removeprefix("auto_")
    if values.get("act_bits", FULL_BITS) != FULL_BITS or layout not in ("gptq", "gptqmodel", "awq"):
        raise SpecError(
            f"{place}: its AutoRound weights are packed as {layout:.40} for activations of "
            f"{values.get('act_bits', FULL_BITS)!r:.20} bits, which is not read; export it again "
            f"with --format auto_gptq, auto_awq or llm_compressor, or {REMEDY}"
        )
    if layout == "awq":
        return _awq({**values, "version": "gemm", "zero_point": True}, place)
    own = {"format": "gptq" if layout == "gptq" else "gptq_v2"}
    found = _gptq({**values, **own, "dynamic": None}, place)
    extra = values.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise SpecError(f"{place}: extra_config is {extra!r:.40}; it must be an object")
    names = defaultdict[tuple[int, int], set[str]](set)
    for name, change in extra.items():
        given = change if isinstance(change, Mapping) else {}
        bits = given.get("bits", found.bits)
        size = checked_size(given.get("group_size", found.group_size), "extra_config", place)
        is_coded = type(bits) is int and bits in STORED_BITS
        names[bits if is_coded else FULL_BITS, size].add(name)
    rules = (Scheme(Modules(names=frozenset(of)), *how, False) for how, of in names.items())
    return replace(found, schemes=(*rules, *found.schemes))


def _fp8(values: Mapping[str, Any], place: str) -> StoredConfig:
    numbers = values.get("fmt", "e4m3")
    experts = values.get("expert_dtype", "fp8")
    if numbers not in ("e4m3", "float8_e4m3fn") or experts != "fp8":
        other = f"fmt {numbers!r:.40}" if experts == "fp8" else f"expert_dtype {experts!r:.40}"
        raise SpecError(f"{place}: {other} of FP8 weights is not read, e4m3 is; {REMEDY}")
    block = values.get("weight_block_size")
    own = None if block is None else checked_block(block, "weight_block_size", place)
    key = "ignored_layers" if values.get("ignored_layers") else "modules_to_not_convert"
    ignored, schemes = Modules.of_names(values, key, place), (Scheme(block=own),)
    return StoredConfig(FULL_BITS, WHOLE_ROW, method=FP8, schemes=schemes, ignored=ignored)


def _mxfp8(values: Mapping[str, Any], place: str) -> StoredConfig:
    return _fp8({**values, "weight_block_size": values.get("weight_block_size") or MX_BLOCK}, place)


def _bitsandbytes(values: Mapping[str, Any], place: str) -> StoredConfig:
    """LLM.int8() has codes and a scale a row; nf4 and fp4 are numbers of a table."""
    wide, narrow = (values.get(f"load_in_{bits}bit", False) for bits in (8, 4))
    if type(wide) is not bool or type(narrow) is not bool or wide == narrow:
        raise SpecError(
            f"{place}: load_in_8bit is {wide!r:.40} and load_in_4bit is {narrow!r:.40}; one of "
            "them must be true"
        )
    bits, key = (8 if wide else FULL_BITS), "llm_int8_skip_modules"
    ignored, schemes = Modules.of_names(values, key, place), (Scheme(bits=bits),)
    return StoredConfig(bits, WHOLE_ROW, method=BITSANDBYTES, schemes=schemes, ignored=ignored)


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], StoredConfig]] = {
    GPTQ_METHOD: _gptq,
    AWQ: _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    FP8: _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _mxfp8,
    COMPRESSED: compressed,
    BITSANDBYTES: _bitsandbytes,
    MODELOPT: modelopt,
    "modelopt_fp4": modelopt,
    TORCHAO: torchao,
}
"""Readers of settings by `quant_method`."""


def _modules(value: Any, place: str) -> tuple[str, ...]:
    listed = [] if value is None else value
    nested = isinstance(listed, list) and all(isinstance(each, list) for each in listed)
    names = [name for each in listed for name in each] if nested else listed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"{place}: modules_in_block_to_quantize is {value!r:.60}; it must be a list of names, "
            "or of lists of them"
        )
    return tuple(names)


def _rules(
    given: Any, usual: tuple[int, int], known: tuple[int, ...], place: str
) -> Iterator[Scheme]:
    """Yield what rules of GPTQModel say of modules whose names match their patterns: other bits or
    groups than `usual`, or, behind `-:`, that they are left as they are. The first one that matches
    counts.
    """
    rules = {} if given is None else given
    if not isinstance(rules, Mapping) or len(rules) > MOST_PATTERNS:
        raise SpecError(
            f"{place}: dynamic is {rules!r:.40}; it must be an object of {MOST_PATTERNS} patterns "
            "or fewer"
        )
    for pattern, change in rules.items():
        if "lm_head" in pattern:  # which no bitwidth is planned for
            continue
        name = f"re:{pattern.removeprefix('-:').removeprefix('+:')}"
        target = Modules.of_targets([name], "dynamic", place)
        if pattern.startswith("-:"):
            yield Scheme(target)
            continue
        own = change if isinstance(change, Mapping) else {}
        where = f"{place}: dynamic.{pattern:.40}"
        own_bits = checked_bits(own.get("bits", usual[0]), known, "GPTQ", where)
        own_size = checked_size(own.get("group_size", usual[1]), "group_size", where)
        yield Scheme(target, own_bits, own_size, symmetric=False)

"""What each method of quantization says of its weights, without torch: from its settings to
`StoredConfig`. `SpecError` names place, entry, value and remedy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quant.checkpoint.stored_config import (
    AWQ,
    BITSANDBYTES,
    COMPRESSED,
    FP8,
    GPTQ_METHOD,
    MODELOPT,
    MOST_PATTERNS,
    STORED_BITS,
    TORCHAO,
    WHOLE_ROW,
    Modules,
    Scheme,
    StoredConfig,
)
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS

REMEDY = (
    "give the original 16-bit checkpoint, or one that GPTQModel, AutoAWQ (GEMM), llm-compressor or "
    "llmpq quantize makes of it"
)

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Formats of GPTQ, with what has to be added to their zeros: the first one stores them less one."""

_PACKED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_MX = (1, 32)
"""Rows and columns that share a scale in MXFP8."""

_MODELOPT = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP8"),
)
_TORCHAO: Mapping[str, int | None] = {
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "Int8StaticActivationInt8WeightConfig": 8,
    "IntxWeightOnlyConfig": None,
    "Int8DynamicActivationIntxWeightConfig": None,
    "Int4WeightOnlyConfig": FULL_BITS,
    "Float8WeightOnlyConfig": FULL_BITS,
    "Float8DynamicActivationFloat8WeightConfig": FULL_BITS,
    "Float8StaticActivationFloat8WeightConfig": FULL_BITS,
}
"""Bits of integer codes by torchao's configurations; None: those of `weight_dtype`. Zeros of its
plain 4 bit are numbers, so that it is decoded."""


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
    bits = _bits(values.get("bits"), STORED_BITS, "GPTQ", place)
    size = _group_size(values.get("group_size", WHOLE_ROW), "group_size", place)
    modules = _modules(values.get("modules_in_block_to_quantize"), place)
    within = frozenset(_OF_LAYER.sub("", name) for name in modules)
    return StoredConfig(
        bits=bits,
        group_size=size,
        desc_act=bool(values.get("desc_act", False)),
        zero_offset=_ZERO_OFFSETS[layout],
        schemes=(
            *_rules(values.get("dynamic"), bits, size, place),
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
    bits = _bits(values.get("bits", values.get("w_bit")), (4,), "AWQ", place)
    key = "group_size" if "group_size" in values else "q_group_size"
    size = _group_size(values.get(key), key, place)
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
        size = _group_size(given.get("group_size", found.group_size), "extra_config", place)
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
    own = None if block is None else _block(block, "weight_block_size", place)
    key = "ignored_layers" if values.get("ignored_layers") else "modules_to_not_convert"
    ignored, schemes = Modules.of_names(values, key, place), (Scheme(block=own),)
    return StoredConfig(FULL_BITS, WHOLE_ROW, method=FP8, schemes=schemes, ignored=ignored)


def _mxfp8(values: Mapping[str, Any], place: str) -> StoredConfig:
    return _fp8({**values, "weight_block_size": values.get("weight_block_size") or _MX}, place)


def _modelopt(values: Mapping[str, Any], place: str) -> StoredConfig:
    """As ModelOpt says it in `config.json`, or in a file of its own, one level deeper."""
    own = values.get("quantization", values)
    if not isinstance(own, Mapping):
        raise SpecError(f"{place}: quantization is {own!r:.40}; it must be an object")
    kinds, layers = [own.get("quant_algo")], own.get("quantized_layers")
    if kinds == ["MIXED_PRECISION"]:
        each = layers.values() if isinstance(layers, Mapping) else [None]
        kinds = [one.get("quant_algo") if isinstance(one, Mapping) else None for one in each]
    known = _MODELOPT if len(kinds) == 1 else _MODELOPT[:-1]  # blocks are those of all weights
    other = next((kind for kind in kinds if kind not in known), None)
    if other is not None or not all(kinds):
        raise SpecError(
            f"{place}: its ModelOpt weights are of quant_algo {other!r:.40}, which is not read; "
            f"{', '.join(known)} are; {REMEDY}"
        )
    for key in ("exclude_modules", "ignore"):
        Modules.of_names(own, key, place)
    scheme = Scheme(block=_MX if kinds == ["MXFP8"] else None)
    return StoredConfig(FULL_BITS, WHOLE_ROW, method=MODELOPT, schemes=(scheme,))


def _torchao(values: Mapping[str, Any], place: str) -> StoredConfig:
    kinds = values.get("quant_type")
    own = kinds.get("default") if isinstance(kinds, Mapping) else None
    if not isinstance(own, Mapping):
        raise SpecError(
            f"{place}: quant_type is {kinds!r:.40}; torchao's weights are read where transformers "
            f"4.57 or later saved them with an object as quant_type; {REMEDY}"
        )
    rules: Any = {"_default": own}
    if own.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        rules = _data(own).get("fqn_to_config")
    if not isinstance(rules, Mapping) or not 0 < len(rules) <= MOST_PATTERNS:
        raise SpecError(
            f"{place}: fqn_to_config is {rules!r:.40}; it must be an object of {MOST_PATTERNS} "
            "entries or fewer"
        )
    order = sorted(rules, key=lambda name: (name == "_default", name.startswith("re:")))
    schemes = tuple(
        _of_torchao(Modules.of_targets([name], "fqn_to_config", place), rules[name], place)
        for name in order
        if rules[name] is not None
    )
    return StoredConfig(
        bits=schemes[-1].bits if schemes else FULL_BITS,
        group_size=schemes[-1].group_size if schemes else WHOLE_ROW,
        method=TORCHAO,
        schemes=schemes,
        ignored=Modules.of_names(values, "modules_to_not_convert", place),
    )


def _of_torchao(targets: Modules, own: Any, place: str) -> Scheme:
    kind, data = own.get("_type") if isinstance(own, Mapping) else own, _data(own)
    layouts = [_word(value) for key, value in data.items() if key.endswith("packing_format")]
    packed = [each for each in layouts if each not in ("PLAIN", "UNPACKED_TO_INT8")]
    if not isinstance(kind, str) or kind not in _TORCHAO or packed:
        how = f" packed as {packed[0]!s:.60}" if packed else ""
        raise SpecError(
            f"{place}: weights of torchao's {kind!s:.60}{how} are not read; those of "
            f"{', '.join(_TORCHAO)}, plain, are; {REMEDY}"
        )
    bits = _TORCHAO[kind]
    if bits is None:
        word = _word(data.get("weight_dtype"))
        named = next((each for each in STORED_BITS if word == f"int{each}"), word)
        bits = _bits(named, STORED_BITS, "torchao", place)
    cut = data.get("weight_granularity") or data.get("granularity")
    size = _data(cut).get("group_size", WHOLE_ROW)
    return Scheme(targets, bits, _group_size(size, "group_size of torchao", place))


def _data(value: Any) -> Mapping[str, Any]:
    """The fields of an object as torchao writes it; none of another value."""
    found = value.get("_data") if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _word(value: Any) -> Any:
    return value.get("_data") if isinstance(value, Mapping) else value


def _compressed(values: Mapping[str, Any], place: str) -> StoredConfig:
    layout = values.get("format", "mixed-precision")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= MOST_PATTERNS:
        raise SpecError(
            f"{place}: config_groups is {groups!r:.40}; it must be an object of {MOST_PATTERNS} "
            "groups or fewer"
        )
    sparse, turned = values.get("sparsity_config"), values.get("transform_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        layout = sparse["format"]
    if layout not in _PACKED_FORMATS:
        raise SpecError(f"{place}: weights of format {layout!r:.40} are not read; {REMEDY}")
    if isinstance(turned, Mapping) and turned.get("config_groups"):
        raise SpecError(
            f"{place}: transform_config turns activations while they are computed, which is not "
            f"done here; {REMEDY}"
        )
    if values.get("quantization_status", "compressed") != "compressed":
        raise SpecError(
            f"{place}: quantization_status is {values['quantization_status']!r:.40}; weights are "
            "read once they are compressed: save_pretrained with save_compressed"
        )
    read = [_group(name, group, place) for name, group in groups.items()]
    schemes = tuple(scheme for scheme, _ in read if scheme is not None)
    codes = [scheme for scheme in schemes if scheme.bits != FULL_BITS]
    return StoredConfig(
        bits=codes[0].bits if codes else FULL_BITS,
        group_size=codes[0].group_size if codes else WHOLE_ROW,
        desc_act=any(ordered for _, ordered in read),
        method=COMPRESSED,
        schemes=schemes,
        ignored=Modules.of_targets(values.get("ignore"), "ignore", place),
    )


def _group(name: str, group: Any, place: str) -> tuple[Scheme | None, bool]:
    """The scheme of a group of modules, and whether columns of its groups may lie apart."""
    where = f"{place}: config_groups.{name:.40}"
    if not isinstance(group, Mapping):
        raise SpecError(f"{where} is {group!r:.40}; it must be an object")
    layout, weights = group.get("format"), group.get("weights")
    if layout is not None and layout not in _PACKED_FORMATS:
        raise SpecError(f"{where}: weights of format {layout!r:.40} are not read; {REMEDY}")
    if weights is None:
        return None, False
    if not isinstance(weights, Mapping):
        raise SpecError(f"{where}.weights is {weights!r:.40}; it must be an object")
    targets = Modules.of_targets(group.get("targets"), "targets", where)
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if kind not in ("int", "float") or type(bits) is not int:
        raise SpecError(f"{where}.weights are {bits!r:.20} bits of type {kind!r:.20}; {REMEDY}")
    size = weights.get("group_size")
    size = WHOLE_ROW if size is None else _group_size(size, "group_size", where)
    strategy = weights.get("strategy") or ("tensor" if size == WHOLE_ROW else "group")
    is_block = strategy == "block"
    if strategy not in _STRATEGIES or (is_block and kind == "int"):
        raise SpecError(f"{where}.weights: strategy {strategy!r:.40} of {kind}; {REMEDY}")
    if ("group" in strategy) != (size != WHOLE_ROW):
        raise SpecError(f"{where}.weights: strategy {strategy} has group_size {size}")
    if kind == "float":
        if bits not in (4, 8):
            raise SpecError(f"{where}.weights are floats of {bits} bits, not 4 or 8; {REMEDY}")
        block = (1, size) if size != WHOLE_ROW else None
        if is_block:
            block = _block(weights.get("block_structure"), "block_structure", where)
        return Scheme(targets, block=block), False
    own = _bits(bits, STORED_BITS, "compressed", where)
    ordered = weights.get("actorder") in ("group", True)
    return Scheme(targets, own, size, weights.get("symmetric", True) is True), ordered


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
    COMPRESSED: _compressed,
    BITSANDBYTES: _bitsandbytes,
    MODELOPT: _modelopt,
    "modelopt_fp4": _modelopt,
    TORCHAO: _torchao,
}
"""Readers of settings by `quant_method`."""


def _bits(value: Any, known: tuple[int, ...], name: str, place: str) -> int:
    if type(value) is not int or value not in known:
        raise SpecError(
            f"{place}: its {name} weights have {value!r:.40} bits; there are kernels for "
            f"{', '.join(map(str, known))}: {REMEDY}"
        )
    return value


def _group_size(value: Any, key: str, place: str) -> int:
    if type(value) is not int or value == 0 or value < WHOLE_ROW:
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be -1 or positive")
    return value


def _block(value: Any, key: str, place: str) -> tuple[int, int]:
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be two positive integers")
    return sizes[0], sizes[1]


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


def _rules(given: Any, bits: int, size: int, place: str) -> Iterator[Scheme]:
    """Yield what rules of GPTQModel say of modules whose names match their patterns: other bits or
    groups, or, behind `-:`, that they are left as they are. The first one that matches counts.
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
        own_bits = _bits(own.get("bits", bits), STORED_BITS, "GPTQ", where)
        own_size = _group_size(own.get("group_size", size), "group_size", where)
        yield Scheme(target, own_bits, own_size, symmetric=False)

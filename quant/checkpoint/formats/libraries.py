"""Settings of compressed-tensors, of NVIDIA's ModelOpt and of torchao, which say how modules are
stored by groups, by layers or by names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.checkpoint.stored_config import (
    COMPRESSED,
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

MX_BLOCK = (1, 32)
"""Rows and columns that share a scale in MXFP8."""


def checked_bits(value: Any, known: tuple[int, ...], name: str, place: str) -> int:
    if type(value) is not int or value not in known:
        raise SpecError(
            f"{place}: its {name} weights have {value!r:.40} bits; there are kernels for "
            f"{', '.join(map(str, known))}: {REMEDY}"
        )
    return value


def checked_size(value: Any, key: str, place: str) -> int:
    if type(value) is not int or value == 0 or value < WHOLE_ROW:
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be -1 or positive")
    return value


def checked_block(value: Any, key: str, place: str) -> tuple[int, int]:
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be two positive integers")
    return sizes[0], sizes[1]


_PACKED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")

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


def modelopt(values: Mapping[str, Any], place: str) -> StoredConfig:
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
    scheme = Scheme(block=MX_BLOCK if kinds == ["MXFP8"] else None)
    return StoredConfig(FULL_BITS, WHOLE_ROW, method=MODELOPT, schemes=(scheme,))


def torchao(values: Mapping[str, Any], place: str) -> StoredConfig:
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
        bits = checked_bits(named, STORED_BITS, "torchao", place)
    cut = data.get("weight_granularity") or data.get("granularity")
    size = _data(cut).get("group_size", WHOLE_ROW)
    return Scheme(targets, bits, checked_size(size, "group_size of torchao", place))


def _data(value: Any) -> Mapping[str, Any]:
    """The fields of an object as torchao writes it; none of another value."""
    found = value.get("_data") if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _word(value: Any) -> Any:
    return value.get("_data") if isinstance(value, Mapping) else value


def compressed(values: Mapping[str, Any], place: str) -> StoredConfig:
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
    size = WHOLE_ROW if size is None else checked_size(size, "group_size", where)
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
            block = checked_block(weights.get("block_structure"), "block_structure", where)
        return Scheme(targets, block=block), False
    own = checked_bits(bits, STORED_BITS, "compressed", where)
    ordered = weights.get("actorder") in ("group", True)
    return Scheme(targets, own, size, weights.get("symmetric", True) is True), ordered

"""What a checkpoint says of how it is quantized, without torch: `quantization_config` of
`config.json`, or the file beside it in which a tool says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quant.checkpoint.stored_config import (
    AWQ,
    BITSANDBYTES,
    COMPRESSED,
    CONFIG_FILE,
    CONFIG_KEY,
    FP8,
    GPTQ_CONFIG_FILE,
    GPTQ_METHOD,
    STORED_BITS,
    WHOLE_ROW,
    Scheme,
    StoredConfig,
)
from quant.checkpoint.text_part import TEXT_SECTION
from quant.common.errors import SpecError
from quant.common.files import read_json_object
from quant.scheme import FULL_BITS

_DECODED = "mxfp4"
_OTHER_KEYS = {"compression_config": "compressed-tensors"}
_FILES = {
    GPTQ_CONFIG_FILE: "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Where tools say that they quantized, beside `config.json`: auto-gptq, AutoAWQ and llm-awq,
NVIDIA's ModelOpt; and in it under another key, older compressed-tensors."""

SETTINGS_FILES = (CONFIG_FILE, *_FILES)

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Formats of GPTQ, with what has to be added to their zeros: the first one stores them less one."""

_PACKED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")

_REMEDY = (
    "give the original 16-bit checkpoint, or one that GPTQModel, AutoAWQ (GEMM), llm-compressor or "
    "llmpq quantize makes of it"
)


def read_stored_config(folder: Path) -> StoredConfig | None:
    """Read how `folder` is quantized; None: plain weights. SpecError for what cannot be read."""
    values = quantization_entries(_read_json(folder / CONFIG_FILE))
    if values is not None:
        return parse_stored_config(values, str(folder))
    for name, method in _FILES.items():
        if (folder / name).is_file():
            entries = {"quant_method": method, **_read_json(folder / name)}
            return parse_stored_config(entries, str(folder / name))
    return None


def quantization_entries(config: Mapping[str, Any]) -> Any:
    """What a configuration says of how its weights are quantized; None of plain weights, and of
    experts in MXFP4 (gpt-oss), which are decoded as they are read.
    """
    values = config.get(CONFIG_KEY)
    if isinstance(values, Mapping) and values.get("quant_method") == _DECODED:
        return None
    if values is not None:
        return values
    other = next((key for key in _OTHER_KEYS if config.get(key) is not None), None)
    if other is not None:
        own = config[other]
        return {"quant_method": _OTHER_KEYS[other], **own} if isinstance(own, Mapping) else own
    text = config.get(TEXT_SECTION)
    return quantization_entries(text) if isinstance(text, Mapping) else None


def parse_stored_config(values: Any, place: str) -> StoredConfig:
    if not isinstance(values, Mapping):
        raise SpecError(f"{place}: {CONFIG_KEY} is {values!r:.40}; it must be an object")
    method = str(values.get("quant_method", "unnamed")).lower()
    if method not in _METHODS:
        raise SpecError(
            f"{place}: its weights are quantized by the method {method:.40}, which llmpq does not "
            f"read; {_CONVERSIONS.get(method, _REMEDY)}"
        )
    return replace(_METHODS[method](values, place), method=method)


_DEQUANTIZE = (
    "load it with transformers, call dequantize() of the model, then save_pretrained, and give "
    "that folder, or give the original 16-bit checkpoint"
)
_CONVERSIONS = {"torchao": _DEQUANTIZE, "hqq": _DEQUANTIZE}


def _gptq(values: Mapping[str, Any], place: str) -> StoredConfig:
    layout = str(values.get("format") or values.get("checkpoint_format") or "gptq").lower()
    if values.get("is_marlin_format") is True:
        layout = "marlin"
    words = str(values.get("pack_dtype") or "int32").removeprefix("torch.")
    if layout not in _ZERO_OFFSETS or words != "int32":
        raise SpecError(
            f"{place}: its GPTQ weights are in format {layout:.40} of {words:.40} words; "
            f"{' and '.join(_ZERO_OFFSETS)} of int32 words can be read: {_REMEDY}"
        )
    bits = _bits(values.get("bits"), STORED_BITS, "GPTQ", place)
    size = _group_size(values.get("group_size", WHOLE_ROW), "group_size", place)
    modules = _modules(values.get("modules_in_block_to_quantize"), place)
    targets = tuple(rf"(?:.*\.)?{re.escape(_OF_LAYER.sub('', name))}$" for name in modules)
    return StoredConfig(
        bits=bits,
        group_size=size,
        desc_act=bool(values.get("desc_act", False)),
        zero_offset=_ZERO_OFFSETS[layout],
        schemes=(
            *_rules(values.get("dynamic"), bits, size, place),
            Scheme(targets or (".*",), bits, size, symmetric=False),
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
            f"quantize with version GEMM, or {_REMEDY}"
        )
    if values.get("zero_point", True) is not True:
        raise SpecError(
            f"{place}: zero_point is {values['zero_point']!r:.40}; AWQ weights are read with zero "
            f"points alone: {_REMEDY}"
        )
    bits = _bits(values.get("bits", values.get("w_bit")), (4,), "AWQ", place)
    key = "group_size" if "group_size" in values else "q_group_size"
    size = _group_size(values.get(key), key, place)
    scheme = Scheme(bits=bits, group_size=size, symmetric=False)
    ignored = _left_out(values.get("modules_to_not_convert"), "modules_to_not_convert", place)
    return StoredConfig(bits, size, schemes=(scheme,), ignored=ignored)


def _fp8(values: Mapping[str, Any], place: str) -> StoredConfig:
    numbers = values.get("fmt", "e4m3")
    experts = values.get("expert_dtype", "fp8")
    if numbers not in ("e4m3", "float8_e4m3fn") or experts != "fp8":
        other = f"fmt {numbers!r:.40}" if experts == "fp8" else f"expert_dtype {experts!r:.40}"
        raise SpecError(f"{place}: {other} of FP8 weights is not read, e4m3 is; {_REMEDY}")
    block = values.get("weight_block_size")
    own = None if block is None else _block(block, "weight_block_size", place)
    key = "ignored_layers" if values.get("ignored_layers") else "modules_to_not_convert"
    ignored = _left_out(values.get(key), key, place)
    return StoredConfig(FULL_BITS, WHOLE_ROW, schemes=(Scheme(block=own),), ignored=ignored)


def _compressed(values: Mapping[str, Any], place: str) -> StoredConfig:
    layout = values.get("format", "mixed-precision")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SpecError(f"{place}: config_groups is {groups!r:.40}; it must be an object of groups")
    sparse, turned = values.get("sparsity_config"), values.get("transform_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        layout = sparse["format"]
    if layout not in _PACKED_FORMATS:
        raise SpecError(f"{place}: weights of format {layout!r:.40} are not read; {_REMEDY}")
    if isinstance(turned, Mapping) and turned.get("config_groups"):
        raise SpecError(
            f"{place}: transform_config turns activations while they are computed, which is not "
            f"done here; {_REMEDY}"
        )
    if values.get("quantization_status", "compressed") != "compressed":
        raise SpecError(
            f"{place}: quantization_status is {values['quantization_status']!r:.40}; weights are "
            "read once they are compressed: save_pretrained with save_compressed"
        )
    read = [_group(name, group, place) for name, group in groups.items()]
    schemes = tuple(scheme for scheme, _ in read if scheme is not None)
    codes = [scheme for scheme in schemes if scheme.bits != FULL_BITS]
    listed = _names(values.get("ignore"), "ignore", place)
    return StoredConfig(
        bits=codes[0].bits if codes else FULL_BITS,
        group_size=codes[0].group_size if codes else WHOLE_ROW,
        desc_act=any(ordered for _, ordered in read),
        schemes=schemes,
        ignored=tuple(_target(each, "ignore", place) for each in listed),
    )


def _group(name: str, group: Any, place: str) -> tuple[Scheme | None, bool]:
    """The scheme of a group of modules, and whether columns of its groups may lie apart."""
    where = f"{place}: config_groups.{name:.40}"
    if not isinstance(group, Mapping):
        raise SpecError(f"{where} is {group!r:.40}; it must be an object")
    layout, weights = group.get("format"), group.get("weights")
    if layout is not None and layout not in _PACKED_FORMATS:
        raise SpecError(f"{where}: weights of format {layout!r:.40} are not read; {_REMEDY}")
    if weights is None:
        return None, False
    if not isinstance(weights, Mapping):
        raise SpecError(f"{where}.weights is {weights!r:.40}; it must be an object")
    listed = _names(group.get("targets"), "targets", where)
    targets = tuple(_target(each, "targets", where) for each in listed)
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if kind not in ("int", "float") or type(bits) is not int:
        raise SpecError(f"{where}.weights are {bits!r:.20} bits of type {kind!r:.20}; {_REMEDY}")
    size = weights.get("group_size")
    size = WHOLE_ROW if size is None else _group_size(size, "group_size", where)
    strategy = weights.get("strategy") or ("tensor" if size == WHOLE_ROW else "group")
    is_block = strategy == "block"
    if strategy not in _STRATEGIES or (is_block and kind == "int"):
        raise SpecError(f"{where}.weights: strategy {strategy!r:.40} of {kind} is not read")
    if ("group" in strategy) != (size != WHOLE_ROW):
        raise SpecError(f"{where}.weights: strategy {strategy} has group_size {size}")
    if kind == "float":
        if bits not in (4, 8):
            raise SpecError(f"{where}.weights are floats of {bits} bits; 4 and 8 are read")
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
    ignored = _left_out(values.get(key), key, place)
    return StoredConfig(bits, WHOLE_ROW, schemes=(Scheme(bits=bits),), ignored=ignored)


_METHODS: dict[str, Callable[[Mapping[str, Any], str], StoredConfig]] = {
    GPTQ_METHOD: _gptq,
    AWQ: _awq,
    FP8: _fp8,
    COMPRESSED: _compressed,
    BITSANDBYTES: _bitsandbytes,
}


def _bits(value: Any, known: tuple[int, ...], name: str, place: str) -> int:
    if type(value) is not int or value not in known:
        raise SpecError(
            f"{place}: its {name} weights have {value!r:.40} bits; there are kernels for "
            f"{', '.join(map(str, known))}: {_REMEDY}"
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


def _names(value: Any, key: str, place: str) -> list[str]:
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise SpecError(f"{place}: {key} is {value!r:.60}; it must be a list of names")
    return listed


def _left_out(value: Any, key: str, place: str) -> tuple[str, ...]:
    """Patterns of modules that have one of the listed names within theirs."""
    return tuple(
        rf"(?:.*\.)?{re.escape(name)}(?:\.|$)" for name in _names(value, key, place) if name
    )


def _target(target: str, key: str, place: str) -> str:
    """The pattern of names that `target` of compressed-tensors means: a name, a class of modules,
    of which there is one here, or a pattern.
    """
    if not target.startswith("re:"):
        return ".*" if target == "Linear" else rf"{re.escape(target)}$"
    try:
        re.compile(target[3:])
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(f"{place}: {key} has {target!r:.60}, no pattern: {error}") from error
    return target[3:]


def _modules(value: Any, place: str) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    names = [name for each in listed for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names) or isinstance(value, str):
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
    if not isinstance(rules, Mapping):
        raise SpecError(f"{place}: dynamic is {rules!r:.40}; it must be an object")
    for pattern, change in rules.items():
        if "lm_head" in pattern:  # which no bitwidth is planned for
            continue
        target = _target(f"re:{pattern.removeprefix('-:').removeprefix('+:')}", "dynamic", place)
        if pattern.startswith("-:"):
            yield Scheme((target,))
            continue
        own = change if isinstance(change, Mapping) else {}
        where = f"{place}: dynamic.{pattern:.40}"
        own_bits = _bits(own.get("bits", bits), STORED_BITS, "GPTQ", where)
        own_size = _group_size(own.get("group_size", size), "group_size", where)
        yield Scheme((target,), own_bits, own_size, symmetric=False)


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "download it again", SpecError) if path.exists() else {}

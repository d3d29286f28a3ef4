"""How a checkpoint is quantized in GPTQ formats, without torch: GPTQModel writes it into
`config.json` (`quantization_config`), auto-gptq into `quantize_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.checkpoint.text_part import TEXT_SECTION
from quant.common.errors import SpecError
from quant.common.files import read_json_object

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
GPTQ_CONFIG_FILE = "quantize_config.json"
CONFIG_KEY = "quantization_config"
_DECODED = "mxfp4"
_OTHER_KEYS = {"compression_config": "compressed-tensors"}
_OTHER_FILES = {"quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where other methods say that they quantized: older compressed-tensors, AutoAWQ and llm-awq, and
NVIDIA's ModelOpt."""

STORED_BITS = (3, 4, 8)
"""Bitwidths of GPTQ checkpoints for which there are kernels."""

WORD_BITS = 32

WHOLE_ROW = -1
"""GPTQ's group size for one scale per output row."""

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Formats, with what has to be added to their zeros: the first one stores them less one."""

_REMEDY = (
    "give the original 16-bit checkpoint, or one in GPTQ format, such as llmpq quantize makes of it"
)


@dataclass(frozen=True)
class StoredLinear:
    bits: int
    group_size: int


@dataclass(frozen=True)
class GptqConfig:
    """`bits` and `group_size` (-1: whole rows) are most modules'; `mixed`: layers may differ. With
    `desc_act` columns of a group may lie apart. `zero_offset` is added to stored zeros. `modules`:
    quantized linears, none for all; `linears`: of each, where they are not alike.
    """

    bits: int
    group_size: int
    desc_act: bool
    zero_offset: int
    mixed: bool
    modules: tuple[str, ...] = ()
    linears: tuple[StoredLinear, ...] = ()


def bits_of_words(words: int, columns: int) -> int | None:
    return next((b for b in STORED_BITS if words == -(-columns * b // WORD_BITS)), None)


def read_gptq_config(folder: Path) -> GptqConfig | None:
    """Read how `folder` is quantized; None: plain weights. SpecError for what cannot be read."""
    values = quantization_entries(_read_json(folder / CONFIG_FILE))
    if values is not None:
        return parse_gptq_config(values, str(folder))
    for name, method in {GPTQ_CONFIG_FILE: "gptq", **_OTHER_FILES}.items():
        if (folder / name).is_file():
            entries = {"quant_method": method, **_read_json(folder / name)}
            return parse_gptq_config(entries, str(folder / name))
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
        return {"quant_method": _OTHER_KEYS[other]}
    text = config.get(TEXT_SECTION)
    return quantization_entries(text) if isinstance(text, Mapping) else None


def parse_gptq_config(values: Any, place: str) -> GptqConfig:
    if not isinstance(values, Mapping):
        raise SpecError(f"{place}: {CONFIG_KEY} is {values!r:.40}; it must be an object")
    method = str(values.get("quant_method", "unnamed")).lower()
    if method != "gptq":
        raise SpecError(
            f"{place}: its weights are quantized by the method {method}, which llmpq does not "
            f"read; {_REMEDY}"
        )
    layout = str(values.get("format") or values.get("checkpoint_format") or "gptq").lower()
    if values.get("is_marlin_format") is True:
        layout = "marlin"
    words = str(values.get("pack_dtype") or "int32").removeprefix("torch.")
    if layout not in _FORMATS or words != "int32":
        raise SpecError(
            f"{place}: its GPTQ weights are in format {layout} of {words} words; "
            f"{' and '.join(_FORMATS)} of int32 words can be read: {_REMEDY}"
        )
    if values.get("lm_head") is True:
        raise SpecError(f"{place}: its LM head is quantized, which llmpq does not read; {_REMEDY}")
    bits, group_size = values.get("bits"), values.get("group_size", WHOLE_ROW)
    if type(bits) is not int or bits not in STORED_BITS:
        raise SpecError(
            f"{place}: its GPTQ weights have {bits!r:.40} bits; there are kernels for "
            f"{', '.join(map(str, STORED_BITS))}: {_REMEDY}"
        )
    if type(group_size) is not int or group_size == 0 or group_size < WHOLE_ROW:
        raise SpecError(f"{place}: group_size is {group_size!r:.40}; it must be -1 or positive")
    return GptqConfig(
        bits=bits,
        group_size=group_size,
        desc_act=bool(values.get("desc_act", False)),
        zero_offset=_FORMATS[layout],
        mixed=_is_mixed(values.get("dynamic"), bits, place),
        modules=_modules(values.get("modules_in_block_to_quantize"), place),
    )


def _modules(value: Any, place: str) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    names = [name for each in listed for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names) or isinstance(value, str):
        raise SpecError(
            f"{place}: modules_in_block_to_quantize is {value!r:.60}; it must be a list of names, "
            "or of lists of them"
        )
    return tuple(names)


def _is_mixed(rules: Any, bits: int, place: str) -> bool:
    if not rules:
        return False
    if not isinstance(rules, Mapping):
        raise SpecError(f"{place}: dynamic is {rules!r:.40}; it must be an object")
    return any(
        pattern.startswith("-:") or _bits_of(change, bits) != bits
        for pattern, change in rules.items()
        if "lm_head" not in pattern
    )


def _bits_of(change: Any, default: int) -> Any:
    return change.get("bits", default) if isinstance(change, Mapping) else default


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "download it again", SpecError) if path.exists() else {}

"""What a checkpoint says of how it is quantized, without torch: `quantization_config` of
`config.json`, or the file beside it in which a tool says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.checkpoint.formats.libraries import REMEDY
from quant.checkpoint.formats.settings import METHODS
from quant.checkpoint.gguf.blocks import stored_config
from quant.checkpoint.gguf.folder import gguf_index
from quant.checkpoint.stored_config import (
    CONFIG_FILE,
    CONFIG_KEY,
    GPTQ_CONFIG_FILE,
    StoredConfig,
)
from quant.checkpoint.text_part import TEXT_SECTION
from quant.common.errors import SpecError
from quant.common.files import read_json_object

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


def read_stored_config(folder: Path) -> StoredConfig | None:
    """Read how `folder` is quantized; None: plain weights. SpecError for what cannot be read."""
    described = gguf_index(folder)
    if described is not None:
        return stored_config(described)
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
    if method in METHODS:
        return METHODS[method](values, place)
    raise SpecError(
        f"{place}: its weights are quantized by the method {method:.40}, which llmpq does not "
        f"read; {_REMEDIES.get(method, REMEDY)}"
    )


_REMEDIES = {
    "higgs": "load it with transformers, call dequantize() of the model, then save_pretrained, and "
    "give that folder, or give the original 16-bit checkpoint",
    "quark": f"export it again with Quark's custom_mode awq or fp8, or {REMEDY}",
    "bitnet": "give the same model in bfloat16, as its makers publish it beside",
}
"""What helps with other methods, where that is more than another checkpoint."""


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "download it again", SpecError) if path.exists() else {}

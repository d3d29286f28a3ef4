"""Which files of a folder hold a model's weights, and why others cannot be read; no torch."""

from __future__ import annotations

import json
from pathlib import Path

from quant.checkpoint.gguf.index import GGUF_INDEX_FILE
from quant.checkpoint.stored_tensors import INDEX_FILE, SINGLE_FILE

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_OTHER_FORMATS = ("consolidated*.pth", "tf_model.h5", "flax_model*.msgpack", "*.ggml", "*.onnx")
"""Weights as LLaMA's authors, TensorFlow, JAX, older llama.cpp and ONNX store them."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ggml", ".onnx")
_ORIGINAL = "give the original checkpoint, a Hugging Face folder of safetensors files"


def has_weights(folder: Path) -> bool:
    """Whether `folder` has the file or the index of safetensors that are read, or the index of a
    GGUF file's tensors.
    """
    return any((folder / name).is_file() for name in (INDEX_FILE, SINGLE_FILE, GGUF_INDEX_FILE))


def unread_weights(folder: Path) -> str | None:
    """Why the weights in `folder` cannot be read, and what helps.

    None where they can be, and where there are none at all.
    """
    if has_weights(folder):
        return None
    if (folder / ADAPTER_CONFIG).is_file() or _first(folder, _ADAPTER_FILES):
        return (
            f"{folder} holds an adapter{_base_of(folder / ADAPTER_CONFIG)}, no whole model; merge "
            "it into its base model (merge_and_unload of peft, then save_pretrained) and give that "
            "folder"
        )
    if _first(folder, _BIN_FILES):
        return (
            f"{folder} holds PyTorch .bin weights, which are not read directly; "
            f"run: llmpq convert {folder} {folder}-safetensors"
        )
    shard = _first(folder, ("*.safetensors",))
    if shard is not None:
        return (
            f"{folder} holds {shard}, but neither {SINGLE_FILE} nor {INDEX_FILE}, which says where "
            "each tensor is; download the missing file"
        )
    other = _first(folder, _OTHER_FORMATS)
    return None if other is None else unread_file(folder / other)


def unread_file(path: Path) -> str | None:
    """Why the file `path` is no model to give, and what helps; None where it may be one."""
    if any(path.match(pattern) for pattern in _OTHER_FORMATS):
        return f"{path} holds weights in a format that is not read; {_ORIGINAL}"
    if path.suffix in _WEIGHT_SUFFIXES:
        return f"{path} is one file of weights; give the folder that holds it and its config.json"
    return None


def _first(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """The name of the first file in `folder` that matches, None where there is none."""
    names = (path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return min(names, default=None)


def _base_of(config: Path) -> str:
    """`" of MODEL"` by an adapter's own configuration; empty where it names none."""
    try:
        base = json.loads(config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" of {base:.200}" if isinstance(base, str) and base else ""

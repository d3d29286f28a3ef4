"""Files of a folder that hold a model's weights, their headers, and why others cannot be read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from quant.checkpoint.gguf.blocks import stored_linears
from quant.checkpoint.gguf.folder import GGUF_INDEX_FILE, gguf_index
from quant.checkpoint.stored_config import StoredLinear
from quant.common.errors import CheckpointError
from quant.common.files import read_json_object
from quant.common.json_text import loads

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_FILES = (ADAPTER_WEIGHTS, "adapter_model.bin")

_BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_OTHER_FORMATS = ("consolidated*.pth", "tf_model.h5", "flax_model*.msgpack", "*.ggml", "*.onnx")
"""Weights as LLaMA's authors, TensorFlow, JAX, older llama.cpp and ONNX store them."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ggml", ".onnx")
_ORIGINAL = "give the original checkpoint, a Hugging Face folder of safetensors files"


def unread_weights(folder: Path) -> str | None:
    """Why weights cannot be read, and what helps; None where they can be or there are none."""
    if any((folder / name).is_file() for name in (INDEX_FILE, SINGLE_FILE, GGUF_INDEX_FILE)):
        return None
    if (folder / ADAPTER_CONFIG).is_file() or _first(folder, _ADAPTER_FILES):
        return (
            f"{folder} holds an adapter{_base_of(folder / ADAPTER_CONFIG)}, no whole model; give "
            "the base model as --model, and this folder as --adapter"
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
    if any(path.match(pattern) for pattern in _OTHER_FORMATS):
        return f"{path} holds weights in a format that is not read; {_ORIGINAL}"
    if path.suffix in _WEIGHT_SUFFIXES:
        return f"{path} is one file of weights; give the folder that holds it and its config.json"
    return None


def _first(folder: Path, patterns: tuple[str, ...]) -> str | None:
    names = (path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return min(names, default=None)


def _base_of(config: Path) -> str:
    """Write `" of MODEL"` by an adapter's own configuration; empty where it names none."""
    try:
        base = loads(config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" of {base:.200}" if isinstance(base, str) and base else ""


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LISTED = 3


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, safetensors' type and shape; both are None where the file is not here.
    `linear`: how a weight is stored as integer codes (`quant.checkpoint.coded_weights`).
    """

    file: str
    dtype: str | None
    shape: tuple[int, ...] | None
    linear: StoredLinear | None = None


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """List tensors by name. A single file comes before an index, as in transformers: the index is
    then stale. Tensors of a GGUF file have absolute paths. Shards of a hub snapshot may be missing:
    they are downloaded later; else CheckpointError.
    """
    described = gguf_index(folder)
    if described is not None:
        described.check_unchanged()
        paths, linears = [str(path) for path in described.paths], stored_linears(described)
        return {
            name: StoredTensor(paths[each.part], each.dtype, each.shape, linears.get(name))
            for name, each in described.tensors.items()
        }
    if (folder / SINGLE_FILE).is_file():
        return _in_file(folder, SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        return {}
    file_of = read_index(folder / INDEX_FILE)
    files = dict.fromkeys(file_of.values())
    here = {file: None if _comes_later(folder, file) else _in_file(folder, file) for file in files}
    return {name: _placed(folder, name, file, here[file]) for name, file in file_of.items()}


def _placed(
    folder: Path, name: str, file: str, in_file: Mapping[str, StoredTensor] | None
) -> StoredTensor:
    """`in_file`: the tensors of its file; None: it comes later."""
    if in_file is None:
        return StoredTensor(file, None, None)
    if name not in in_file:
        raise CheckpointError(
            f"{folder / INDEX_FILE} places tensor {name} in {file}, which lacks it; "
            "download the checkpoint again"
        )
    return in_file[name]


def read_index(path: Path) -> dict[str, str]:
    values = read_json_object(path, "download it again", CheckpointError, "index of shards")
    weight_map = values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} lists no tensors in its weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path} places tensor {name:.200} in {file!r:.200}, which is no file name; "
                "download it again"
            )
    return weight_map


def spellings(name: str, prefix: str) -> list[str]:
    """Names in order: checkpoints are saved with or without `prefix` (OPT's lack `model.`), and
    text models as parts of others, with names that changed over the versions of transformers.
    """
    if not prefix:
        return [name]
    rest = name.removeprefix(f"{prefix}.")
    of_text = [f"model.language_model.{rest}", f"language_model.{name}", f"language_model.{rest}"]
    return [f"{prefix}.{name}", name, rest, *of_text]


def stored_name(names: Container[str], name: str, prefix: str) -> str | None:
    """The first of the `spellings` of a tensor that is among `names`, else of those of before."""
    for each in (name, *_before(name)):
        found = next((own for own in spellings(each, prefix) if own in names), None)
        if found is not None:
            return found
    return None


def _before(name: str) -> Iterator[str]:
    """Names of before transformers renamed modules, which hub checkpoints still have."""
    for pattern, older in _OLDER:
        if pattern.search(name):
            yield pattern.sub(older, name)


_OLDER = tuple(
    (re.compile(pattern + "$"), older)
    for pattern, older in (
        (r"\.mlp\.gate\.weight", ".block_sparse_moe.gate.weight"),  # Mixtral's
        (r"\.mlp\.(experts\.\d+)\.gate_proj\.weight", r".block_sparse_moe.\1.w1.weight"),
        (r"\.mlp\.(experts\.\d+)\.up_proj\.weight", r".block_sparse_moe.\1.w3.weight"),
        (r"\.mlp\.(experts\.\d+)\.down_proj\.weight", r".block_sparse_moe.\1.w2.weight"),
        (r"_moe\.router\.weight", "_moe.router.layer.weight"),  # Granite's
        (r"_moe\.experts\.gate_up_proj", "_moe.input_linear.weight"),
        (r"_moe\.experts\.down_proj", "_moe.output_linear.weight"),
    )
)


def text_name(stored: str) -> str:
    """A stored name without that of the model around its text model."""
    rest = stored.removeprefix("model.")
    return rest.removeprefix("language_model.") if rest.startswith("language_model.") else stored


def shard_path(folder: Path, file: str) -> Path:
    path = folder / file
    if not os.path.isfile(path):  # not Path.is_file, which raises where a name is too long
        raise CheckpointError(
            missing_in_hub_cache(folder)
            or f"{folder} lacks {file}, which its index names; download the missing shard"
        )
    return path


def missing_in_hub_cache(folder: Path) -> str | None:
    """Name the files that a hub snapshot lacks, and the command that fetches them; else None."""
    if not is_in_hub_cache(folder) or (folder / SINGLE_FILE).is_file():
        return None
    lacks = "its weights"
    if (folder / INDEX_FILE).is_file():
        files = sorted(set(read_index(folder / INDEX_FILE).values()))
        gone = [file for file in files if _comes_later(folder, file)]
        if not gone:
            return None
        more = f" and {len(gone) - _LISTED} more" if len(gone) > _LISTED else ""
        lacks = f"{len(gone)} of {len(files)} files of its weights ({', '.join(gone[:_LISTED])}"
        lacks += f"{more})"
    name = folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    fetch = f"{'HF_HUB_OFFLINE=0 ' * is_offline()}hf download {name}"
    return f"{folder}, in the hub's cache, lacks {lacks}; fetch what is missing: {fetch}"


def is_offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def unreadable(path: Path, error: Exception) -> CheckpointError:
    size = path.stat().st_size if path.is_file() else 0
    return CheckpointError(
        f"{path} ({size} bytes) is truncated or damaged: {error}; download it again"
    )


def is_in_hub_cache(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def _comes_later(folder: Path, file: str) -> bool:
    return is_in_hub_cache(folder) and not os.path.isfile(folder / file)


def _in_file(folder: Path, file: str) -> dict[str, StoredTensor]:
    path = shard_path(folder, file)
    try:
        with safe_open(path, framework="np") as opened:
            return {name: described(file, opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, RuntimeError, TypeError, OSError) as error:  # TypeError: a shape
        raise unreadable(path, error) from error


def described(file: str, place: Any) -> StoredTensor:
    return StoredTensor(file, str(place.get_dtype()), tuple(place.get_shape()))


_HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|"
    r"(^|\.)(attention|attn|self_attn)\.(bias|masked_bias)$|"
    r"(^|\.)self_attn\.(.*\.)?[kqv]_scale$"
)
"""Tensors that may be ignored: tables that are computed, masks
(`_keys_to_ignore_on_load_unexpected` of transformers), scales of keys and values in caches."""

_OTHER_PART = re.compile(
    r"^(?:model\.)?(mtp|visual|vision_tower|vision_model|vision_embedder|audio_tower|embed_vision|"
    r"embed_audio|multi_modal_projector)[._]"
)
"""Parts of a checkpoint beside its text model: for images and sound, and for drafts of tokens."""

_NORM = re.compile(r"norm[^.]*\.weight$")
_OF_EXPERT = re.compile(r"\.experts\.")
_ADAPTER = re.compile(r"(^|\.)lora_")
KEY_TENSORS = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
"""What makes keys and values, which layers that read those of earlier ones do not take."""

_SMALL_BYTES = 1 << 24
"""The largest tensor that is looked at while planning; biases of real models have a hundredth."""


def is_harmless(name: str) -> bool:
    return _HARMLESS.search(name) is not None or _OTHER_PART.match(name) is not None


def other_parts(names: Iterable[str]) -> tuple[str, ...]:
    """The parts among `names` that are none of the text model, which are left out."""
    found = map(_OTHER_PART.match, names)
    return tuple(dict.fromkeys(match[1] for match in found if match is not None))


def is_bias(name: str, modules: Container[str]) -> bool:
    """Whether `name` is a bias of `modules`: left out, it changes results unless it is zero."""
    module, _, part = name.rpartition(".")
    return part == "bias" and module in modules


def is_adapter(name: str) -> bool:
    return _ADAPTER.search(name) is not None


def is_norm(name: str) -> bool:
    return _NORM.search(name) is not None


def is_of_expert(name: str) -> bool:
    return _OF_EXPERT.search(name) is not None


def patterns(names: Iterable[str]) -> str:
    """Write `names` for a message, numbers as `*` with a count: `layers.*.q_proj.bias (12)`."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    listed = [
        f"{pattern:.100}{f' ({count})' if count > 1 else ''}"
        for pattern, count in list(counts.items())[:_LISTED]
    ]
    left = sum(counts.values()) - sum(list(counts.values())[:_LISTED])
    return ", ".join(listed) + (f" and {left} more" if left else "")


def has_only_zeros(path: Path, name: str) -> bool:
    """Whether a tensor is of zeros, as auto-gptq writes biases that a model lacks; else False."""
    content = stored_bytes(path, name)
    return bool(content) and not any(content)


def stored_bytes(path: Path, name: str) -> bytes:
    """The bytes of a small tensor; none where it is large, or cannot be read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            place = _places(path, status.st_size, status.st_mtime_ns)[name]
            size = place.stop - place.start
            file.seek(place.start)
            return file.read(size) if size <= _SMALL_BYTES else b""
    except (DamagedFileError, OSError, KeyError):
        return b""


@lru_cache(maxsize=4)
def _places(path: Path, size: int, changed_ns: int) -> Mapping[str, TensorPlace]:
    """Read a header once for all tensors that are asked for one by one, while the file is as is."""
    with path.open("rb") as file:
        return read_header(file).places


LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000
"""The largest header that the `safetensors` library accepts."""


MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Errors of parsing JSON of any content, and of taking out of it what should be there."""


class DamagedFileError(Exception):
    pass


@dataclass(frozen=True)
class TensorPlace:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]


def read_header(file: BinaryIO) -> Header:
    file_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    data_start = LENGTH_BYTES + header_bytes
    if not 0 < header_bytes <= _HEADER_BYTES_MAX or data_start > file_bytes:
        raise DamagedFileError(f"its header claims {header_bytes} of {file_bytes} bytes")
    try:
        entries = loads(file.read(header_bytes))
        metadata = dict(entries.pop("__metadata__", {}))
        places = {name: _place(entry, data_start) for name, entry in entries.items()}
    except MALFORMED as error:
        raise DamagedFileError(f"its header is malformed ({type(error).__name__})") from error
    end = max((place.stop for place in places.values()), default=data_start)
    if end > file_bytes:
        raise DamagedFileError(f"it has {file_bytes} of {end} bytes")
    return Header(places, metadata)


def _place(entry: Mapping[str, Any], data_start: int) -> TensorPlace:
    start, stop = map(int, entry["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"byte range {start} to {stop}")
    shape = tuple(int(size) for size in entry["shape"])
    return TensorPlace(str(entry["dtype"]), shape, data_start + start, data_start + stop)

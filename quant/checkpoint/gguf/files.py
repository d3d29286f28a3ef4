"""Which files hold a model in GGUF: one, or the parts of a split one."""

from __future__ import annotations

import re
from pathlib import Path

from quant.common.errors import CheckpointError, SpecError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_LISTED = 4
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json",
                  "adapter_config.json")  # fmt: skip


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file by its name."""
    return path.suffix == SUFFIX and path.is_file()


def gguf_files(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is: a GGUF file, any part of a split one, or a folder that
    holds one such model and no other weights. Empty for any other file or folder.

    Raises `SpecError` for a folder of several models, `CheckpointError` where a part is missing.
    """
    if is_gguf(path):
        return _parts(path)
    if not path.is_dir() or any(any(path.glob(each)) for each in _OTHER_WEIGHTS):
        return ()
    found = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file())
    models = {model_name(each): each for each in reversed(found)}
    if len(models) > 1:
        names = sorted(each.name for each in models.values())
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise SpecError(
            f"model folder {path} holds {len(names)} GGUF models; give the file of one of them: "
            f"{', '.join(names[:_LISTED])}{more}"
        )
    return tuple(part for each in models.values() for part in _parts(each))


def model_name(path: Path) -> str:
    """The name of a file without its suffix and the number of a part."""
    match = _PART.match(path.name)
    return match["stem"] if match else path.stem


def _parts(path: Path) -> tuple[Path, ...]:
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    parts = tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}")
        for number in range(1, count + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} parts of {match['stem']}, "
            f"{missing[0]} first; download them"
        )
    return parts

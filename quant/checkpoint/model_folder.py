"""Writing a folder of weights atomically: it appears only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from quant.checkpoint.stored_config import CONFIG_FILE
from quant.common.errors import InputError

_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")


@contextmanager
def new_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a folder that becomes `target` on leaving, made in the nearest parent that exists, so
    that one rename is enough. With `replace` an old one is restored on failure.
    """
    target = Path(os.path.realpath(target))  # a loop of links fails in renaming
    base = next(parent for parent in target.parents if parent.exists())
    aside = Path(tempfile.mkdtemp(prefix=".llmpq-new-", dir=base))
    try:
        inside = target.relative_to(base)
        made = aside / "new" / inside
        made.mkdir(parents=True)
        yield made
        if replace and target.exists():
            target.rename(aside / "old")
            try:
                made.rename(target)
            except OSError:
                (aside / "old").rename(target)
                raise
        else:
            (aside / "new" / inside.parts[0]).rename(base / inside.parts[0])
    finally:
        shutil.rmtree(aside)


@contextmanager
def writing(target: Path, replace: bool) -> Iterator[Path]:
    """As `new_folder`; InputError where it cannot be written."""
    try:
        with new_folder(target, replace) as made:
            yield made
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot write {target} ({error}); choose a folder that can be written, with space "
            "for the weights"
        ) from error


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts by name; scripts can be run."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            (folder / name).chmod((folder / name).stat().st_mode | 0o111)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raise InputError if `target` exists (unless `overwrite` and a model's), or lies in `source`
    or around it.
    """
    try:
        if overlap(source, target):
            raise InputError(
                f"{target} is the model itself, or one lies in the other; name another"
            )
        if target.exists() and not overwrite:
            raise InputError(f"{target} exists already; name a new folder or pass --overwrite")
        if target.exists() and not (target / CONFIG_FILE).is_file():
            raise InputError(
                f"{target} holds no {CONFIG_FILE}: it is no model that --overwrite may replace; "
                "name another folder or remove it first"
            )
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error


def overlap(source: Path, target: Path) -> bool:
    """Whether a folder is or lies in the other under whatever names; OSError if it cannot be looked
    at.
    """

    def holds(outer: Path, inner: Path) -> bool:
        existing = (each for each in (inner, *inner.parents) if each.exists())
        return outer.exists() and any(each.samefile(outer) for each in existing)

    first, second = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    return holds(first, second) or holds(second, first)


def copy_settings(source: Path, target: Path) -> tuple[str, ...]:
    copied = []
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COPIED_SUFFIXES or path.name.upper().startswith("LICENSE")
        if path.is_file() and wanted and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
            copied.append(path.name)
    return tuple(copied)


def write_index(path: Path, file_of: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

"""What the header of an importance file tells, read without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.checkpoint.stored_tensors import MALFORMED, DamagedFileError, read_header
from quant.common.errors import CheckpointError
from quant.common.json_text import loads

SUFFIX = ".importance.safetensors"

FOLDER = "importance"
"""Name, within the cache of packed layers, of the folder that keeps what was measured."""

FORMAT, FORMAT_NOW = "format", "llmpq importance 1"
SEEN, SHAPE, FINGERPRINT, SHARED = "seen", "model_fingerprint", "fingerprint", "shared"
"""Entries of the header."""

FINGERPRINT_HEX = 16
REMEDY = "measure it again with llmpq indicator, or leave it out"
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{FINGERPRINT_HEX}}}")


@dataclass(frozen=True)
class ImportanceHeader:
    """`shared`: for each layer, the linear whose input each linear has."""

    fingerprint: str
    seen: str
    shape: str
    shared: Sequence[Mapping[str, str]]


def read_importance_header(path: Path) -> ImportanceHeader:
    try:
        with path.open("rb") as file:
            notes = read_header(file).metadata
        if notes.get(FORMAT) != FORMAT_NOW:
            raise DamagedFileError(f"its format is {notes.get(FORMAT)!r:.40}, not {FORMAT_NOW!r}")
        shared = loads(notes[SHARED])
        if not all(isinstance(s, str) for layer in shared for s in (*layer, *layer.values())):
            raise DamagedFileError("its list of linears is malformed")
        if not _FINGERPRINT.fullmatch(notes[FINGERPRINT]):
            raise DamagedFileError(f"its fingerprint is {notes[FINGERPRINT]!r:.40}")
        return ImportanceHeader(notes[FINGERPRINT], notes[SEEN], notes[SHAPE], shared)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from error
    except (DamagedFileError, *MALFORMED) as error:
        raise CheckpointError(
            f"{path} holds no importance ({type(error).__name__}: {error}); {REMEDY}"
        ) from error


def by_fingerprint(folder: Path, fingerprint: str) -> Path:
    return folder / f"{fingerprint}{SUFFIX}"

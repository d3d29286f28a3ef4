"""A digest of a model's configuration, tokenizer and weights, wherever these lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quant.checkpoint.gguf.index import gguf_index
from quant.checkpoint.model_reference import is_local_model
from quant.common.errors import CheckpointError

MODEL_HEX = 12
_READ_WHOLE = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SAMPLES = 16
SAMPLE_BYTES = 4096
"""Read from each file of weights, enough that a fine-tuned model differs from its base."""
_UNIMPORTANT = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def model_digest(folder: Path, reference: str) -> str:
    """Digest of the checkpoint in `folder`.

    `reference` is what a plan calls it. Where the folder is a download of a hub repository, its
    name and commit stand for the weights, which need not be on this machine.
    """
    seen = hashlib.blake2b(digest_size=MODEL_HEX // 2)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {name: value for name, value in config.items() if name not in _UNIMPORTANT}
        seen.update(json.dumps(kept, sort_keys=True).encode())
        for name in _READ_WHOLE:
            if (folder / name).is_file():
                seen.update(name.encode() + (folder / name).read_bytes())
        if is_local_model(Path(reference)):
            described = gguf_index(folder)
            files = sorted(folder.glob("*.safetensors")) if described is None else described.paths
            for path in files:
                _add_samples(seen, path)
        else:
            seen.update(f"{reference}@{folder.name}".encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return seen.hexdigest()


def _add_samples(seen: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    seen.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
            seen.update(file.read(SAMPLE_BYTES))

"""Identity of a job: a digest of its model, wherever that lies, and the sampling of its rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.messages import Sampling
from llmpq.rows.row import FINGERPRINT_HEX, BadRow, Row, digest
from llmpq.rows.sampling import merge_sampling
from quant.checkpoint.gguf.files import gguf_index
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


@dataclass(frozen=True)
class JobIdentity:
    """Model and sampling that all rows of a job share: a row's own sampling comes before.

    `model` is a digest; `sampling.max_new_tokens` is settled. `prompting`: how prompts become
    tokens, None for what is not set, of a template the digest.
    """

    model: str
    model_name: str
    sampling: Sampling
    prompting: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self, row: Row | BadRow) -> str:
        """Digest of the model, then of prompt and sampling, or of what is wrong with a bad row."""
        content: Mapping[str, Any]
        if isinstance(row, Row):
            sampling = merge_sampling(self.sampling, row.sampling)
            content = {**row.content, "sampling": sampling.settings}
            prompting = {name: value for name, value in self.prompting.items() if value is not None}
            content |= {"prompting": prompting} if prompting else {}
        else:
            content = {"error": row.error}
        return f"{self.model}-{digest(content, FINGERPRINT_HEX)}"


def model_digest(folder: Path, reference: str) -> str:
    """Digest of configuration, tokenizer and weights of the checkpoint in `folder`.

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

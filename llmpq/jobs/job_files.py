"""Identity of a job: a digest of its model, wherever that lies, and the sampling of its rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from actors.messages import Sampling
from llmpq.jobs.disk import Disk, commit_file, file_digest, new_digest
from llmpq.rows.row import FINGERPRINT_HEX, BadRow, Row, digest
from llmpq.rows.sampling import merge_sampling
from quant.checkpoint.gguf.folder import gguf_index
from quant.checkpoint.model_reference import is_local_model
from quant.common.errors import CheckpointError
from quant.common.files import FileIdentity

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


_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})\.jsonl")
_READ_BYTES = 2**20
SHARD_ASIDE = "shard.part"
DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True, order=True)
class Shard:
    """A file of results of a job; sorted in the order in which they were written.

    Its name is `part-GENERATION-NUMBER-ROWS-DIGEST.jsonl`. Renaming it into place commits its rows,
    and with them their number and digest: no second file has to agree.
    """

    generation: int
    number: int
    rows: int
    digest: str
    path: Path

    @property
    def source(self) -> int:
        """Number of the shard among the files of a job, of which the finished one is number 0."""
        return self.number + 1

    def is_whole(self) -> bool:
        """Whether the content is what the name says; raises OSError where it cannot be read."""
        seen, lines = hashlib.blake2b(digest_size=8), 0
        with self.path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                seen.update(block)
                lines += block.count(b"\n")
        return (lines, seen.hexdigest()) == (self.rows, self.digest)

    def lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file


def shards_in(folder: Path) -> list[Shard]:
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            generation, number, rows, digest = match.groups()
            found.append(Shard(int(generation), int(number), int(rows), digest, path))
    return sorted(found)


def write_shard(
    disk: Disk, folder: Path, generation: int, number: int, lines: Sequence[bytes]
) -> None:
    """Commit `lines`; a commit that was cut off can be done again."""
    data = b"".join(lines)
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    path = folder / f"part-{generation:03d}-{number:06d}-{len(lines)}-{digest}.jsonl"
    commit_file(disk, path, folder / SHARD_ASIDE, lambda sink: sink.write(data))


@dataclass(frozen=True)
class FileRecord:
    """State of a file; `identity` is None where a later change would not show in it."""

    name: str
    file_bytes: int
    digest: str
    identity: FileIdentity | None

    @classmethod
    def of(cls, path: Path, name: str) -> FileRecord | None:
        """State of the file at `path`; None where it changes meanwhile."""
        (identity,) = settled_identities([path])
        digest = file_digest(path)
        if FileIdentity.of(path) != identity:
            return None
        known = identity if identity.is_settled else None
        return cls(name, identity.file_bytes, digest, known)

    def matches(self, path: Path) -> bool:
        """Whether `path` holds the same bytes; they are read where the file system cannot tell."""
        now = FileIdentity.of(path)
        if now == self.identity:
            return True
        return now.file_bytes == self.file_bytes and file_digest(path) == self.digest


@dataclass(frozen=True)
class FolderRecord:
    """State of a folder of shards.

    `names`: a digest of their names, which hold digests of their content. `identities`: one of what
    the file system says of them, None where a later change would not show in it.
    """

    names: str
    identities: str | None

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> FolderRecord | None:
        """State of `shards`; None where one is damaged or changes meanwhile."""
        settled = settled_identities([shard.path for shard in shards])
        before = _identities(shards)
        if not all(shard.is_whole() for shard in shards) or _identities(shards) != before:
            return None
        known = all(identity.is_settled for identity in settled)
        return cls(_names(shards), before if known else None)

    def matches(self, shards: Sequence[Shard]) -> bool:
        """Whether `shards` are the same; they are read where the file system cannot tell."""
        if _names(shards) != self.names:
            return False
        return _identities(shards) == self.identities or all(each.is_whole() for each in shards)


def settled_identities(paths: Sequence[Path]) -> list[FileIdentity]:
    """Identities of `paths` once their last change is a clock tick ago.

    Waits for that, in vain where the clock is wrong. Raises OSError where one cannot be looked at.
    """
    identities = [FileIdentity.of(path) for path in paths]
    if identities:
        max(identities, key=lambda identity: identity.changed_ns).settle()
    return [FileIdentity.of(path) for path in paths]


def _names(shards: Sequence[Shard]) -> str:
    return _digest_of([shard.path.name for shard in shards])


def _identities(shards: Sequence[Shard]) -> str:
    return _digest_of([astuple(FileIdentity.of(shard.path)) for shard in shards])


def _digest_of(content: Sequence[object]) -> str:
    seen = new_digest()
    seen.update(json.dumps(content).encode())
    return str(seen.hexdigest())

"""The folder of a job: manifest, shards, the rows that it was begun with, journal, asides.

Each file is there whole or not at all, and the name of a shard or of a list of rows holds its
digest, so that nothing has to agree with another file after a kill. It needs no more of a file
system than renaming and syncing, which NFS has too; a database in its place would need locks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from actors.messages import Sampling
from actors.sampling_options import GREEDY
from llmpq.jobs.job_files import (
    SHARD_ASIDE,
    Disk,
    FileRecord,
    FolderRecord,
    Shard,
    commit_file,
    file_digest,
    shards_in,
)
from llmpq.jobs.result_lines import OUTPUT_FORMS, OutputForm
from llmpq.jobs.row_database import RECORD_BYTES
from llmpq.rows.row import FINGERPRINT_HEX, BadRow, Row, digest
from llmpq.rows.sampling import merge_sampling
from llmpq.version import llmpq_version
from quant.checkpoint.gguf.folder import gguf_index
from quant.checkpoint.model_reference import is_local_model
from quant.checkpoint.stored_tensors import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from quant.common.errors import CheckpointError, InputError
from quant.common.json_text import loads
from quant.common.url_files import is_url
from quant.common.versions import other_version, unknown_fields

MANIFEST_VERSION = 1
MANIFEST, LOCK, JOURNAL = "job.json", "lock", "job.journal"

_ASIDE, _JOINED, _ROWS_ASIDE = "job.json.part", "joined.part", "rows.part"
_ASIDES = frozenset({_ASIDE, _JOINED, SHARD_ASIDE, _ROWS_ASIDE})
_ROWS = "rows-"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_READ_BYTES = RECORD_BYTES * 4096
_REMEDY = "name another output or pass --overwrite"

MODEL_HEX = 12
_READ_WHOLE = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Read from each file of weights, enough that a fine-tuned model differs from its base."""
_UNIMPORTANT = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})


@dataclass(frozen=True)
class JobIdentity:
    """Model and sampling that all rows of a job share: a row's own sampling comes before.

    `model` is a digest; `sampling.max_new_tokens` is settled. `prompting`: how prompts become
    tokens, None for what is not set, of a template the digest. `adapters`: digests of those that
    rows choose, by name.
    """

    model: str
    model_name: str
    sampling: Sampling
    prompting: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self, row: Row | BadRow) -> str:
        """Digest of the model, then of prompt and sampling, or of what is wrong with a bad row."""
        content: Mapping[str, Any]
        if isinstance(row, Row):
            sampling = merge_sampling(self.sampling, row.sampling)
            content = {**row.content, "sampling": sampling.settings}
            prompting = {name: value for name, value in self.prompting.items() if value is not None}
            content |= {"prompting": prompting} if prompting else {}
            if row.adapter is not None:
                content["adapter"] = [row.adapter, self.adapters.get(row.adapter)]
        else:
            content = {"error": row.error}
        return f"{self.model}-{digest(content, FINGERPRINT_HEX)}"


ModelNames = tuple[Path, str, str | None]
"""The folder of a checkpoint, its name in a plan, and the folder of the adapter merged into it."""


def model_digest(folder: Path, reference: str, adapter: str | None = None) -> str:
    """Digest of configuration, tokenizer and weights of the checkpoint in `folder`, and of the
    `adapter` that is merged into it.

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
        if is_url(reference) or is_local_model(Path(reference)):
            described = gguf_index(folder)
            files = sorted(folder.glob("*.safetensors")) if described is None else described.paths
            for path in files:
                _add_samples(seen, path)
        else:
            seen.update(f"{reference}@{folder.name}".encode())
        if adapter is not None:
            seen.update(adapter_digest(adapter).encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return seen.hexdigest()


def adapter_digest(folder: str) -> str:
    seen = hashlib.blake2b(digest_size=MODEL_HEX // 2)
    seen.update((Path(folder) / ADAPTER_CONFIG).read_bytes())
    _add_samples(seen, Path(folder) / ADAPTER_WEIGHTS)
    return seen.hexdigest()


def _add_samples(seen: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    seen.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
            seen.update(file.read(SAMPLE_BYTES))


@dataclass(frozen=True)
class InputRecord:
    rows: int
    errors: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class CompletionRecord:
    """Input and output when the last row was done, and the version of llmpq.

    By it the next start knows them again without reading a row. Another llmpq may have understood
    rows otherwise, so that its record counts for nothing.
    """

    input: InputRecord
    output: FileRecord | FolderRecord
    llmpq: str


_RECORD: TypeAdapter[CompletionRecord] = TypeAdapter(CompletionRecord)


@dataclass(frozen=True)
class Manifest:
    """The content of `job.json`.

    `sampling` holds what is set of how prompts become tokens, too. `generation`: number of the
    shards that count. `replaces`: whether an output file that is there is older than this job.
    `complete`: whether all rows of the last input are done. `input_digest`: of the rows that the
    job was begun with, in whichever order and files they stand; None for a job of an older llmpq.
    """

    model: str
    model_name: str
    sampling: Mapping[str, Any]
    generation: int = 1
    replaces: bool = False
    complete: bool = False
    rows: int = 0
    errors: int = 0
    version: int = MANIFEST_VERSION
    record: CompletionRecord | None = None
    input_digest: str | None = None
    output_format: OutputForm = "rows"

    @classmethod
    def of(cls, identity: JobIdentity, generation: int, replaces: bool) -> Manifest:
        settings = {**asdict(identity.sampling), **identity.prompting}
        sampling = json.loads(json.dumps(settings))
        return cls(identity.model, identity.model_name, sampling, generation, replaces)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest at `path`, None where there is none; `InputError` for a broken one."""
        try:
            content = loads(path.read_text(encoding="utf-8"))
            _check_age(path, content)
            manifest = cls(**content)
            record, digest = _record_in(manifest.record), _known_digest(manifest.input_digest)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read as the manifest of a job ({error}); {_REMEDY}"
            ) from error
        wrong = manifest._wrong()
        if wrong is not None:
            raise InputError(f"{path}: {wrong}; {_REMEDY}")
        return replace(manifest, record=record, input_digest=digest)

    def _wrong(self) -> str | None:
        sampling: object = self.sampling
        if not isinstance(sampling, Mapping):
            return "sampling is no object"
        if self.output_format not in OUTPUT_FORMS:
            known = " and ".join(OUTPUT_FORMS)
            return f"output_format is {self.output_format!r:.80}, this llmpq writes {known}"
        if type(self.generation) is not int or self.generation < 1:
            return f"generation is {self.generation!r:.80}, no number from 1"
        return None

    def check_same_job(self, identity: JobIdentity, output: Path) -> None:
        """Raise `InputError` that says what differs, if `identity` is another job's."""
        other = Manifest.of(identity, 1, False)
        unset = Manifest.of(replace(identity, sampling=GREEDY, prompting={}), 1, False)
        settings = {**unset.sampling, **self.sampling}  # older jobs lack later fields
        if self.model != other.model:
            raise InputError(
                f"output {output} was made by another model ({self.model_name}; this is "
                f"{other.model_name}, or other weights of that name); {_REMEDY}"
            )
        for name, value in other.sampling.items():
            earlier = settings.get(name)
            if earlier != value:
                raise InputError(
                    f"output {output} was made with {name} {_shown(earlier)}, this job "
                    f"has {_shown(value)}; {_as_then(name, earlier)}, {_REMEDY}"
                )


def _check_age(path: Path, content: object) -> None:
    """Raise `InputError` for the manifest of a job that a newer llmpq has begun."""
    if not isinstance(content, dict):
        return
    version = content.get("version", MANIFEST_VERSION)
    unknown = content.keys() - {each.name for each in fields(Manifest)}
    if version != MANIFEST_VERSION:
        said = other_version(version, MANIFEST_VERSION, _REMEDY)
        raise InputError(f"{path} is the manifest of a job, of {said}")
    if unknown:
        raise InputError(f"{path}, manifest of a job: {unknown_fields(unknown, _REMEDY)}")


def _record_in(content: object) -> CompletionRecord | None:
    """The record in a manifest; None for none, for a broken one and for another llmpq's."""
    try:
        found = _RECORD.validate_python(content)
    except ValidationError:
        return None
    return found if found.llmpq == llmpq_version() else None


def _known_digest(content: object) -> str | None:
    return content if isinstance(content, str) and _DIGEST.fullmatch(content) else None


def _shown(value: object) -> str:
    return "none" if value is None else f"{value!r:.80}"


def _as_then(name: str, earlier: object) -> str:
    """What makes an option what it was; flags and empty lists have no value."""
    if not earlier and type(earlier) not in (int, float):
        return f"leave out --{name}"
    return f"pass --{name}" if earlier is True else f"pass --{name} as then"


@dataclass(frozen=True)
class JobStore:
    """The folder of a job at `path`; its methods raise OSError as the disk does."""

    path: Path
    disk: Disk

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def joined(self) -> Path:
        return self.path / _JOINED

    def manifest(self) -> Manifest | None:
        return Manifest.read(self.path / MANIFEST)

    def write_manifest(self, manifest: Manifest) -> None:
        data = (json.dumps(asdict(manifest), indent=1) + "\n").encode()
        target, aside = self.path / MANIFEST, self.path / _ASIDE
        commit_file(self.disk, target, aside, lambda sink: sink.write(data))

    def shards(self, generation: int) -> list[Shard]:
        return [shard for shard in shards_in(self.path) if shard.generation == generation]

    def begin(self, manifest: Manifest, rows: Iterable[bytes]) -> None:
        """Write the records of `rows`, then the manifest: shards of an older job count no more."""
        self.disk.sync_folder(self.path.parent)
        path, aside = self.path / f"{_ROWS}{manifest.input_digest}", self.path / _ROWS_ASIDE
        if manifest.input_digest is not None and not path.exists():
            commit_file(self.disk, path, aside, lambda sink: sink.writelines(rows))
        self.write_manifest(manifest)
        self._keep(manifest.generation, manifest.input_digest)

    def rows_begun_with(self, digest: str) -> Iterator[bytes]:
        """Records of the rows of that digest, many at once; `InputError` for a damaged list."""
        path = self.path / f"{_ROWS}{digest}"
        try:
            is_whole = file_digest(path) == digest
        except OSError:
            is_whole = False
        if not is_whole:
            raise InputError(
                f"{path}, which tells the rows that the job was begun with, is damaged or "
                "missing, and this input is not known to have the same; pass --extend to keep what "
                f"is done and do the other rows too, {_REMEDY}"
            )
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                yield block

    def clean_up(self, generation: int | None) -> None:
        """Remove all but the manifest, the journal and the shards of that generation."""
        self._keep(generation, None)
        for path in self.path.iterdir():
            if path.name in _ASIDES:
                self.disk.unlink(path)

    def holds_leftovers(self) -> bool:
        """Whether there is a file that a finished job does not have."""
        return any(path.name in _ASIDES or _is_row_list(path) for path in self.path.iterdir())

    def foreign(self) -> str | None:
        """Name of a file that belongs to no job, in a folder that is none of a job."""
        if (self.path / MANIFEST).exists() or shards_in(self.path):
            return None
        ours = {LOCK, JOURNAL, *_ASIDES}
        found = (path.name for path in self.path.iterdir() if not _is_row_list(path))
        return next((name for name in found if name not in ours), None)

    def _keep(self, generation: int | None, digest: str | None) -> None:
        for shard in shards_in(self.path):
            if shard.generation != generation:
                self.disk.unlink(shard.path)
        for path in self.path.iterdir():
            if _is_row_list(path) and path.name != f"{_ROWS}{digest}":
                self.disk.unlink(path)


def _is_row_list(path: Path) -> bool:
    return path.name.startswith(_ROWS) and bool(_DIGEST.fullmatch(path.name[len(_ROWS) :]))

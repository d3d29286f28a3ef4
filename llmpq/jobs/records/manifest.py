"""Manifest of a job: its model and sampling, in `job.json` beside its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from actors.messages import Sampling
from actors.sampling_options import GREEDY
from llmpq.jobs.records.completion_record import JobRecord
from llmpq.jobs.records.disk import Disk, commit_file
from llmpq.jobs.records.row_list import known_digest
from llmpq.rows.row import FINGERPRINT_HEX, BadRow, Row, digest
from llmpq.rows.sampling import merge_sampling
from quant.common.errors import InputError

MANIFEST_VERSION = 1

OutputForm = Literal["rows", "openai"]
"""Lines of results: rows of llmpq's own fields, or answers to lines of OpenAI's batches."""

OUTPUT_FORMS: tuple[OutputForm, ...] = ("rows", "openai")


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


@dataclass(frozen=True)
class Manifest:
    """The content of `job.json`.

    `sampling` holds what is set of how prompts become tokens, too. `generation`: number of the
    shards that count. `replaces`: whether an output file that is there is older than this job.
    `complete`: whether all rows of the last input are done. `record`: state of the files, by which
    they are known again without being read. `input_digest`: of the rows that the job was begun
    with, in whichever order and files they stand; None for a job of an older llmpq.
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
    record: JobRecord | None = None
    input_digest: str | None = None
    output_format: OutputForm = "rows"

    @classmethod
    def of(cls, identity: JobIdentity, generation: int, replaces: bool) -> Manifest:
        """The manifest of a job that begins."""
        settings = {**asdict(identity.sampling), **identity.prompting}
        sampling = json.loads(json.dumps(settings))
        return cls(identity.model, identity.model_name, sampling, generation, replaces)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest at `path`, None where there is none; `InputError` for a broken one."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(**content)
            manifest = replace(
                manifest,
                record=JobRecord.read(manifest.record),
                input_digest=known_digest(content.get("input_digest")),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"{path} cannot be read as the manifest of a job ({error}); name another output or "
                "pass --overwrite"
            ) from error
        if manifest.version != MANIFEST_VERSION:
            raise InputError(
                f"{path} is a manifest of version {manifest.version!r}; this llmpq reads "
                f"{MANIFEST_VERSION}; name another output or pass --overwrite"
            )
        if not isinstance(manifest.sampling, Mapping):
            raise InputError(
                f"{path}: sampling is no object; name another output or pass --overwrite"
            )
        if manifest.output_format not in OUTPUT_FORMS:
            raise InputError(
                f"{path}: output_format is {manifest.output_format!r:.80}, this llmpq writes "
                f"{' and '.join(OUTPUT_FORMS)}; name another output or pass --overwrite"
            )
        if type(manifest.generation) is not int or manifest.generation < 1:
            raise InputError(
                f"{path}: generation is {manifest.generation!r:.80}, no number from 1; name "
                "another output or pass --overwrite"
            )
        return manifest

    def write(self, disk: Disk, path: Path, aside: Path) -> None:
        """Write as JSON, whole or not at all."""
        data = (json.dumps(asdict(self), indent=1) + "\n").encode()
        commit_file(disk, path, aside, lambda sink: sink.write(data))

    def check_same_job(self, identity: JobIdentity, output: Path) -> None:
        """Raise `InputError` that says what differs, if `identity` is another job's."""
        other = Manifest.of(identity, 1, False)
        remedy = "name another output or pass --overwrite"
        unset = Manifest.of(replace(identity, sampling=GREEDY, prompting={}), 1, False)
        settings = {**unset.sampling, **self.sampling}  # older jobs lack later fields
        if self.model != other.model:
            raise InputError(
                f"output {output} was made by another model ({self.model_name}; this is "
                f"{other.model_name}, or other weights of that name); {remedy}"
            )
        for name, value in other.sampling.items():
            earlier = settings.get(name)
            if earlier != value:
                raise InputError(
                    f"output {output} was made with {name} {_shown(earlier)}, this job "
                    f"has {_shown(value)}; {_as_then(name, earlier)}, {remedy}"
                )


def _shown(value: object) -> str:
    return "none" if value is None else f"{value!r:.80}"


def _as_then(name: str, earlier: object) -> str:
    """What makes an option what it was; flags and empty lists have no value."""
    if not earlier and type(earlier) not in (int, float):
        return f"leave out --{name}"
    return f"pass --{name}" if earlier is True else f"pass --{name} as then"

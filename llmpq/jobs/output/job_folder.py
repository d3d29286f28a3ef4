"""The folder of a job: manifest, shards, the list of its rows, journal, and unfinished files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.records.disk import Disk
from llmpq.jobs.records.manifest import Manifest
from llmpq.jobs.records.row_database import RowDatabase
from llmpq.jobs.records.row_list import ROWS_ASIDE, RowList, is_row_list, row_lists_in
from llmpq.jobs.records.shards import SHARD_ASIDE, Shard, shards_in

MANIFEST, LOCK, JOURNAL = "job.json", "lock", "job.journal"
_ASIDE, _JOINED = "job.json.part", "joined.part"
_ASIDES = frozenset({_ASIDE, _JOINED, SHARD_ASIDE, ROWS_ASIDE})


@dataclass(frozen=True)
class JobFolder:
    """The folder of a job at `path`; its methods raise OSError as the disk does."""

    path: Path
    disk: Disk

    @property
    def journal(self) -> Path:
        """Path of the journal, which stays when the job is done."""
        return self.path / JOURNAL

    @property
    def joined(self) -> Path:
        """Path of the finished file before it gets its name."""
        return self.path / _JOINED

    def manifest(self) -> Manifest | None:
        """The manifest, read as `Manifest.read` does."""
        return Manifest.read(self.path / MANIFEST)

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest."""
        manifest.write(self.disk, self.path / MANIFEST, self.path / _ASIDE)

    def shards(self, generation: int) -> list[Shard]:
        """The shards of `generation`, which are those that count."""
        return [shard for shard in shards_in(self.path) if shard.generation == generation]

    def begin(self, manifest: Manifest, database: RowDatabase) -> None:
        """Write the manifest of a job that begins.

        Shards of an older job count no more from then on.
        """
        self.disk.sync_folder(self.path.parent)
        if manifest.input_digest is not None:
            RowList(self.path, manifest.input_digest).write(self.disk, database.row_blocks())
        self.write_manifest(manifest)
        self._keep(manifest.generation, manifest.input_digest)

    def clean_up(self, generation: int | None) -> None:
        """Remove all but the manifest, the journal and the shards of that generation."""
        self._keep(generation, None)
        for path in self.path.iterdir():
            if path.name in _ASIDES:
                self.disk.unlink(path)

    def holds_leftovers(self) -> bool:
        """Whether there is a file that a finished job does not have."""
        aside = any((self.path / name).exists() for name in _ASIDES)
        return aside or bool(row_lists_in(self.path))

    def foreign(self) -> str | None:
        """Name of a file that belongs to no job, in a folder that is none of a job."""
        if (self.path / MANIFEST).exists() or shards_in(self.path):
            return None
        ours = {LOCK, JOURNAL, *_ASIDES}
        found = (path for path in self.path.iterdir() if not is_row_list(path))
        return next((path.name for path in found if path.name not in ours), None)

    def _keep(self, generation: int | None, rows: str | None) -> None:
        for shard in shards_in(self.path):
            if shard.generation != generation:
                self.disk.unlink(shard.path)
        for path in row_lists_in(self.path):
            if rows is None or path != RowList(self.path, rows).path:
                self.disk.unlink(path)

"""Results that earlier runs of a job have left, in its finished file and its shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.formats.streams import READ_ERRORS, reason
from llmpq.jobs.output.joining import FINISHED_FILE
from llmpq.jobs.output.result_rows import ResultIdentity, result_identities, result_identity
from llmpq.jobs.records.disk import Disk
from llmpq.jobs.records.manifest import OutputForm
from llmpq.jobs.records.row_database import Done, RowDatabase
from llmpq.jobs.records.shards import DAMAGED_SUFFIX, Shard
from quant.common.errors import InputError


@dataclass(frozen=True)
class EarlierResults:
    """Notes results of `model` in `database`; raises `InputError` for a result of another model, or
    of another form than the job's lines.

    With `retry_errors`, errors are forgotten, so that their rows run again.
    """

    database: RowDatabase
    output: Path
    model: str
    model_name: str
    form: OutputForm
    retry_errors: bool

    def note_file(self, path: Path) -> None:
        """Note all rows of a finished file; `InputError` if it cannot be read to its end."""
        try:
            self.database.record_all(self._noted(result_identities(path), FINISHED_FILE))
        except READ_ERRORS as error:
            raise InputError(
                f"cannot read output {path}: {reason(error)}; name another output, or remove it or "
                "pass --overwrite to generate its rows again"
            ) from error

    def note_shard(self, shard: Shard, disk: Disk) -> None:
        """Note all rows of a shard; a damaged one is set aside."""
        found = [result_identity(line) for line in shard.lines()] if shard.is_whole() else [None]
        if None in found:
            aside = shard.path.with_name(shard.path.name + DAMAGED_SUFFIX)
            disk.rename(shard.path, aside)
            warnings.warn(
                f"{shard.path} is damaged: its {shard.rows} rows are generated again, the file is "
                f"kept as {aside.name}",
                stacklevel=2,
            )
            return
        rows = (row for row in found if row is not None)
        self.database.record_all(self._noted(rows, shard.source))

    def _noted(self, rows: Iterable[ResultIdentity], source: int) -> Iterator[tuple[str, Done]]:
        for line, row in enumerate(rows):
            if row.model != self.model:
                raise InputError(
                    f"output {self.output} was made by another model (row {row.custom_id!r:.80}) "
                    f"than {self.model_name}; name another output or pass --overwrite"
                )
            if row.form != self.form:
                raise InputError(
                    f"output {self.output} holds lines of another output_format; pass "
                    f"--output_format {row.form}, name another output or pass --overwrite"
                )
            forgotten = self.retry_errors and row.failed
            yield row.custom_id, Done(row.fingerprint, row.failed, source, line, forgotten)

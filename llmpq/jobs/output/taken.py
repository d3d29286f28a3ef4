"""Taking up what earlier runs of a job have left: its finished file and its shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.formats.streams import READ_ERRORS, reason
from llmpq.jobs.output.finished import FINISHED_FILE, Identity, identities, identity
from llmpq.jobs.records.files import Files
from llmpq.jobs.records.ledger import Done, Ledger
from llmpq.jobs.records.shards import DAMAGED_SUFFIX, Shard
from quant.common.errors import InputError


@dataclass(frozen=True)
class Takes:
    """Notes results in `ledger`, which are those of `model`; errors are forgotten where they are to
    run again (`retry_errors`). Raises `InputError` for a result of another model.
    """

    ledger: Ledger
    output: Path
    model: str
    model_name: str
    retry_errors: bool

    def finished(self, path: Path) -> None:
        """All rows of a finished file; `InputError` for one that cannot be read to its end."""
        try:
            self.ledger.record_all(self._noted(identities(path), FINISHED_FILE))
        except READ_ERRORS as error:
            raise InputError(
                f"cannot read output {path}: {reason(error)}; name another output, or remove it or "
                "pass --overwrite to generate its rows again"
            ) from error

    def shard(self, shard: Shard, files: Files) -> None:
        """All rows of a shard; a damaged one is set aside."""
        found = [identity(line) for line in shard.lines()] if shard.is_whole() else [None]
        if None in found:
            aside = shard.path.with_name(shard.path.name + DAMAGED_SUFFIX)
            files.rename(shard.path, aside)
            warnings.warn(
                f"{shard.path} is damaged: its {shard.rows} rows are generated again, the file is "
                f"kept as {aside.name}",
                stacklevel=2,
            )
            return
        rows = (row for row in found if row is not None)
        self.ledger.record_all(self._noted(rows, shard.source))

    def _noted(self, rows: Iterable[Identity], source: int) -> Iterator[tuple[str, Done]]:
        for line, row in enumerate(rows):
            if row.model != self.model:
                raise InputError(
                    f"output {self.output} was made by another model (row {row.custom_id!r:.80}) "
                    f"than {self.model_name}; name another output or pass --overwrite"
                )
            forgotten = self.retry_errors and row.failed
            yield row.custom_id, Done(row.fingerprint, row.failed, source, line, forgotten)

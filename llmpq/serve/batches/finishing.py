"""The end of a batch: its results become files of output and of errors."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from llmpq.serve.batches import lines
from llmpq.serve.batches.job import BatchJob, fill_with
from llmpq.serve.batches.storage.records import Batch, Status, StoredFile
from llmpq.serve.batches.storage.store import BatchStore


def finish(store: BatchStore, batch_id: str, job: BatchJob, now_s: int) -> None:
    """Write the files of a batch whose lines are all done, then note its end.

    A batch that was cut off on the way is finished once more: its files have the same ids again.
    """
    batch = store.batches.get(batch_id)
    assert batch is not None, "a batch is removed long after its end"
    counts = job.counts
    output = error = None
    if counts.completed:
        output = _write(store, batch, job, now_s, is_output=True)
    if counts.failed:
        error = _write(store, batch, job, now_s, is_output=False)
    ended = replace(batch, output_file_id=output, error_file_id=error, request_counts=counts)
    store.batches.put(ended.turned(_last_status(batch, job), now_s))


def _last_status(batch: Batch, job: BatchJob) -> Status:
    if batch.status == "cancelling":
        return "cancelled"
    is_expired = any(True for _ in job.results(lambda code: code == lines.EXPIRED))
    return "expired" if is_expired else "completed"


def _write(store: BatchStore, batch: Batch, job: BatchJob, now_s: int, is_output: bool) -> str:
    kind = "output" if is_output else "error"
    file_id = f"file-{blake2b(f'{kind} {batch.id}'.encode(), digest_size=16).hexdigest()}"
    file = StoredFile(
        id=file_id,
        number=store.files.next_number,
        bytes=0,
        created_at=now_s,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        expires_at=None if batch.output_s is None else now_s + batch.output_s,
    )
    found = job.results(lambda code: (code is None) is is_output)
    store.write_output(file_id, file, fill_with(found))
    return file_id

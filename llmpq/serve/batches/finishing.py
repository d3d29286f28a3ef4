"""The end of a batch: its results become files of output and of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from llmpq.jobs.disk import Sink
from llmpq.serve.batches import lines
from llmpq.serve.batches.job import BatchJob, results_so_far
from llmpq.serve.batches.lines import LineAnswer
from llmpq.serve.batches.storage.index import set_aside
from llmpq.serve.batches.storage.records import Batch, Counts, Problem, Status, StoredFile
from llmpq.serve.batches.storage.store import BatchStore

Results = Callable[[], Iterator[LineAnswer]]


def finish(store: BatchStore, batch_id: str, job: BatchJob, now_s: int) -> None:
    """Write the files of a batch whose lines are all done, then note its end.

    A batch that was cut off on the way is finished once more: its files have the same ids again.
    """
    batch = _with_files(store, batch_id, job.results, job.counts, now_s)
    store.batches.put(batch.turned(_last_status(batch, job), now_s))


def fail(store: BatchStore, batch_id: str, problem: Problem, now_s: int) -> None:
    """Note why a batch cannot go on, and give out the answers that it has.

    What lies in its folder is kept aside.
    """
    folder = store.job_path(batch_id)
    results = partial(results_so_far, batch_id, folder)
    errors = [each.error is not None for each in results()]
    batch = _found(store, batch_id)
    counts = batch.request_counts
    if errors:
        failed = sum(errors)
        total = max(counts.total, len(errors))
        counts = Counts(total, len(errors) - failed, failed)
    batch = _with_files(store, batch_id, results, counts, now_s)
    store.batches.put(replace(batch.turned("failed", now_s), problems=(problem,)))
    set_aside(store.disk, folder)


def _found(store: BatchStore, batch_id: str) -> Batch:
    found = store.batches.get(batch_id)
    assert found is not None, "a batch is removed long after its end"
    return found


def _last_status(batch: Batch, job: BatchJob) -> Status:
    if batch.status == "cancelling":
        return "cancelled"
    is_expired = any(each.error == lines.EXPIRED for each in job.results())
    return "expired" if is_expired else "completed"


def _with_files(
    store: BatchStore, batch_id: str, results: Results, counts: Counts, now_s: int
) -> Batch:
    """The batch with files of its results; those that an earlier end has written stay."""
    batch = replace(_found(store, batch_id), request_counts=counts)
    output = _write(store, batch, results, now_s, is_output=True)
    error = _write(store, batch, results, now_s, is_output=False)
    return replace(batch, output_file_id=output, error_file_id=error)


def _write(
    store: BatchStore, batch: Batch, results: Results, now_s: int, is_output: bool
) -> str | None:
    """The id of the file of output or errors, None where there is nothing for it."""
    kind = "output" if is_output else "error"
    file_id = f"file-{blake2b(f'{kind} {batch.id}'.encode(), digest_size=16).hexdigest()}"

    def wanted() -> Iterator[bytes]:
        of_kind = (each for each in results() if (each.error is None) is is_output)
        return (each.text.encode() + b"\n" for each in of_kind)

    def fill(sink: Sink) -> None:
        for line in wanted():
            sink.write(line)

    if not any(True for _ in wanted()):
        return file_id if store.files.get(file_id) else None
    file = StoredFile(
        id=file_id,
        number=store.files.next_number,
        bytes=0,
        created_at=now_s,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        expires_at=None if batch.output_s is None else now_s + batch.output_s,
    )
    store.write_output(file_id, file, fill)
    return file_id

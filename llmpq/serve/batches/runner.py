"""Batches on their way: checked as they come, run one after another, ended when it is time.

A batch stays as it is on disk where the disk fails or the server ends, and goes on from there.
Where what is on disk is damaged, it fails, and what it has answered is given out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from llmpq.serve.access import log_fault, tasks
from llmpq.serve.batches.batch_job import BatchJob, fail_batch, finish_batch, may_pass, scan
from llmpq.serve.batches.lines import CANCELLED, EXPIRED, Answering, BehindOnline, Scan
from llmpq.serve.batches.records import Batch, LineCounts, Problem
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.service import Service
from quant.common.errors import InputError

RETRY_S = 30.0
"""Seconds after which a batch is tried again that a fault has stopped."""

MOST_FAULTS = 5
"""Faults after which a batch fails. Those of a full or failing disk, which may pass by themselves,
count only once its window is over.
"""

LOOK_S = 1.0
"""Seconds between looks for what has expired."""

MOST_AT_ONCE = 256
"""Lines in work at most, however many slots the engine has."""

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Runner:
    """Runs the batches of `store` in one event loop; `counts`: lines beyond their records."""

    def __init__(self, store: BatchStore, service: Service) -> None:
        self.counts: dict[str, LineCounts] = {}
        self._store = store
        self._service = service
        self._engine = BehindOnline(service.engine, service.gate)
        self._records = ThreadPoolExecutor(1, "llmpq-batch-records")
        self._jobs = ThreadPoolExecutor(1, "llmpq-batch-job")
        self._turn = asyncio.Lock()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened: set[BatchJob] = set()

    def start(self) -> None:
        self._begin(self._look())
        for batch in self._store.unfinished():
            self.follow(batch.id)

    def follow(self, batch_id: str) -> None:
        self._ends[batch_id] = asyncio.Event()
        self._begin(self._follow(batch_id))

    def end(self, batch_id: str) -> None:
        """End a batch early; its record says why."""
        if batch_id in self._ends:
            self._ends[batch_id].set()

    async def close(self) -> None:
        """Stop; what is done is committed, and the rest goes on at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in tuple(self._opened):  # one that was being opened when its task ended
            await self._in_job(partial(self._close, job))
        self._records.shutdown()
        self._jobs.shutdown()

    async def keep(self, change: Callable[[], T]) -> T:
        """Change records, one change after another."""
        return await asyncio.get_running_loop().run_in_executor(self._records, change)

    async def _in_job(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._jobs, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self) -> None:
        """End batches whose time is over, and remove files whose time is over."""
        while True:
            now_s = self._service.clock()
            for batch in self._store.unfinished():
                if batch.expires_at <= now_s:
                    self.end(batch.id)
            try:
                await self.keep(partial(self._store.remove_expired, now_s))
            except OSError as error:
                _LOG.error("expired files cannot be removed: %s", error.strerror)
            await asyncio.sleep(LOOK_S)

    async def _follow(self, batch_id: str) -> None:
        faults = 0
        problem: Problem | None = None
        while True:
            try:
                await self._through(batch_id, problem)
                break
            except Exception as error:  # one batch's fault must not end the others
                why = str(error)
                if not isinstance(error, InputError | OSError):
                    log_fault(batch_id, error)
                    why = "a fault of the server"
                is_over = self._store.batch(batch_id).expires_at <= self._service.clock()
                faults += is_over or not may_pass(error)
            if faults >= MOST_FAULTS and problem is None:
                _LOG.error("%s fails after %d faults: %s", batch_id, faults, why)
                problem = self._given_up(why)
                continue
            _LOG.error("%s waits for %g s: %s (fault %d)", batch_id, RETRY_S, why, faults)
            await asyncio.sleep(RETRY_S)
        self.counts.pop(batch_id, None)
        del self._ends[batch_id]

    def _given_up(self, why: str) -> Problem:
        """Why a batch fails, in words that tell clients nothing of where it lies."""
        told = why.replace(f"{self._store.folder}/", "").partition("; ")[0]
        return Problem(
            "batch_damaged",
            f"the server could not go on in {MOST_FAULTS} tries: {told}; what was answered is in "
            "the files of output and errors: send the rest again",
        )

    async def _through(self, batch_id: str, problem: Problem | None) -> None:
        """All states of a batch up to its last, which is `failed` where there is a `problem`."""
        batch = self._store.batch(batch_id)
        if batch.is_finished:  # what followed its end has failed
            return
        problem = problem or next(iter(batch.problems), None)
        found = Scan(problem=problem)
        if problem is None:
            found = await self._in_job(partial(self._scan, batch))
        if not await self.keep(partial(self._check, batch_id, found)):
            return
        async with self._run_in_turn(batch_id):
            job = await self._in_job(partial(self._open, batch))
            try:
                answering = Answering(self._service, self._engine, batch.endpoint, found)
                await self._run(batch_id, job, answering)
                await self._in_job(job.finish)
                await self.keep(partial(self._turn_to_finalizing, batch_id, job.counts))
                now_s = int(self._service.clock())
                await self.keep(partial(finish_batch, self._store, batch_id, job, now_s))
            finally:
                await self._in_job(partial(self._close, job))
        await self.keep(partial(self._store.remove_job, batch_id))

    def _scan(self, batch: Batch) -> Scan:
        file = self._store.files.get(batch.input_file_id)
        source = self._store.path(batch.input_file_id)
        most = self._service.options.body_limit_bytes
        return scan(source, most, None if file is None else file.digest)

    def _check(self, batch_id: str, found: Scan) -> bool:
        """Whether a batch with such an input can run; notes what was found."""
        batch, now_s = self._store.batch(batch_id), int(self._service.clock())
        if found.problem is not None:
            fail_batch(self._store, batch_id, found.problem, now_s)
            return False
        if batch.status in ("validating", "cancelling") and not batch.request_counts.total:
            batch = replace(batch, request_counts=LineCounts(total=found.lines))
            if batch.status == "validating":
                batch = batch.turned("in_progress", now_s)
            self._store.batches.put(batch)
        return True

    @asynccontextmanager
    async def _run_in_turn(self, batch_id: str) -> AsyncGenerator[None, None]:
        """Wait for the batches that came before, unless this one ends early: that is soon done."""
        if self._store.batch(batch_id).status == "cancelling":
            self.end(batch_id)
        waiting = None
        try:
            async with tasks(self._turn.acquire(), self._ends[batch_id].wait()) as begun:
                waiting, _ = begun
                await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                yield
        finally:
            if waiting is not None and waiting.done() and not waiting.cancelled():
                self._turn.release()

    def _open(self, batch: Batch) -> BatchJob:
        store = self._store
        job = BatchJob(
            batch.id, store.path(batch.input_file_id), store.job_path(batch.id), store.disk
        )
        self._opened.add(job)
        self.counts[batch.id] = job.counts
        return job

    def _close(self, job: BatchJob) -> None:
        self._opened.discard(job)
        job.close()

    async def _run(self, batch_id: str, job: BatchJob, answering: Answering) -> None:
        """Answer all lines: by the engine until the batch ends early, then by saying so."""
        end = self._ends[batch_id]
        if not end.is_set():
            lines = self._run_lines(batch_id, job, answering)
            async with tasks(lines, end.wait()) as (running, ending):
                await asyncio.wait((running, ending), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
        if end.is_set():
            is_cancelled = self._store.batch(batch_id).status == "cancelling"
            await self._in_job(partial(_end_rest, job, answering, is_cancelled))
        self.counts[batch_id] = job.counts

    async def _run_lines(self, batch_id: str, job: BatchJob, answering: Answering) -> None:
        todo = job.todo()

        async def work() -> None:
            while (line := await self._in_job(partial(next, todo, None))) is not None:
                answer = await answering.answer(line)
                await self._in_job(partial(job.write, line, answer))
                self.counts[batch_id] = job.counts

        slots = self._service.engine.queue.slots
        workers = (work() for _ in range(min(max(1, slots), MOST_AT_ONCE)))
        async with tasks(*workers) as working:
            await asyncio.gather(*working)

    def _turn_to_finalizing(self, batch_id: str, counts: LineCounts) -> None:
        batch = replace(self._store.batch(batch_id), request_counts=counts)
        if batch.status == "in_progress":
            batch = batch.turned("finalizing", int(self._service.clock()))
        self._store.batches.put(batch)


def _end_rest(job: BatchJob, answering: Answering, is_cancelled: bool) -> None:
    """Say of all lines that are left why they do not run."""
    code, why = EXPIRED, "the batch's completion window ended before it ran"
    if is_cancelled:
        code, why = CANCELLED, "the batch was cancelled before it ran"
    for line in job.todo():
        job.write(line, answering.ended(line, code, why))

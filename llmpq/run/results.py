"""The results of a run as they finish: an iterator, also asynchronous, and a context manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from actors.messages import Sampling
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.run import Run
from llmpq.run.summary import RunSummary


class Results(Iterator[Result], AsyncIterator[Result]):
    """The results that `Plan.run` returns; nothing is started before the first is asked for.

    Iterated to its end, closed or left as a context manager, it has freed actors and placement
    groups. With `async for` it waits in a thread of its own.
    """

    def __init__(self, run: Run, rows: Iterable[Row | BadRow]) -> None:
        self._run = run
        self._results = run.results(rows)
        self._thread: ThreadPoolExecutor | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampling of rows that have none of their own."""
        return self._run.sampling.sampling

    @property
    def summary(self) -> RunSummary | None:
        """The figures of the run, once it has ended."""
        return self._run.summary

    def __next__(self) -> Result:
        return next(self._results)

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> Result:
        """Wait for the next result in a thread, so that other tasks go on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmpq-results")
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._thread, next, self._results, None)
        if result is None:
            self.close()
            raise StopAsyncIteration
        return result

    def close(self) -> None:
        """End the run; a result that is being waited for is waited for first."""
        if self._thread is None:
            self._results.close()
        else:
            self._thread.submit(self._results.close).result()
            self._thread.shutdown()
            self._thread = None
        self._run.close()

    async def aclose(self) -> None:
        """End the run in a thread, so that other tasks go on."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Results:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

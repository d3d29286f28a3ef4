"""The results of a run as they finish: an iterator, also asynchronous, and a context manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from types import TracebackType
from typing import TYPE_CHECKING

from actors.messages import Sampling
from llmpq.dataframes import to_arrow, to_pandas, to_polars
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.run import Run
from llmpq.run.summary import RunSummary
from quant.common.errors import SpecError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


class Results(Iterator[Result], AsyncIterator[Result]):
    """The results that `Plan.run` and a session's return; nothing is started before the first is
    asked for.

    Iterated to its end, closed or left as a context manager, the run is over: one of its own has
    freed actors and placement groups. With `async for` it waits in a thread of its own. `on_begin`
    is called before the first result is looked for.
    """

    def __init__(
        self,
        run: Run,
        rows: Iterable[Row | BadRow],
        on_begin: Callable[[Results], None] | None = None,
    ) -> None:
        self._run = run
        self._results = run.results(rows)
        self._on_begin = on_begin
        self._thread: ThreadPoolExecutor | None = None
        self._given = 0
        self._is_superseded = False

    @property
    def sampling(self) -> Sampling:
        """The sampling of rows that have none of their own."""
        return self._run.sampling.sampling

    @property
    def summary(self) -> RunSummary | None:
        """The figures of the run, once it has ended."""
        return self._run.summary

    def to_pandas(self) -> pandas.DataFrame:
        """All results that are left, as `llmpq.dataframes.to_pandas` makes them."""
        return to_pandas(self)

    def to_polars(self) -> polars.DataFrame:
        """All results that are left, as `llmpq.dataframes.to_polars` makes them."""
        return to_polars(self)

    def to_arrow(self) -> pyarrow.Table:
        """All results that are left, as `llmpq.dataframes.to_arrow` makes them."""
        return to_arrow(self)

    def __next__(self) -> Result:
        result = self._next()
        if result is None:
            raise StopIteration
        return result

    def _next(self) -> Result | None:
        """The next result, None at the end."""
        begin, self._on_begin = self._on_begin, None
        if begin is not None:
            begin(self)
        result = next(self._results, None)
        if result is None and self._is_superseded:
            raise SpecError(
                f"these results were ended after {self._given} of them, as another run of the "
                "session began or it was closed; iterate the results of one run to their end "
                "before those of the next"
            )
        self._given += result is not None
        return result

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> Result:
        """Wait for the next result in a thread, so that other tasks go on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmpq-results")
        result = await asyncio.get_running_loop().run_in_executor(self._thread, self._next)
        if result is None:
            self.close()
            raise StopAsyncIteration
        return result

    def supersede(self) -> None:
        """End the run for another one; who asks on is told, unless it was at its end.

        Raises `SpecError` where a result is waited for in another thread.
        """
        state = getgeneratorstate(self._results)
        if state == GEN_CLOSED:
            return
        if state == GEN_RUNNING and self._thread is None:
            raise SpecError(
                "another run of the session is going on in another thread; wait for its end"
            )
        self.close()
        self._is_superseded = True

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

    def __repr__(self) -> str:
        if self.summary is not None:
            return f"<Results of a run: {self.summary}>"
        return f"<Results of a run, {self._given} given so far; iterate over them>"

    def _repr_html_(self) -> str | None:
        return None if self.summary is None else self.summary._repr_html_()

"""Results of a run as they finish, and a session: the stages of a plan stay loaded from one call to
the next.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import TYPE_CHECKING

from actors.messages import Sampling
from actors.recovery.policy import OnEvent, ignore_event
from llmpq.dataframes import to_arrow, to_pandas, to_polars
from llmpq.jobs.python_rows import RowsInput, rows_of
from llmpq.keywords import SamplingKeywords, lists_options
from llmpq.report.formatting import plural
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling import SamplingInput
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions, one_sampling
from llmpq.run.run import Run
from llmpq.run.summary import RunSummary
from planner.fleet.fleet_spec import Runnable
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from typing import Unpack

    import pandas
    import polars
    import pyarrow


class Session:
    """Ray, the stages of a plan or a fleet with their weights, and its tokenizer, kept for any
    number of runs.

    As a context manager, with `async with` too, it has started them when its body begins, and frees
    them however that is left; else they start with the first run and stay until `close`. Runs
    follow one another. Results that are left before their end give up what is in flight, and so
    does the next run; stages that were lost meanwhile are started again by the run that needs them.
    Where a run has planned again, for lost devices or as it drifts, the next one goes on with that
    plan, `spec`.

    `on_event` is told of faults. Raises what `Plan.run` raises.
    """

    def __init__(
        self,
        spec: Runnable,
        options: RunOptions,
        source: str = "the plan",
        on_event: OnEvent | None = None,
    ) -> None:
        self._shared = RunResources(spec, options, source, kept=True)
        self._on_event = self._shared.listener = on_event or ignore_event
        self._present: weakref.ref[Results] | None = None
        self._runs = 0
        self.is_closed = False

    @property
    def spec(self) -> PlanSpec:
        """The plan of the next run; of a fleet one with the stages of all pipelines."""
        return self._shared.plan

    def start(self) -> None:
        """Start Ray and the stages now, unless they are there; raises as a run does."""
        self._check_open()
        self._shared.stages.start(self._shared.plan)

    @lists_options(SamplingKeywords)
    def run(
        self,
        rows: RowsInput,
        sampling: SamplingInput = None,
        *,
        on_event: OnEvent | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> Results:
        """Generate for every row, as `Plan.run` does; the stages stay loaded.

        `sampling`, or its `options` by name, come before those of the session. Asking for the
        results of one run ends that of the run before, if it is not at its end.
        """
        self._check_open()
        found = self._shared.sampling_of(one_sampling(sampling, options))
        run = Run(self._shared, found, on_event or self._on_event)
        return Results(run, rows_of(rows), self._begin)

    def _begin(self, results: Results) -> None:
        """Have `results` be those of the present run, and end the ones before."""
        self._check_open()
        earlier = None if self._present is None else self._present()
        if earlier is not None:
            earlier.supersede()
        self._present = weakref.ref(results)
        self._runs += 1

    def _check_open(self) -> None:
        if self.is_closed:
            raise SpecError("the session is closed; open another one with plan.session()")

    def close(self) -> None:
        """Free the stages, and Ray where it was started or joined here."""
        self._close(is_done=True)

    def _close(self, is_done: bool) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._shared.listener = self._on_event
        earlier = None if self._present is None else self._present()
        try:
            if earlier is not None:
                earlier.supersede()
            if is_done and self._runs:
                self._shared.end_predicting()
        finally:
            self._shared.close()

    async def aclose(self) -> None:
        """Close it in a thread, so that other tasks go on."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Session:
        try:
            self.start()
        except BaseException:
            self._close(is_done=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close(is_done=kind is None)

    async def __aenter__(self) -> Session:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await asyncio.to_thread(self.__exit__, kind)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        spec = self.spec
        runs = plural(self._runs, "run")
        return f"<Session of {spec.model.name} on {spec.cluster}: {state}, {runs}>"


class Results(
    Iterator[Result],
    AsyncIterator[Result],
    AbstractContextManager["Results"],
    AbstractAsyncContextManager["Results"],
):
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
        """End the run for another; SpecError where another thread waits for a result of it."""
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

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.summary is not None:
            return f"<Results of a run: {self.summary}>"
        return f"<Results of a run, {self._given} given so far; iterate over them>"

    def _repr_html_(self) -> str | None:
        return None if self.summary is None else self.summary._repr_html_()

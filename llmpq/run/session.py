"""A session: the stages of a plan stay loaded from one call to the next."""

from __future__ import annotations

import asyncio
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from actors.recovery.policy import OnEvent, ignore_event
from llmpq.jobs.python_rows import RowsInput, rows_of
from llmpq.keywords import SamplingKeywords, lists_options
from llmpq.report.formatting import plural
from llmpq.rows.sampling import SamplingInput
from llmpq.run.engine import RunResources
from llmpq.run.fleets import Runnable
from llmpq.run.options import RunOptions, one_sampling
from llmpq.run.results import Results
from llmpq.run.run import Run
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from typing import Unpack


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(is_done=kind is None)

    async def __aenter__(self) -> Session:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        spec = self.spec
        runs = plural(self._runs, "run")
        return f"<Session of {spec.model.name} on {spec.cluster}: {state}, {runs}>"

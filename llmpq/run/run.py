"""One run of a plan over rows on Ray: tokenize, batch, generate, turn into text, plan again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

from actors.messages import Request
from actors.recovery.policy import OnEvent, RecoveryEvent
from llmpq.remote.session import ray_session
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling_defaults import job_sampling
from llmpq.run.checkpoint import checkpoint_reference, shape_for_run
from llmpq.run.monitoring.meter import RunMeter, RunState
from llmpq.run.options import RunOptions
from llmpq.run.replan import replan_after_loss, replanned_text
from llmpq.run.rows_in_flight import RowsInFlight
from llmpq.run.summary import RunSize, RunSummary
from llmpq.tokenizing.requests import RequestMaker, start_tokenizer
from llmpq.tokenizing.tokenizer_process import Limits, TokenizerProcess
from planner.plan.run_trace import check_trace_path
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_reference import resolve
from quant.common.errors import DeviceLostError

if TYPE_CHECKING:
    from actors.stage_group import StageGroup
    from llmpq.remote.local_ray import GiveUp


class Run:
    """A run of a plan over rows; afterwards `summary` holds the figures.

    `source` is the plan's file, for messages; `job` names the run in Ray's metrics. The functions
    in `on_event` are called with every fault, those in `on_state` with the state about once a
    second, those in `on_plan` with the plan that takes the place of `plan` when devices are lost.
    `give_up`: how to end the process where a local Ray that is gone blocks it. `sampling` is that
    of rows without their own; of what a model's generation config asks for beyond it, the
    constructor warns. `rows` holds counts and the first error, once results are asked for.

    The constructor checks everything that can be checked before Ray is started and raises what
    `llmpq.errors` lists under `LlmpqError`.
    """

    def __init__(
        self,
        plan: PlanSpec,
        options: RunOptions,
        source: str = "the plan",
        job: str = "llmpq",
        on_event: OnEvent | None = None,
    ) -> None:
        from actors.stage.transformers_config import check_transformers_builds
        from quant.checkpoint.reader import Checkpoint

        if options.trace_path is not None:
            check_trace_path(options.trace_path)
        self.plan = plan
        self.on_event = [] if on_event is None else [on_event]
        self.on_plan: list[Callable[[PlanSpec], None]] = []
        self.on_state: list[Callable[[RunState], None]] = []
        self.give_up: GiveUp | None = None
        self.summary: RunSummary | None = None
        self._options, self._job, self._cache = options, job, options.cache
        self._checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
        self._folder = resolve(self._checkpoint, weights=False)
        with ExitStack() as undo:
            tokenizer = self._started_tokenizer()  # it loads during the checks below
            if tokenizer is not None:
                undo.callback(tokenizer.close)
            self.sampling = job_sampling(
                options.sampling, options.generation_config, self._folder, plan.workload
            )
            if self.sampling.warning:
                warnings.warn(self.sampling.warning, stacklevel=3)
            sampling = self.sampling.sampling
            shape = shape_for_run(plan, sampling, self._folder, source)
            self._maker = RequestMaker(plan.workload, shape.vocab_size, sampling, tokenizer)
            if str(self._folder) == self._checkpoint:
                Checkpoint(self._folder).check_files()
            check_transformers_builds(self._folder)
            if tokenizer is not None:
                tokenizer.wait()
            undo.pop_all()
        self._meter = RunMeter(None, None)
        self.rows = RowsInFlight(self._maker, self._meter)
        self._loaded_s: float | None = None

    def _started_tokenizer(self) -> TokenizerProcess | None:
        limits = Limits(self._options.row_s, most_tokens=self.plan.workload.prompt_length)
        tokenizer = start_tokenizer(self._folder, limits)
        if tokenizer is not None:
            tokenizer.on_failure = self._tokenizer_failed
        return tokenizer

    def _tokenizer_failed(self, cause: str, lost_s: float) -> None:
        text = f"a row's chat template or tokens {cause}; it becomes an error row, the others go on"
        self._notify(RecoveryEvent(time.time(), "tokenizer", None, lost_s, text))

    def close(self) -> None:
        """End the process that tokenizes, where the results have not been asked for to the end."""
        if self._maker.tokenizer is not None:
            self._maker.tokenizer.close()

    def results(
        self, rows: Iterable[Row | BadRow], size: RunSize | None = None
    ) -> Generator[Result]:
        """Yield every row's result once, as they finish; rows are taken in as they are needed.

        Leaving the iteration early frees the actors. Where no row can run, none are started.
        """
        self._meter = RunMeter(*((size.prompts, size.max_tokens) if size else (None, None)))
        self.rows = RowsInFlight(self._maker, self._meter)
        resumed = size.resumed if size else 0
        made = self._maker.requests(rows)
        try:
            for item in made:
                if isinstance(item, Request):
                    yield from self._generate(chain((item,), made), resumed)
                    return
                yield self.rows.bad_result(item)
            self.summary = RunSummary(self.rows.ended, self.rows.errors, 0, 0.0, 0.0, (), resumed)
        finally:
            self.close()

    def _generate(self, items: Iterator[Request | BadRow], resumed: int) -> Generator[Result]:
        """Results of all `items`, on other devices too when some are lost."""
        requests = self.rows.requests(items)
        with ray_session(self._options.address, self.give_up):
            began_s = time.perf_counter()
            while True:
                group = self._group()
                try:
                    yield from self._generate_in(group, requests, began_s, resumed)
                    return
                except DeviceLostError as error:
                    if self._options.on_device_loss != "replan":
                        raise
                    self._plan_again(error)
                requests = chain(group.unfinished(), requests)

    def _group(self) -> StageGroup:
        from actors.stage_group import GroupOptions, StageGroup
        from actors.telemetry.meter import TelemetryOptions

        options = self._options
        group_options = GroupOptions(
            cache=self._cache,
            transport=options.transport,
            telemetry=TelemetryOptions(self._job, trace=options.trace is not None),
            recovery=options.recovery,
            on_event=self._notify,
        )
        return StageGroup(self.plan, self._checkpoint, group_options)

    def _generate_in(
        self, group: StageGroup, requests: Iterator[Request | None], began_s: float, resumed: int
    ) -> Generator[Result]:
        """All of `requests` in one group; raises `DeviceLostError` when it cannot go on."""
        from llmpq.run.monitoring.monitor import monitored

        trace = self._options.trace_path
        with group, monitored(group, self.plan, self._meter, self.on_state, trace):
            self._loaded_s = self._loaded_s or time.perf_counter()
            for finished in group.generate(requests):
                yield from self.rows.bad_results()
                yield from self.rows.results(finished)
            yield from self.rows.bad_results()
            self.summary = RunSummary(
                prompts=self.rows.ended,
                errors=self.rows.errors,
                generated_tokens=self.rows.tokens,
                load_s=self._loaded_s - began_s,
                seconds=time.perf_counter() - self._loaded_s,
                stages=group.observer.figures() or (),
                resumed=resumed,
            )

    def _plan_again(self, lost: DeviceLostError) -> None:
        """Take the best plan for what is left; raises `DeviceLostError` where there is none."""
        began_s = time.perf_counter()
        stand_in = self.plan.stand_in is not None
        self.plan = replan_after_loss(self.plan, lost, None if stand_in else str(self._folder))
        lost_s = time.perf_counter() - began_s
        for on_plan in self.on_plan:
            on_plan(self.plan)
        text = replanned_text(self.plan)
        self._notify(RecoveryEvent(time.time(), "replanned", None, lost_s, text))

    def _notify(self, event: RecoveryEvent) -> None:
        for on_event in self.on_event:
            on_event(event)

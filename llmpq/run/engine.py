"""The model of a plan or a fleet, ready to be run or served: checked, with what makes its stages;
and what runs of it share.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from actors.messages import Sampling
from actors.recovery.policy import EventKind, OnEvent, Recovery, RecoveryEvent, ignore_event
from llmpq.lengths.finished_rows import texts_of
from llmpq.lengths.sources import LengthSource, open_source, wait_loaded
from llmpq.model_check import left_out_note
from llmpq.remote.shared_stages import SharedStages
from llmpq.rows.results import RowError
from llmpq.rows.sampling import JobSampling, SamplingInput, merge_sampling
from llmpq.run.checkpoint import (
    check_sampling,
    end_note,
    importance_store,
    model_of_run,
    sampling_for_run,
)
from llmpq.run.expected_lengths import ExpectedLengths
from llmpq.run.options import RunOptions
from llmpq.tokenizing.requests import RequestMaker, start_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits, TokenizerProcess
from planner.adapters import adapter_folders, named_adapters
from planner.fleet.fleet_spec import Runnable
from planner.plan.simulate import check_trace_path
from planner.plan.spec import PlanSpec, all_stages, undivided
from quant.common.errors import SpecError, need_torch

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from llmpq.remote.worker_forks import WorkerForks
    from llmpq.run.spans import RequestTracer
    from quant.rounding.importance_store import ImportanceStore


class CheckedModel:
    """The checkpoint that a plan or a fleet is run with, checked, and the stages that compute it.

    `source` is the plan's file, for messages; `job` names the stages in Ray's metrics. `sampling`
    is that of rows without their own where a run has no other; `notes` tell what of the model is
    left out and what ends answers.
    `listener` is told of every event.

    The constructor checks what can be checked without torch and before Ray is started, and raises
    what `llmpq.errors` lists under `LlmpqError`.
    """

    def __init__(
        self, spec: Runnable, options: RunOptions, source: str = "the plan", job: str = "llmpq"
    ) -> None:
        found = model_of_run(spec, options, source)
        self._replicas = () if isinstance(spec, PlanSpec) else spec.replicas
        self.plan = self._first_plan = found.plan
        self.options, self.job = options, job
        self.listener: OnEvent = ignore_event
        self._importance: ImportanceStore | None = None
        self._adapter, self.adapters = found.adapter, adapter_folders(found.adapters)
        self._checkpoint, self.folder, self._shape = found.checkpoint, found.folder, found.shape
        self.sampling, self.predicts = found.sampling, found.predicts
        notes = (left_out_note(self.folder), end_note(self.sampling.sampling, self.folder))
        self.notes = tuple(filter(None, notes))
        self.tracer = None if options.trace_to is None else _tracer(options.trace_to, self.plan)

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    def length_source(self) -> LengthSource:
        options = self.options
        return open_source(options.predictor, self.folder, self.vocab_size, options.save_predictor)

    def check_loads(self, forks: WorkerForks | None = None) -> Callable[[], None]:
        """Check what torch and transformers are needed for: here and now, or in a fork of what is
        prepared. What is returned then waits for its end; where the fork has any objection, that is
        found here once more, and raised.
        """
        given = (str(self.folder), self._adapter, str(self.folder) == self._checkpoint)

        def check() -> None:
            from actors.stage.model_config import check_loads

            check_loads(*given)

        if forks is None:
            check()
            return lambda: None
        is_done = forks.ask("actors.stage.model_config:check_loads", *given)
        return lambda: None if is_done() else check()

    def load_importance(self) -> None:
        """Find what weights are rounded by."""
        model = (self.folder, self._checkpoint, self._adapter)
        file, cache = self.options.importance, self.options.cache
        self._importance = importance_store(self._first_plan, file, cache, model, self._shape)

    def group(self, plan: PlanSpec, copies: int = 1) -> LiveGroup:
        """The stages of `plan`, so many times, or those of all pipelines of a fleet."""
        is_fleet = bool(self._replicas) and plan is self._first_plan
        if not is_fleet and copies == 1:
            return self._stages_of(plan, self._heard)
        from actors.replicas.pool import ReplicaPool
        from actors.replicas.replica import Restarts

        plans = self._replicas if is_fleet else (plan,) * copies
        shown = plan if is_fleet else replace(undivided(plan), stages=all_stages(plan) * copies)
        restarts = Restarts(on_device_loss=self.options.on_device_loss)
        return ReplicaPool(shown, plans, self._replica, self._heard, restarts)

    def _replica(self, plan: PlanSpec, on_event: OnEvent) -> LiveGroup:
        """The stages of one pipeline; while a device is waited for, others have its rows."""
        recovery = self.options.recovery
        if recovery.on_device_loss == "wait":
            recovery = replace(recovery, on_device_loss="replan")
        return self._stages_of(plan, on_event, recovery)

    def _stages_of(
        self, plan: PlanSpec, on_event: OnEvent, recovery: Recovery | None = None
    ) -> LiveGroup:
        from actors.handover.group import group_of
        from actors.processes.meter import TelemetryOptions
        from actors.stage_group import GroupOptions

        options = self.options
        group_options = GroupOptions(
            cache=self.options.cache,
            transport=options.transport,
            telemetry=TelemetryOptions(
                self.job, trace=options.trace is not None, requests=self.tracer is not None
            ),
            recovery=recovery or options.recovery,
            on_event=on_event,
            policy=options.scheduling(plan),
            importance=self._importance,
            shares_heads=not options.no_shared_heads,
            deterministic=options.deterministic,
            cuda_graphs=not options.no_cuda_graphs,
            adapter=self._adapter,
            adapters=named_adapters(self.adapters),
        )
        return group_of(plan, self._checkpoint, group_options)

    def tell(self, kind: EventKind, lost_s: float, text: str) -> None:
        self._heard(RecoveryEvent(kind, None, lost_s, text))

    def _heard(self, event: RecoveryEvent) -> None:
        self.listener(event)


class RunResources(CheckedModel):
    """What the runs of a plan or a fleet share: `kept` for many until `close`, else until one has
    ended. `plan` is that of the next run, of a fleet one with all stages: a run that plans again
    for good puts another there.

    All is checked before stages are started. Where a run begins `at_once`, a local Ray is started
    while a fork checks what torch and transformers are needed for, else after that. Of what a
    model's generation config asks for beyond `sampling`, the constructor warns.
    """

    def __init__(
        self,
        spec: Runnable,
        options: RunOptions,
        source: str = "the plan",
        job: str = "llmpq",
        kept: bool = False,
        at_once: bool = False,
    ) -> None:
        need_torch()
        if options.trace_path is not None:
            check_trace_path(options.trace_path)
        super().__init__(spec, options, source, job)
        self.kept = kept
        if self.sampling.warning:
            warnings.warn(self.sampling.warning, stacklevel=3)
        self.stages = SharedStages(self.group, options.address, kept)
        with ExitStack() as undo:
            undo.callback(self.stages.close)
            self.tokenizer = self._started_tokenizer()  # it loads during the checks below
            if self.tokenizer is not None:
                undo.callback(self.tokenizer.close)
            lengths = None
            if self.predicts:
                lengths = self.length_source()
                undo.callback(lengths.close)
            check = self.check_loads(self.stages.forks)
            if at_once:
                self.stages.begin()
            self.load_importance()
            import_module("actors.handover.group")  # by which stages are started
            if self.tokenizer is not None:
                self.tokenizer.wait()
            check()
            self.expected = self._expected_lengths(lengths)
            undo.pop_all()

    def _started_tokenizer(self) -> TokenizerProcess | None:
        plans = (self._first_plan, self._first_plan.long_rows or self._first_plan)
        most = max(plan.workload.prompt_length for plan in plans)
        limits = RowLimits(self.options.row_s, most_tokens=most)
        tokenizer = start_tokenizer(self.folder, limits, self.options.prompting)
        if tokenizer is not None:
            tokenizer.on_failure = self._tokenizer_failed
        return tokenizer

    def _tokenizer_failed(self, cause: str, lost_s: float) -> None:
        text = f"a row's chat template or tokens {cause}; it becomes an error row, the others go on"
        self.tell("tokenizer", lost_s, text)

    def _expected_lengths(self, source: LengthSource | None) -> ExpectedLengths | None:
        """What expects lengths, loaded; None under a policy that goes by none."""
        if source is None:
            return None
        wait_loaded(source, self.tokenizer is not None)
        say = partial(self.tell, "predictor", 0.0)
        return ExpectedLengths(source, lambda ids: texts_of(self.tokenizer, ids), say)

    def sampling_of(self, given: SamplingInput) -> JobSampling:
        """The sampling of a run that has its own: a `Sampling` settles all, fields come before
        those of `options`. Raises `SpecError` for what the plan or the model has no room for.
        """
        if not given:
            return self.sampling
        if not isinstance(given, Sampling):
            base = self.options.sampling or {}
            given = merge_sampling(base, given) if isinstance(base, Sampling) else {**base, **given}
        options = replace(self.options, sampling=given)
        found = sampling_for_run(self._first_plan, options, self.folder)
        check_sampling(self._first_plan, found.sampling, self.vocab_size)
        return found

    def request_maker(self, sampling: Sampling) -> RequestMaker:
        """What makes requests of rows that have this `sampling` where they have none. Raises
        `SpecError` where no answer can have its form.
        """
        if self.tokenizer is not None and not self.tokenizer.is_alive:  # it failed in a run before
            self.tokenizer = self._started_tokenizer()
        plan, long = self._first_plan, self._first_plan.long_rows
        long_workload = None if long is None else long.workload
        maker = RequestMaker(
            plan.workload,
            self.vocab_size,
            sampling,
            self.tokenizer,
            long_workload,
            frozenset(self.adapters),
        )
        try:
            maker.check_form(sampling.structured_outputs)
        except RowError as error:
            raise SpecError(str(error)) from error
        return maker

    @property
    def model_folder(self) -> str | None:
        return None if self._first_plan.stand_in is not None else str(self.folder)

    def end_predicting(self) -> None:
        """Say what the predictor has done, and have it write what it learnt where that is asked."""
        if self.expected is not None:
            self.expected.end(self.options.save_predictor)

    def begin_run(self, listener: OnEvent) -> None:
        """Have `listener` told of events from now on, and nothing left of the run before."""
        self.listener = listener
        if self.tokenizer is not None:
            self.tokenizer.forget()

    def end_run(self) -> None:
        """Free what no other run has a use for: all of it where nothing is `kept`."""
        if not self.kept:
            self.close()

    def close(self) -> None:
        """End the stages, and the processes that tokenize and predict."""
        try:
            self.stages.close()
        finally:
            if self.tokenizer is not None:
                self.tokenizer.close()
            if self.expected is not None:
                self.expected.source.close()
            if self.tracer is not None:
                self.tracer.close()


def _tracer(url: str, plan: PlanSpec) -> RequestTracer:
    """What sends spans of requests to `url`; raises `SpecError` where it cannot be had."""
    try:
        from llmpq.run.spans import open_tracer

        return open_tracer(url, plan.model.name)
    except ImportError as error:
        raise SpecError(
            "--trace_to needs OpenTelemetry and its OTLP exporter: pip install 'llmpq[otel]'"
        ) from error

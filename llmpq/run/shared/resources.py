"""The model of a plan, ready to be run: checked, with its tokenizer, its predictor, its stages."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from actors.messages import Sampling
from actors.recovery.policy import EventKind, OnEvent, Recovery, RecoveryEvent, ignore_event
from llmpq.lengths.finished_rows import texts_of
from llmpq.lengths.sources import LengthSource, check_source, open_source, wait_loaded
from llmpq.rows.sampling import JobSampling, SamplingInput, merge_sampling
from llmpq.run.checkpoint import (
    check_machine,
    check_sampling,
    checkpoint_reference,
    end_note,
    sampling_for_run,
    shape_for_run,
)
from llmpq.run.expected_lengths import ExpectedLengths
from llmpq.run.importance import importance_file, importance_store
from llmpq.run.options import RunOptions
from llmpq.run.shared.replicas import Runnable, check_fleet, plans_of, shown_plan
from llmpq.run.shared.stages import SharedStages
from llmpq.tokenizing.requests import RequestMaker, start_tokenizer
from llmpq.tokenizing.tokenizer_process import Limits, TokenizerProcess
from planner.plan.run_trace import check_trace_path
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_reference import resolve

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from planner.model.finding import ModelShape
    from quant.importance.file import ImportanceStore


class RunResources:
    """What the runs of a plan or a fleet share: `kept` for many until `close`, else until one has
    ended.

    `source` is the plan's file, for messages; `job` names the runs in Ray's metrics. `plan` is that
    of the next run, of a fleet one with all stages: a run that plans again for good puts another
    there. `sampling` is that of rows
    without their own where a run has no other; of what a model's generation config asks for beyond
    it, the constructor warns. `listener` is told of every event.

    The constructor checks everything that can be checked before Ray is started and raises what
    `llmpq.errors` lists under `LlmpqError`.
    """

    def __init__(
        self,
        spec: Runnable,
        options: RunOptions,
        source: str = "the plan",
        job: str = "llmpq",
        kept: bool = False,
    ) -> None:
        if options.trace_path is not None:
            check_trace_path(options.trace_path)
        check_fleet(spec, options, source)
        predicts = "s3" in [options.scheduling(each).name for each in plans_of(spec)]
        self._replicas = () if isinstance(spec, PlanSpec) else spec.replicas
        plan = self.plan = self._first_plan = shown_plan(spec)
        self.options, self.kept, self._job = options, kept, job
        self.listener: OnEvent = ignore_event
        self._cache = options.cache
        self._checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
        self.folder = resolve(self._checkpoint, weights=False)
        self.sampling = sampling_for_run(plan, options, self.folder)
        if self.sampling.warning:
            warnings.warn(self.sampling.warning, stacklevel=3)
        check_machine(spec, options, self.folder)
        self.end_note = end_note(self.sampling.sampling, self.folder)
        shape = shape_for_run(spec, self.sampling.sampling, self.folder, source)
        self._vocab_size = shape.vocab_size
        importance_file(plan, options.importance, self._cache, shape)
        if predicts:
            check_source(options.predictor, self.folder, shape.vocab_size, options.save_predictor)
        with ExitStack() as undo:
            self.tokenizer = self._started_tokenizer()  # it loads during the checks below
            if self.tokenizer is not None:
                undo.callback(self.tokenizer.close)
            lengths = None
            if predicts:
                lengths = open_source(
                    options.predictor, self.folder, shape.vocab_size, options.save_predictor
                )
                undo.callback(lengths.close)
            self._importance = self._importance_store(shape)
            if self.tokenizer is not None:
                self.tokenizer.wait()
            self.expected = self._expected_lengths(lengths)
            undo.pop_all()
        self.stages = SharedStages(self._group, options.address, kept)

    def _importance_store(self, shape: ModelShape) -> ImportanceStore:
        """What weights are rounded by, once transformers and torch, which are slow to load, take
        the model too.
        """
        from actors.stage.transformers_config import check_transformers_builds
        from quant.checkpoint.reader import Checkpoint

        if str(self.folder) == self._checkpoint:
            Checkpoint(self.folder).check_files()
        check_transformers_builds(self.folder)
        model = (self.folder, self._checkpoint)
        return importance_store(
            self._first_plan, self.options.importance, self._cache, model, shape
        )

    def _started_tokenizer(self) -> TokenizerProcess | None:
        plans = (self._first_plan, self._first_plan.long_rows or self._first_plan)
        most = max(plan.workload.prompt_length for plan in plans)
        limits = Limits(self.options.row_s, most_tokens=most)
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
        check_sampling(self._first_plan, found.sampling, self._vocab_size)
        return found

    def request_maker(self, sampling: Sampling) -> RequestMaker:
        """What makes requests of rows that have this `sampling` where they have none."""
        if self.tokenizer is not None and not self.tokenizer.is_alive:  # it failed in a run before
            self.tokenizer = self._started_tokenizer()
        plan, long = self._first_plan, self._first_plan.long_rows
        long_workload = None if long is None else long.workload
        return RequestMaker(
            plan.workload, self._vocab_size, sampling, self.tokenizer, long_workload
        )

    @property
    def model_folder(self) -> str | None:
        """The folder of the planned model, where it is here: a stand-in is another one."""
        return None if self._first_plan.stand_in is not None else str(self.folder)

    def _group(self, plan: PlanSpec) -> LiveGroup:
        """The stages of `plan`, or where it stands for a fleet those of all pipelines."""
        if not self._replicas or plan is not self._first_plan:
            return self._stages_of(plan, self._heard)
        from actors.replicas.pool import ReplicaPool
        from actors.replicas.replica import Restarts

        restarts = Restarts(on_device_loss=self.options.on_device_loss)
        return ReplicaPool(plan, self._replicas, self._replica, self._heard, restarts)

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
        from actors.stage_group import GroupOptions
        from actors.telemetry.meter import TelemetryOptions

        options = self.options
        group_options = GroupOptions(
            cache=self._cache,
            transport=options.transport,
            telemetry=TelemetryOptions(self._job, trace=options.trace is not None),
            recovery=recovery or options.recovery,
            on_event=on_event,
            policy=options.scheduling(plan),
            importance=self._importance,
            deterministic=options.deterministic,
        )
        return group_of(plan, self._checkpoint, group_options)

    def tell(self, kind: EventKind, lost_s: float, text: str) -> None:
        """Tell the listener of an event that is no stage's."""
        self._heard(RecoveryEvent(time.time(), kind, None, lost_s, text))

    def _heard(self, event: RecoveryEvent) -> None:
        self.listener(event)

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

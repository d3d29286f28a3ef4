"""Running a plan over rows on Ray: tokenize, batch, generate, detokenize, report."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from actors.messages import Finished, Request, Sampling, StageStats, Transport
from actors.recovery.policy import OnEvent, Recovery, RecoveryEvent, ignore_event
from llmpq.jobs.records.manifest import JobIdentity
from llmpq.jobs.records.model_identity import model_digest
from llmpq.model_check import checked_shape
from llmpq.remote.session import ray_session
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling_defaults import GenerationConfigUse, SamplingInput, job_sampling
from llmpq.run.monitor import RunMeter, RunState
from llmpq.run.replan import replan_for_rest, replanned_text
from llmpq.tokenizing.process import ROW_S, Limits, TokenizerProcess
from llmpq.tokenizing.requests import RequestMaker, beyond_vocabulary, start_tokenizer
from planner.model.finding import ModelShape, shape_at_hand
from planner.plan.check import check_plan
from planner.plan.plan import Plan
from planner.plan.run_trace import check_trace_path
from planner.workload import check_length
from quant.cache.settings import CacheSettings
from quant.checkpoint.model_reference import local_path, resolve
from quant.common.errors import DeviceLostError, PlanMismatchError, SpecError

if TYPE_CHECKING:
    from actors.stage_group import StageGroup
    from llmpq.remote.local_ray import GiveUp

NOT_FINITE = (
    "the model's logits are not finite: its values overflow the compute type on some stage; plan "
    "with --dtype float32, or bfloat16 where every GPU has it"
)

BAD_ROWS_AT_ONCE = 256
"""Rows that cannot run, gathered at most while the stages' next requests are looked for."""

BAD_ROWS_S = 5.0
"""For so long at most: a row whose tokens take too long may cost `row_s`."""


@dataclass(frozen=True)
class RunSummary:
    """What a run did; `seconds` of generating, without loading; `stages` in stage order.

    `resumed`: rows that an earlier run had done, which `prompts` does not count.
    """

    prompts: int
    errors: int
    generated_tokens: int
    load_s: float
    seconds: float
    stages: tuple[StageStats, ...]
    resumed: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RunOptions:
    """`model`: checkpoint folder or hub id, where the plan's own is not to be used; `address`:
    Ray's; `cache`: where each node keeps packed layers for the next start; `transport` between
    stages; `trace`: where to write every micro-batch's times; `job` names the run in Ray's metrics;
    `recovery`: how it goes on after faults, of which `on_event` is told; `generation_config`: whose
    sampling holds where `sampling` settles none; `row_s`: seconds that making a row's tokens may
    take; `plan_source`: the plan's file, for messages.
    """

    model: str | None = None
    sampling: SamplingInput = None
    generation_config: GenerationConfigUse = "model"
    address: str | None = None
    cache: CacheSettings = CacheSettings()  # noqa: RUF009  (frozen)
    transport: Transport = "auto"
    trace: Path | None = None
    job: str = "llmpq"
    recovery: Recovery = Recovery()  # noqa: RUF009  (frozen)
    on_event: OnEvent = ignore_event
    row_s: float = ROW_S
    plan_source: str = "the plan"


@dataclass(frozen=True)
class RunSize:
    """What a run will do, where that is known: rows, tokens at most, and rows done `resumed`."""

    prompts: int
    max_tokens: int
    resumed: int = 0


class Run:
    """Runs a plan over rows; afterwards `summary` holds the figures.

    When devices are lost, another plan takes its place: `plan` is the present one, and `follow` is
    told. `tell` hears of faults. `give_up`: how to end the process where a local Ray that is gone
    blocks it. `errors` counts what failed so far, `first_error` is the first. `sampling` is that of
    rows without their own; what a model's generation config asks for beyond it is warned of.
    """

    def __init__(self, plan: Plan, options: RunOptions) -> None:
        from actors.stage.library_config import check_library_takes
        from quant.checkpoint.reader import Checkpoint

        if options.trace is not None:
            check_trace_path(options.trace)
        self.plan = plan
        self.follow: list[Callable[[Plan], None]] = []
        self.tell: list[OnEvent] = [options.on_event]
        self._options = options
        self._checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
        self._folder = resolve(self._checkpoint, weights=False)
        with ExitStack() as undo:
            tokenizer = self._started_tokenizer()  # it loads while the rest is looked at
            if tokenizer is not None:
                undo.callback(tokenizer.close)
            self.sampling = job_sampling(
                options.sampling, options.generation_config, self._folder, plan.workload
            )
            if self.sampling.warning:
                warnings.warn(self.sampling.warning, stacklevel=3)
            shape = _shape_for_run(plan, self.sampling.sampling, self._folder, options.plan_source)
            self._maker = RequestMaker(
                plan.workload, shape.vocab_size, self.sampling.sampling, tokenizer
            )
            if str(self._folder) == self._checkpoint:
                Checkpoint(self._folder).check_files()
            check_library_takes(self._folder)
            if tokenizer is not None:
                tokenizer.wait()
            undo.pop_all()
        self.meter = RunMeter(None, None)
        self.show: list[Callable[[RunState], None]] = []
        self.give_up: GiveUp | None = None
        self.rows = self.errors = 0
        self.first_error: Result | None = None
        self._under_way: dict[str, Request] = {}
        self._tokens = 0
        self._loaded_s: float | None = None
        self.summary: RunSummary | None = None

    def _started_tokenizer(self) -> TokenizerProcess | None:
        limits = Limits(self._options.row_s, most_tokens=self.plan.workload.prompt_length)
        tokenizer = start_tokenizer(self._folder, limits)
        if tokenizer is not None:
            tokenizer.on_failure = self._tokenizer_failed
        return tokenizer

    def _tokenizer_failed(self, cause: str, lost_s: float) -> None:
        text = f"a row's chat template or tokens {cause}; it becomes an error row, the others go on"
        self._tell(RecoveryEvent(time.time(), "tokenizer", None, lost_s, text))

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
        self.meter = RunMeter(*((size.prompts, size.max_tokens) if size else (None, None)))
        resumed = size.resumed if size else 0
        made = self._maker.requests(rows)
        try:
            for item in made:
                if isinstance(item, Request):
                    yield from self._generate(chain((item,), made), resumed)
                    return
                self.meter.leave_out()
                yield self._failed(item.custom_id, item.error)
            self.summary = RunSummary(self.rows, self.errors, 0, 0.0, 0.0, (), resumed)
        finally:
            self.close()

    def _generate(self, items: Iterator[Request | BadRow], resumed: int) -> Generator[Result]:
        bad_rows: deque[BadRow] = deque()
        requests = self._requests(items, bad_rows)
        with ray_session(self._options.address, self.give_up):
            began = time.perf_counter()
            while True:
                group = self._group()
                try:
                    yield from self._generate_in(group, requests, bad_rows, began, resumed)
                    return
                except DeviceLostError as error:
                    if self._options.recovery.on_device_loss != "replan":
                        raise
                    self._plan_again(error)
                requests = chain(group.unfinished(), requests)

    def _group(self) -> StageGroup:
        from actors.stage_group import GroupOptions, StageGroup
        from actors.telemetry.meter import TelemetryOptions

        options = self._options
        settings = GroupOptions(
            cache=options.cache,
            transport=options.transport,
            telemetry=TelemetryOptions(options.job, trace=options.trace is not None),
            recovery=options.recovery,
            on_event=self._tell,
        )
        return StageGroup(self.plan, self._checkpoint, settings)

    def _generate_in(
        self,
        group: StageGroup,
        requests: Iterator[Request | None],
        bad_rows: deque[BadRow],
        began: float,
        resumed: int,
    ) -> Generator[Result]:
        """All of `requests` in one group; raises `DeviceLostError` when it cannot go on."""
        from llmpq.run.onlookers import watching

        with group, watching(group, self.plan, self.meter, self.show, self._options.trace):
            self._loaded_s = self._loaded_s or time.perf_counter()
            for finished in group.generate(requests):
                yield from self._bad_results(bad_rows)
                yield from self._results(finished)
            yield from self._bad_results(bad_rows)
            self.summary = RunSummary(
                prompts=self.rows,
                errors=self.errors,
                generated_tokens=self._tokens,
                load_s=self._loaded_s - began,
                seconds=time.perf_counter() - self._loaded_s,
                stages=group.observer.figures() or (),
                resumed=resumed,
            )

    def _plan_again(self, lost: DeviceLostError) -> None:
        """Take the best plan for what is left; raises `DeviceLostError` where there is none."""
        began = time.perf_counter()
        stand_in = self.plan.stand_in is not None
        self.plan = replan_for_rest(self.plan, lost, None if stand_in else str(self._folder))
        lost_s = time.perf_counter() - began
        text = replanned_text(self.plan)
        for follow in self.follow:
            follow(self.plan)
        self._tell(RecoveryEvent(time.time(), "replanned", None, lost_s, text))

    def _tell(self, event: RecoveryEvent) -> None:
        for tell in self.tell:
            tell(event)

    def _requests(
        self, items: Iterator[Request | BadRow], bad_rows: deque[BadRow]
    ) -> Iterator[Request | None]:
        """The requests among `items`; bad rows are put aside, and None comes where they are to be
        given out before more is read.
        """
        since_s = time.monotonic()
        for item in items:
            if isinstance(item, Request):
                self._under_way[item.custom_id] = item
                yield item
            else:
                bad_rows.append(item)
                is_late = time.monotonic() - since_s > BAD_ROWS_S
                if len(bad_rows) < BAD_ROWS_AT_ONCE and not is_late:
                    continue
                yield None
            since_s = time.monotonic()

    def _bad_results(self, bad_rows: deque[BadRow]) -> Iterator[Result]:
        while bad_rows:
            bad = bad_rows.popleft()
            self.meter.leave_out()
            yield self._failed(bad.custom_id, bad.error)

    def _results(self, finished: Sequence[Finished]) -> Iterator[Result]:
        requests = [self._under_way.pop(each.custom_id) for each in finished]
        answers = self._maker.texts(
            [
                (each.token_ids, request.sampling.stop)
                for each, request in zip(finished, requests, strict=True)
            ]
        )
        for each, request, answer in zip(finished, requests, answers, strict=True):
            self._tokens += len(each.token_ids)
            self.meter.end(len(each.token_ids), request.max_new_tokens)
            error = (each.error or NOT_FINITE) if each.finish_reason == "error" else None
            if error is None and answer.error is not None:
                error = f"its tokens cannot be turned into text: {answer.of}: {answer.error}"
            if error is not None:
                yield self._failed(each.custom_id, error, each.token_ids)
                continue
            self.rows += 1
            yield Result(each.custom_id, answer.text, each.token_ids, each.finish_reason)

    def _failed(self, custom_id: str, error: str, token_ids: tuple[int, ...] = ()) -> Result:
        result = Result(custom_id, None, token_ids, None, error)
        self.rows += 1
        self.errors += 1
        self.first_error = self.first_error or result
        return result


def job_identity(plan: Plan, options: RunOptions) -> JobIdentity:
    """What all rows of a job with these options share; told without torch.

    Raises what `Run` raises for a model or options that do not go with the plan.
    """
    checkpoint = checkpoint_reference(plan, options.model or plan.stand_in)
    folder = resolve(checkpoint, weights=False)
    found = job_sampling(options.sampling, options.generation_config, folder, plan.workload)
    sampling = found.sampling
    _shape_for_run(plan, sampling, folder, options.plan_source)
    most = sampling.max_new_tokens or plan.workload.new_tokens
    return JobIdentity(
        model_digest(folder, checkpoint),
        plan.model.name,
        replace(sampling, max_new_tokens=most),
    )


def _shape_for_run(plan: Plan, sampling: Sampling, folder: Path, plan_source: str) -> ModelShape:
    """Shape of what computes; raises where it or the sampling does not go with the plan."""
    most = sampling.max_new_tokens
    if (most or 0) > plan.workload.new_tokens:
        raise SpecError(
            f"max_new_tokens is {most}, the plan has room for {plan.workload.new_tokens}; plan "
            "with a larger --n"
        )
    shape = checked_shape(folder) if plan.stand_in else shape_for_plan(plan, folder)
    check_plan(plan, _planned_shape(plan) if plan.stand_in else shape, plan_source)
    check_length(shape, plan.workload)
    beyond = beyond_vocabulary(sampling, shape.vocab_size)
    if beyond:
        raise SpecError(beyond)
    return shape


def _planned_shape(plan: Plan) -> ModelShape | None:
    """Shape of the model that a stand-in plays, where it can be told without the network."""
    shape = shape_at_hand(plan.model.source)
    return shape if shape and shape.fingerprint() == plan.model.fingerprint else None


def shape_for_plan(plan: Plan, folder: Path) -> ModelShape:
    """Shape of the model in `folder`; raises `PlanMismatchError` if the plan is for another one."""
    shape = checked_shape(folder)
    if shape.fingerprint() != plan.model.fingerprint:
        raise PlanMismatchError(
            f"{folder} holds {shape.name} ({shape.layers} layers, hidden size "
            f"{shape.hidden_size}), the plan is for {plan.model.name} ({plan.model.layers} "
            "layers); plan again for this model or pass --model"
        )
    planned = {bits for stage in plan.stages for bits in stage.bitwidths}
    if shape.stored is not None and not shape.stored.mixed and planned != {shape.stored.bits}:
        raise PlanMismatchError(
            f"{folder} is quantized already, all of it with {shape.stored.bits} bits, but the plan "
            f"has layers of {', '.join(map(str, sorted(planned)))}; plan for the checkpoint itself "
            "or pass the original 16-bit one as --model"
        )
    return shape


def checkpoint_reference(plan: Plan, model: str | None) -> str:
    """Where the weights are, in words that hold on every node: an absolute folder, or a hub id.

    That is `model` if given, else what the plan was made from.
    """
    reference = model or plan.model.source
    named = local_path(reference, "give a folder or a hub id")
    return str(named.resolve()) if named is not None and named.is_dir() else reference

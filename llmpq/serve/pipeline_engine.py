"""The engine over one pipeline or several: a live run in its own thread, and the tokenizer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.messages import Progress, Request
from actors.recovery.policy import OnEvent, RecoveryEvent
from llmpq.lengths.predictor import Prompt
from llmpq.lengths.sources import wait_loaded
from llmpq.run.engine import CheckedModel
from llmpq.run.expected_lengths import NO_PREDICTOR, ExpectedLengths
from llmpq.run.options import RunOptions
from llmpq.run.summary import planned_tokens_per_s
from llmpq.serve.engine import (
    EngineLimits,
    EngineStatus,
    EngineStoppingError,
    GenerationError,
    QueueState,
    TokenEvent,
)
from llmpq.serve.model_tokenizer import ModelTokenizer
from llmpq.tokenizing.requests import not_finite
from llmpq.tokenizing.tokenizer_process import RowLimits
from planner.fleet.fleet_spec import Runnable
from planner.plan.spec import PlanSpec
from quant.common.errors import LlmpqError

if TYPE_CHECKING:
    from actors.live_group import Live, LiveGroup
    from llmpq.remote.worker_forks import WorkerForks
    from llmpq.run.monitor import LoadingState

LOADING_S = 2.0
"""Seconds that stages which still load get to be there, when the engine is closed."""

_LOG = logging.getLogger(__name__)


class PipelineEngine:
    """An engine whose stages run a plan, several copies of it, or the pipelines of a fleet; needs
    an initialised Ray and one event loop.

    What can be checked without the stages is checked here: raises what `llmpq.run.run.Run` raises
    for a plan, a model and options that do not go together. `start` loads the stages meanwhile,
    `close` ends them. Of several pipelines the first that is loaded makes the engine ready, and
    requests of one that is lost go on at the others, until it is back.
    """

    def __init__(
        self,
        spec: Runnable,
        options: RunOptions,
        source: str = "the plan",
        forks: WorkerForks | None = None,
    ) -> None:
        model = self._model = CheckedModel(spec, options, source)
        self.on_event: list[OnEvent] = [
            lambda event: _LOG.warning("%s: %s", event.kind, event.text)
        ]
        model.listener = self._note_event
        self.notes, self.tracer = model.notes, model.tracer
        check = model.check_loads(forks)
        model.load_importance()
        room, found = model.plan.workload, model.sampling.sampling
        self.model_name, self.adapters = model.plan.model.name, tuple(model.adapters)
        self.created_s = int(time.time())
        self.sampling = found
        self.limits = EngineLimits(
            prompt_tokens=room.prompt_length,
            new_tokens=room.new_tokens,
            slot_tokens=room.total_length,
            default_new_tokens=found.max_new_tokens or room.new_tokens,
            vocab_size=model.vocab_size,
        )
        limits = RowLimits(options.row_s, most_tokens=room.prompt_length)
        self.tokenizer = ModelTokenizer(model.folder, limits, options.prompting)
        self.markers = self.tokenizer.markers
        self.encode, self.decode = self.tokenizer.encode, self.tokenizer.decode
        self.kept_form = self.tokenizer.kept_form
        self.call_reading = self.tokenizer.call_reading
        try:
            check()
            self.tokenizer.check_form(found.structured_outputs)
            self.lengths = self._expected_lengths() if model.predicts else None
        except LlmpqError:
            self.tokenizer.close()
            raise
        self.on_loading: list[Callable[[LoadingState], None]] = []
        self._status: EngineStatus = "loading"
        self._copies = 1
        self._answers: dict[str, asyncio.Queue[Progress | None]] = {}
        self._reserved: dict[str, int] = {}
        self._running: set[str] = set()
        self.group: LiveGroup | None = None
        self._live: Live | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-engine", daemon=True)

    def _expected_lengths(self) -> ExpectedLengths:
        """What expects lengths, loaded; its failure fails no request."""
        source = self._model.length_source()
        wait_loaded(source, has_tokenizer=True)
        if self._model.options.predictor is None:
            _LOG.warning(NO_PREDICTOR)
        return ExpectedLengths(source, _no_texts, _LOG.warning, "the server")

    def start(self, copies: int = 1) -> None:
        """Begin to load the stages, of a plan so many times; `status` tells when some are ready."""
        self._copies = copies
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        live = self._live
        if live is not None:
            for custom_id in list(self._answers):
                live.cancel(custom_id)
            live.close()
        if self._thread.is_alive():  # loading cannot be ended but by the end of Ray
            self._thread.join(None if live is not None else LOADING_S)
        if self.lengths is not None:
            self.lengths.end(self._model.options.save_predictor)
            self.lengths.source.close()
        self.tokenizer.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def status(self) -> EngineStatus:
        """Whether requests are taken: not while all pipelines are lost and start again."""
        return "loading" if self._status == "ready" and not self._ready_plans else self._status

    @property
    def _ready_plans(self) -> Sequence[PlanSpec]:
        return () if self.group is None else self.group.ready_plans

    @property
    def queue(self) -> QueueState:
        """The present load: requests without a token yet wait."""
        rooms = [plan.workload for plan in self._ready_plans or (self._model.plan,)]
        return QueueState(
            waiting=len(self._answers) - len(self._running),
            running=len(self._running),
            slots=sum(room.global_batch for room in rooms),
            kv_tokens_used=sum(self._reserved[each] for each in self._running),
            kv_tokens=sum(room.kv_tokens for room in rooms),
            planned_tokens_per_s=sum(planned_tokens_per_s(each) or 0 for each in self._ready_plans),
        )

    def _note_event(self, event: RecoveryEvent) -> None:
        for told in self.on_event:
            told(event)

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        live = self._live
        if self.status != "ready" or live is None:
            raise EngineStoppingError("the engine takes no requests now")
        self._loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._answers[request.custom_id] = answers
        self._reserved[request.custom_id] = len(request.prompt_ids) + request.max_new_tokens
        ended, tokens = True, 0
        try:
            expected = await self._expected(request)
            live.submit(replace(request, expected_tokens=expected))
            ended = False
            while not ended:
                progress = await answers.get()
                ended = progress is None or progress.finish_reason is not None
                for event in _events(progress, request):
                    tokens += 1
                    yield event
            if self.lengths is not None:
                self.lengths.source.finished([(request.custom_id, tokens)])
        finally:
            del self._answers[request.custom_id], self._reserved[request.custom_id]
            self._running.discard(request.custom_id)
            if not ended:
                live.cancel(request.custom_id)

    async def _expected(self, request: Request) -> int | None:
        """The new tokens that are expected of a request, under a policy that goes by them."""
        if self.lengths is None:
            return None
        text = ""
        if self.lengths.reads_text:
            try:
                text = await self.tokenizer.decode(request.prompt_ids)
            except GenerationError:
                return request.max_new_tokens
        prompt = Prompt(request.custom_id, request.max_new_tokens, request.prompt_ids, text)
        expected = await self.lengths.expect(prompt)
        if self._status != "ready":  # it may have ended meanwhile
            raise EngineStoppingError("the engine takes no requests now")
        return expected

    def _run(self) -> None:
        """Load the stages, and hand out what comes until the engine is closed or fails."""
        from llmpq.run.monitor import loading_watch

        try:
            self.group = group = self._model.group(self._model.plan, self._copies)
            with ExitStack() as loaded:
                with loading_watch(group, self.on_loading):
                    loaded.enter_context(group)
                if self._closing.is_set():
                    return
                if self.tracer is not None:
                    loaded.enter_context(self.tracer.following(group))
                self._live = group.live()
                self._status = "ready"
                for told in self._live.events():
                    self._call(self._deliver, told)
        except LlmpqError as error:
            self._fail(str(error))
        except Exception as error:  # told to clients as 503, whatever it was
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._status = "draining"
        self._call(self._give_up)

    def _fail(self, why: str) -> None:
        """Note that there are no stages any more, which is no news where they are being ended."""
        if self._closing.is_set():
            self._status = "draining"
            return
        self._status = "failed"
        _LOG.error("the stages are lost: %s", why)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, if there is one that runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, told: Sequence[Progress]) -> None:
        for progress in told:
            answers = self._answers.get(progress.custom_id)
            if answers is not None:
                self._running.add(progress.custom_id)
                answers.put_nowait(progress)

    def _give_up(self) -> None:
        for answers in self._answers.values():
            answers.put_nowait(None)


def _no_texts(token_ids: object) -> list[str]:
    raise AssertionError("texts are asked of the tokenizer for each request")


def _events(progress: Progress | None, request: Request) -> Sequence[TokenEvent]:
    """The tokens of `progress`; raises `GenerationError` where it says that there is an error."""
    if progress is None:
        raise GenerationError("the stages are gone; the server's log says more")
    reason = progress.finish_reason
    if reason == "error":
        why = not_finite(request, "the model's output was not finite")
        raise GenerationError(progress.error or why)
    ends = (*(None for _ in progress.token_ids[1:]), reason)
    logprobs = progress.logprobs or [None] * len(progress.token_ids)
    shared = (progress.shared_tokens, *(0 for _ in progress.token_ids[1:]))[: len(logprobs)]
    prompt = (progress.prompt_logprobs, *(None for _ in progress.token_ids[1:]))[: len(logprobs)]
    told = zip(progress.token_ids, ends, logprobs, shared, prompt, strict=True)
    return [TokenEvent(*each) for each in told]

"""Running a plan over rows on Ray: tokenize, batch, generate, detokenize, report."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from actors.messages import Finished, Request, Sampling, StageStats, Transport
from llmpq.results import Result
from llmpq.rows import BadRow, Row
from llmpq.session import ray_session
from llmpq.tokenize import RequestMaker, load_tokenizer
from planner.model_shape import ModelShape, model_shape
from planner.plan import Plan
from quant.cache.settings import CacheSettings
from quant.errors import PlanMismatchError, SpecError

NOT_FINITE = (
    "the model's logits are not finite: its values overflow the compute type on some stage; plan "
    "with --dtype float32, or bfloat16 where every GPU has it"
)


@dataclass(frozen=True)
class RunSummary:
    """What a run did; `seconds` of generating, without loading; `stages` in stage order."""

    prompts: int
    errors: int
    generated_tokens: int
    load_s: float
    seconds: float
    stages: tuple[StageStats, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RunOptions:
    """`model`: checkpoint folder or hub id, where the plan's own is not to be used; `address`:
    Ray's; `cache`: where each node keeps packed layers for the next start; `transport` between
    stages.
    """

    model: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    address: str | None = None
    cache: CacheSettings = CacheSettings()  # noqa: RUF009  (frozen)
    transport: Transport = "auto"


class Run:
    """One run over `rows` as they finish; afterwards `summary` holds the figures.

    Bad rows come first, as results with `error`; `errors` holds what failed so far. Leaving the
    iteration early frees the actors.
    """

    def __init__(self, plan: Plan, rows: Sequence[Row | BadRow], options: RunOptions) -> None:
        from quant.checkpoint import Checkpoint, resolve

        self._plan = plan
        self._options = options
        self._checkpoint = checkpoint_reference(plan, options.model)
        self._folder = resolve(self._checkpoint, weights=False)
        self._maker = self._request_maker()
        if str(self._folder) == self._checkpoint:
            Checkpoint(self._folder).check_files()
        made = [self._maker.request(row) if isinstance(row, Row) else row for row in rows]
        self.errors = [m for m in made if isinstance(m, BadRow)]
        self._bad_rows = tuple(self.errors)
        self.requests = tuple(m for m in made if isinstance(m, Request))
        self.summary: RunSummary | None = None

    def _request_maker(self) -> RequestMaker:
        plan, sampling = self._plan, self._options.sampling
        if (sampling.max_new_tokens or 0) > plan.workload.new_tokens:
            raise SpecError(
                f"max_new_tokens is {sampling.max_new_tokens}, the plan has room for "
                f"{plan.workload.new_tokens}; plan with a larger --n"
            )
        shape = shape_for_plan(plan, self._folder)
        return RequestMaker(plan.workload, shape.vocab_size, sampling, load_tokenizer(self._folder))

    def results(self) -> Generator[Result]:
        """Yield every row's result once."""
        for bad in self._bad_rows:
            yield Result(bad.custom_id, None, (), None, bad.error)
        if not self.requests:
            self.summary = RunSummary(len(self.errors), len(self.errors), 0, 0.0, 0.0, ())
            return
        yield from self._generate()

    def _generate(self) -> Generator[Result]:
        from actors.stage_group import StageGroup

        stop_of = {r.custom_id: r.sampling.stop for r in self.requests}
        tokens = 0
        with ExitStack() as stack:
            stack.enter_context(ray_session(self._options.address))
            began = time.perf_counter()
            group = stack.enter_context(
                StageGroup(
                    self._plan,
                    self._checkpoint,
                    cache=self._options.cache,
                    transport=self._options.transport,
                )
            )
            loaded = time.perf_counter()
            for finished in group.generate(self.requests):
                for request in finished:
                    tokens += len(request.token_ids)
                    yield self._result(request, stop_of[request.custom_id])
            ended = time.perf_counter()
            self.summary = RunSummary(
                prompts=len(self.requests) + len(self._bad_rows),
                errors=len(self.errors),
                generated_tokens=tokens,
                load_s=loaded - began,
                seconds=ended - loaded,
                stages=group.stats(),
            )

    def _result(self, finished: Finished, stop: tuple[str, ...]) -> Result:
        if finished.finish_reason == "error":
            self.errors.append(BadRow(finished.custom_id, NOT_FINITE))
            return Result(finished.custom_id, None, finished.token_ids, None, NOT_FINITE)
        text = self._maker.text(finished.token_ids, stop)
        return Result(finished.custom_id, text, finished.token_ids, finished.finish_reason)


def shape_for_plan(plan: Plan, folder: Path) -> ModelShape:
    """Shape of the model in `folder`; raises `PlanMismatchError` if the plan is for another one."""
    shape = model_shape(str(folder))
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
    named = Path(model or plan.model.source).expanduser()
    return str(named.resolve()) if named.is_dir() else model or plan.model.source

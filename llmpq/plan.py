"""`Plan` as Python users meet it: the planner's data, `run` and `evaluate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from actors.messages import Transport
from actors.recovery.policy import OnDeviceLoss, OnEvent, Recovery, ignore_event
from llmpq.jobs.formats.python_rows import rows_of
from llmpq.quality.options import AUTO, EvaluationOptions
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import Document
from llmpq.report import write_report
from llmpq.rows.row import RowInput
from llmpq.rows.sampling_defaults import GenerationConfigUse, SamplingInput
from llmpq.run.stream import Results
from llmpq.tokenizing.tokenizer_process import ROW_S
from planner.costs.model import CostModel
from planner.explanation.explain import Explanation, StageLimits, explain, stage_limits
from planner.explanation.planned_assignment import planned_assignment
from planner.micro_batches import MicroBatches
from planner.plan.plan import Plan as PlanData
from planner.plan.plan import PlannedModel, Prediction, SolverRecord, StagePlan
from planner.search.front import FrontPoint
from planner.simulation.trace import write_chrome_trace, write_gantt
from planner.workload import Workload
from quant.cache.settings import cache_settings
from quant.common.errors import SpecError


class Plan:
    """What runs where, with how many bits and in which micro-batches; made by `Cluster.plan` or
    `load`.
    """

    def __init__(
        self, data: PlanData, costs: CostModel | None = None, source: str = "the plan"
    ) -> None:
        self.data = data
        self._costs = costs
        self._source = source

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises `SpecError` naming file and field."""
        return cls(PlanData.load(path), source=str(path))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        self.data.save(path)

    @cached_property
    def explanation(self) -> Explanation | None:
        """Why the plan is as it is; takes seconds. None for a plan that was loaded from its file,
        which does not hold the cluster.
        """
        return None if self._costs is None else explain(self.data, self._costs)

    def report(self, path: str | Path, front: Sequence[FrontPoint] = ()) -> None:
        """Write the plan and its explanation as one HTML page.

        `front`: what `Cluster.pareto` gave, to be drawn too. Raises `InputError` where it cannot be
        written.
        """
        write_report(path, self.data, self.explanation, front)

    @cached_property
    def limits(self) -> tuple[StageLimits, ...]:
        """What holds each stage; empty for a plan that was loaded from its file."""
        if self._costs is None:
            return ()
        return stage_limits(planned_assignment(self.data, self._costs))

    def trace(self, path: str | Path) -> None:
        """Write the simulated batch: an `.svg` Gantt picture, else JSON for Perfetto or Chrome.

        Raises `SpecError` where it cannot be written, or for a plan that was loaded from its file.
        """
        if self._costs is None:
            raise SpecError("a plan file holds no cost model to simulate; trace while planning")
        simulated = planned_assignment(self.data, self._costs).simulate()
        labels = [stage.device for stage in self.stages]
        if Path(path).suffix == ".svg":
            write_gantt(path, simulated, labels)
        else:
            write_chrome_trace(path, simulated, labels)

    @property
    def model(self) -> PlannedModel:
        """The planned model."""
        return self.data.model

    @property
    def workload(self) -> Workload:
        """The planned workload."""
        return self.data.workload

    @property
    def micro_batches(self) -> MicroBatches:
        """Micro-batch sizes of prefill and decode."""
        return self.data.micro_batches

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages in pipeline order."""
        return self.data.stages

    @property
    def predicted(self) -> Prediction:
        """Predicted seconds and tokens per second of one global batch."""
        return self.data.predicted

    @property
    def solver(self) -> SolverRecord:
        """How the plan was found."""
        return self.data.solver

    def run(
        self,
        rows: Iterable[RowInput],
        sampling: SamplingInput = None,
        model: str | None = None,
        address: str | None = None,
        cache_dir: str | Path | None = None,
        cache_limit_gib: float | None = None,
        no_cache: bool = False,
        transport: Transport = "auto",
        trace: str | Path | None = None,
        on_device_loss: OnDeviceLoss = "replan",
        retries: int = Recovery.retries,
        hang_s: float = Recovery.hang_s,
        replace_s: float = Recovery.replace_s,
        on_event: OnEvent = ignore_event,
        generation_config: GenerationConfigUse = "model",
        row_s: float = ROW_S,
    ) -> Results:
        """Generate for every row; yields results in the order they finish.

        `rows`: strings, lists of token ids, or dictionaries as in a JSONL line, from any iterable,
        which is read as slots become free. What is returned can be iterated, with `async for` too;
        as a context manager it frees the actors however it is left. `model` names
        another place of the same weights. Joins a running Ray (initialised, `address` or
        RAY_ADDRESS) or starts a local one. Each node keeps its packed layers in `cache_dir` (its
        user's cache folder) for the next start, `cache_limit_gib` at most (100, or half of the free
        space), unless `no_cache`. `transport` between stages: "gloo", "ray", or "auto", which is
        gloo where it connects. `trace`: where to write every micro-batch's times for Perfetto,
        beside the simulated batch. When a device is gone for `replace_s`, `on_device_loss` is
        "replan" for what is left, "wait" or "fail"; a stage without progress for `hang_s` is
        started again; a row in flight at `retries` faults is run apart from the others. `on_event`
        is told of every fault. `sampling`: a `Sampling` settles every field; a mapping, such as
        `{"temperature": 0.7}`, those that it names, and the others are those of the model's
        generation_config.json, or with `generation_config="none"` greedy; what holds is in the
        results' `sampling`. A row whose chat template or tokens take more than `row_s` seconds
        becomes an error. Raises what `llmpq.errors` lists before anything is started, and
        `quant.common.errors.HeadLostError` where the Ray that was started here comes to its end.
        """
        from llmpq.run.run import Run, RunOptions

        options = RunOptions(
            model=model,
            sampling=sampling,
            generation_config=generation_config,
            address=address,
            cache=cache_settings(cache_dir, cache_limit_gib, no_cache),
            transport=transport,
            trace=None if trace is None else Path(trace),
            recovery=Recovery(
                retries=retries, hang_s=hang_s, replace_s=replace_s, on_device_loss=on_device_loss
            ),
            on_event=on_event,
            row_s=row_s,
            plan_source=self._source,
        )
        return Results(Run(self.data, options), rows_of(rows))

    def run_dataset(
        self,
        dataset: Any,
        sampling: SamplingInput = None,
        model: str | None = None,
        cache_dir: str | Path | None = None,
        no_cache: bool = False,
        transport: Transport = "auto",
        generation_config: GenerationConfigUse = "model",
    ) -> Any:
        """Generate for every row of a `ray.data.Dataset`; returns the results as another one.

        Columns are named as the fields of a JSONL line and of a `Result`; rows without `custom_id`
        get one that is made from their content. The rows stream through this process, the results
        lie in Ray's object store, which spills to disk. Needs Ray to be initialised, pandas and
        pyarrow. Raises as `run`.
        """
        from llmpq.jobs.formats.dataset import dataset_of, rows_in
        from llmpq.run.run import Run, RunOptions

        options = RunOptions(
            model=model,
            sampling=sampling,
            generation_config=generation_config,
            cache=cache_settings(cache_dir, None, no_cache),
            transport=transport,
            plan_source=self._source,
        )
        with Results(Run(self.data, options), rows_in(dataset)) as results:
            return dataset_of(results)

    def evaluate(
        self,
        text: Document | Iterable[Document],
        model: str | None = None,
        sequence_length: int | None = None,
        max_tokens: int | None = None,
        device: str = AUTO,
        dtype: str = AUTO,
    ) -> Perplexity:
        """Perplexity of the planned model on `text`: a string, its token ids, or several of either.

        Computed here, layer by layer, with each layer's bits and the kernels of its device; where
        those do not run here, plain products with their rounded weights stand for them
        (`Perplexity.represented`). Windows of `sequence_length` tokens (512, or as many as the
        model has positions) do not overlap; `max_tokens` cuts the text. `device`: auto, cpu or
        cuda; `dtype`: auto (each stage's own), or a type for all. Raises what `llmpq.errors` lists.
        """
        from llmpq.quality.subjects import evaluate_plan

        options = EvaluationOptions(sequence_length, max_tokens, device, dtype)
        return evaluate_plan(self.data, text, model, options)

"""`Plan`, which users hold: made or loaded, explained, run and evaluated; and `Fleet`, the plans of
pipelines that share the rows of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from actors.recovery.policy import OnEvent
from llmpq.jobs.python_rows import RowsInput, rows_of
from llmpq.keywords import EvaluationKeywords, RunKeywords, lists_options
from llmpq.quality.calibration import with_calibrated
from llmpq.quality.options import AUTO, KEPT_OPTIONS, EvaluationOptions
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.text_windows import Document
from llmpq.report.answers import what_is_planned
from llmpq.report.formatting import per_second, plural, seconds
from llmpq.report.latency import latencies, rates
from llmpq.report.notebook import bits_text, fleet_html, plan_html
from llmpq.report.page import report_page
from llmpq.report.quality import quality_word
from llmpq.report.rendering import making, write_page
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling import SamplingInput
from llmpq.run.checkpoint import check_fleet
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions
from llmpq.run.run import Run
from llmpq.run.session import Results, Session
from planner.costs.model import CostModel
from planner.explanation.explain import Explanation, StageLimits, explain, stage_limits
from planner.explanation.planned_assignment import planned_assignment, rebuilt_costs
from planner.explanation.what_if import WhatIfOptions
from planner.fleet.fleet_spec import FleetSpec, Runnable, plans_of
from planner.latency_bound.bounded_plan import KindFronts
from planner.option_rules import refuse_unknown
from planner.plan.file import is_fleet, read
from planner.plan.parts import Prediction, QualityForecast
from planner.plan.simulate import simulated_cycles
from planner.plan.spec import PlannedModel, PlanSpec, SolverRecord, StagePlan
from planner.search.find import FrontPoint
from planner.simulation.pictures import write_chrome_trace, write_gantt
from planner.simulation.simulation import Simulated
from planner.workload import MicroBatches, Workload
from quant.common.errors import LlmpqError, SpecError
from quant.common.json_text import loads

if TYPE_CHECKING:
    from typing import Unpack

SHOWN_STAGES = 4
"""Stages that are named where a plan is shown in a few lines."""


class Runs:
    """What a plan and a fleet have in common: `spec`, which is in the file `source`, is run."""

    def __init__(self, spec: Runnable, source: str) -> None:
        self.spec: Runnable = spec
        self._source = source

    def save(self, path: str | Path) -> None:
        self.spec.save(path)

    @lists_options(RunKeywords, RunOptions)
    def run(
        self,
        rows: RowsInput,
        sampling: SamplingInput = None,
        *,
        on_event: OnEvent | None = None,
        **options: Unpack[RunKeywords],
    ) -> Results:
        """Generate for every row; yields results in the order they finish.

        `rows`: strings, lists of token ids, or dictionaries as in a JSONL line, from any iterable,
        which is read as slots become free; or a table of pandas, polars or Arrow. What is returned
        can be iterated, with `async for` too; as a context manager it frees the actors however it
        is left. `sampling` and the other `options` are the fields of
        `llmpq.run.options.RunOptions`, which have the names of `llmpq run`'s; its `temperature`,
        `top_p` and so on can be given in place of `sampling`. `on_event` is called with every
        fault. The results' `sampling` is what holds for rows without their own.

        Before anything is started, raises what `llmpq.errors` lists under `LlmpqError`; while it
        runs, `StageLostError` and `HeadLostError` of the same module.
        """
        chosen = RunOptions.of({"sampling": sampling, **options})
        return self._results(rows_of(rows), chosen, on_event)

    @lists_options(RunKeywords, RunOptions)
    def session(
        self,
        sampling: SamplingInput = None,
        *,
        on_event: OnEvent | None = None,
        **options: Unpack[RunKeywords],
    ) -> Session:
        """Ray, the loaded stages and the tokenizer, kept for any number of runs.

            with plan.session() as session:
                for result in session.run(["Once upon a time"], temperature=0.7):
                    print(result.text)

        Takes the options of `run`; `Session.run` takes rows, and other sampling for them. Raises
        what `run` raises.
        """
        chosen = self._calibrated(RunOptions.of({"sampling": sampling, **options}))
        return Session(self.spec, chosen, self._source, on_event)

    def _results(
        self, rows: Iterable[Row | BadRow], options: RunOptions, on_event: OnEvent | None
    ) -> Results:
        shared = RunResources(self.spec, self._calibrated(options), self._source)
        return Results(Run(shared, on_event=on_event), rows)

    def _calibrated(self, options: RunOptions) -> RunOptions:
        check_fleet(self.spec, options, self._source)
        return with_calibrated(plans_of(self.spec)[0], options)


class Plan(Runs):
    """What runs where, with how many bits; made by `Cluster.plan` or `load`. `spec` is its file."""

    def __init__(
        self, spec: PlanSpec, costs: CostModel | None = None, source: str = "the plan"
    ) -> None:
        super().__init__(spec, source)
        self.spec: PlanSpec = spec
        self._costs = costs

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises `SpecError` naming file and field."""
        return cls(PlanSpec.load(path), source=str(path))

    def __repr__(self) -> str:
        spec, predicted = self.spec, self.predicted
        shown = self.stages[:SHOWN_STAGES]
        stages = ", ".join(f"{bits_text(stage)} bit on {stage.label}" for stage in shown)
        if len(self.stages) > len(shown):
            stages += f", and {len(self.stages) - len(shown)} more stages"
        figures = f"{seconds(predicted.latency_s)}, {per_second(predicted.tokens_per_s)} tokens/s"
        if spec.latency is not None:
            figures = f"{rates(spec.latency)}; {latencies(spec.latency)}"
        return (
            f"<Plan of {spec.model.name} on {spec.cluster}: {what_is_planned(spec)};\n"
            f" predicted {figures};\n quality {quality_word(spec).word};\n {stages}>"
        )

    def _repr_html_(self) -> str:
        simulated: Simulated | str = ""
        try:
            if self.spec.latency is None:
                simulated = planned_assignment(self.spec, self.costs).simulate()
        except LlmpqError as error:
            simulated = str(error)
        return plan_html(self.spec, simulated)

    @cached_property
    def costs(self) -> CostModel:
        """The cost model that the plan was made with; that of a loaded plan is built again.

        Raises `SpecError` where a file that the plan was made from is gone or has changed, and for
        a plan under a bound on the latency of requests, whose stages follow a schedule.
        """
        if self.spec.latency is not None:
            raise SpecError(
                "what a change to a layer would bring is told of plans for a batch or a job, not "
                "under a bound on the latency of requests; plan.report has the rest"
            )
        return rebuilt_costs(self.spec) if self._costs is None else self._costs

    @cached_property
    def explanation(self) -> Explanation:
        """Why the plan is as it is; takes seconds. Raises as `costs`."""
        return self.explain()

    def explain(self, options: WhatIfOptions | None = None) -> Explanation:
        """Why the plan is as it is, and the answers to what `options` ask. Raises as `costs`."""
        return explain(self.spec, self.costs, options)

    def report(
        self,
        path: str | Path,
        front: Sequence[FrontPoint] | KindFronts = (),
        command: Sequence[str] = (),
    ) -> None:
        """Write the plan and its explanation as one HTML page.

        Where the costs of a loaded plan cannot be computed again, the page has no reasons and says
        why. `front`: what `Cluster.pareto` or `Cluster.latency_front` gave, to be drawn too.
        `command`: what made the plan, to
        be shown; by default one that makes it again. Raises `InputError` where it cannot be
        written.
        """
        reasons: Explanation | LlmpqError | None = None
        try:
            if self.spec.latency is None:
                reasons = self.explanation
        except LlmpqError as error:
            reasons = error
        page = report_page(self.spec, reasons, front, making(self.spec, command))
        write_page(Path(path), page)

    @property
    def limits(self) -> tuple[StageLimits, ...]:
        """The limits of each stage, none under a bound on latency. Raises what `costs` raises."""
        if self.spec.latency is not None:
            return ()
        return stage_limits(planned_assignment(self.spec, self.costs))

    def trace(self, path: str | Path) -> None:
        """Write the simulated batch, the first fills of a job's slots, or some cycles of a schedule
        under a bound on latency: an `.svg` Gantt picture, else JSON for Perfetto or Chrome.

        Raises `SpecError` where it cannot be written, and as `costs`.
        """
        if self.spec.latency is None:
            simulated = planned_assignment(self.spec, self.costs).simulate()
            labels = tuple(stage.label for stage in self.stages)
        else:
            simulated, labels = simulated_cycles(self.spec)
        if Path(path).suffix == ".svg":
            write_gantt(path, simulated, labels)
        else:
            write_chrome_trace(path, simulated, labels)

    @property
    def model(self) -> PlannedModel:
        return self.spec.model

    @property
    def workload(self) -> Workload:
        return self.spec.workload

    @property
    def micro_batches(self) -> MicroBatches:
        return self.spec.micro_batches

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return self.spec.stages

    @property
    def predicted(self) -> Prediction:
        return self.spec.predicted

    @property
    def quality(self) -> QualityForecast | None:
        """What the bits are expected to cost; None for files of earlier versions."""
        return self.spec.quality

    @property
    def solver(self) -> SolverRecord:
        return self.spec.solver

    @lists_options(EvaluationKeywords, EvaluationOptions)
    def evaluate(
        self,
        text: Document | Iterable[Document],
        model: str | None = None,
        sequence_length: int | None = None,
        max_tokens: int | None = None,
        device: str = AUTO,
        dtype: str = AUTO,
        **kept: Unpack[EvaluationKeywords],
    ) -> Perplexity:
        """Perplexity of the planned model on `text`: a string, its token ids, or several of either.

        Computed here, layer by layer, with each layer's bits and the kernels of its device; where
        those do not run here, plain products with their rounded weights stand for them
        (`Perplexity.represented`). Windows of `sequence_length` tokens (512, or as many as the
        model has positions) do not overlap; `max_tokens` cuts the text. `device`: auto, cpu or
        cuda; `dtype`: auto (each stage's own), or a type for all. `kept`: `importance`,
        `cache_dir` and `adapter`, as of a run, so that weights are those of its stages. Raises
        `CheckpointError`, `PlanMismatchError`, `SpecError` and `InputError` of `llmpq.errors`.
        """
        from llmpq.quality.subjects import evaluate_plan

        refuse_unknown(kept, KEPT_OPTIONS, "option of an evaluation")
        options = EvaluationOptions(sequence_length, max_tokens, device, dtype, **kept)
        return evaluate_plan(self.spec, text, model, options)


class Fleet(Runs):
    """Pipelines of unequal make-up that share the rows of one job, each on whichever has a free
    slot. `spec` has everything that is in its file.

    Runs take the options of a plan's but `trace`, and `replan` "auto", which raise `SpecError`. A
    pipeline that is lost gives its rows to the others, and is started again in the background;
    `on_event` is told of it, with kind "replica". `StageLostError` is raised when all are lost.
    """

    def __init__(self, spec: FleetSpec, source: str = "the fleet") -> None:
        super().__init__(spec, source)
        self.spec: FleetSpec = spec

    @classmethod
    def load(cls, path: str | Path) -> Fleet:
        """Read a fleet's file; raises `SpecError` naming file and field."""
        return cls(FleetSpec.load(path), str(path))

    @property
    def model(self) -> PlannedModel:
        return self.spec.replicas[0].model

    @property
    def plans(self) -> tuple[Plan, ...]:
        where = f"{self._source}: field replicas"
        return tuple(Plan(plan, source=f"{where}.{i}") for i, plan in enumerate(self.spec.replicas))

    def __repr__(self) -> str:
        spec = self.spec
        kinds = ", ".join(f"{len(plans)} of {kind}" for kind, plans in spec.make_ups().items())
        return (
            f"<Fleet of {self.model.name} on {spec.cluster}: "
            f"{plural(len(spec.replicas), 'pipeline')} ({kinds});\n"
            f" {spec.in_flight} prompts in flight, predicted {seconds(spec.latency_s)}, "
            f"{per_second(spec.tokens_per_s)} tokens/s>"
        )

    def _repr_html_(self) -> str:
        return fleet_html(self.spec)


def load_plan(path: str | Path) -> Plan | Fleet:
    """Read the file of a plan or of a fleet; raises `SpecError` naming file and field."""
    try:
        content = loads(read(path))
    except ValueError:  # said with its place by the reader of plans
        return Plan.load(path)
    return Fleet.load(path) if is_fleet(content) else Plan.load(path)

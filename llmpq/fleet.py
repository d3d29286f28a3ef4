"""`Fleet`, which users hold: the plans of pipelines that share the rows of a job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.recovery.policy import OnEvent
from llmpq.jobs.python_rows import RowsInput, rows_of
from llmpq.keywords import RunKeywords, lists_options
from llmpq.plan import Plan
from llmpq.quality.calibration import with_calibrated
from llmpq.report.formatting import per_second, plural, seconds
from llmpq.report.notebook import fleet_html
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling import SamplingInput
from llmpq.run.checkpoint import check_fleet
from llmpq.run.options import RunOptions
from llmpq.run.session import Results, Session
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.file import is_fleet, read
from planner.plan.spec import PlannedModel

if TYPE_CHECKING:
    from typing import Unpack


class Fleet:
    """Pipelines of unequal make-up that share the rows of one job. `spec` has everything that is in
    its file.
    """

    def __init__(self, spec: FleetSpec, source: str = "the fleet") -> None:
        self.spec = spec
        self._source = source

    @classmethod
    def load(cls, path: str | Path) -> Fleet:
        """Read a fleet's file; raises `SpecError` naming file and field."""
        return cls(FleetSpec.from_json(read(path), str(path)), str(path))

    def save(self, path: str | Path) -> None:
        """Write the fleet as JSON."""
        self.spec.save(path)

    @property
    def model(self) -> PlannedModel:
        """The planned model."""
        return self.spec.replicas[0].model

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each pipeline."""
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

    @lists_options(RunKeywords, RunOptions)
    def run(
        self,
        rows: RowsInput,
        sampling: SamplingInput = None,
        *,
        on_event: OnEvent | None = None,
        **options: Unpack[RunKeywords],
    ) -> Results:
        """Generate for every row on whichever pipeline has a free slot, as `Plan.run` does on one.

        Takes its options but `trace`, and `replan` "auto", which raise `SpecError`. A pipeline that
        is lost gives its rows to the others, and is started again in the background; `on_event` is
        told of it, with kind "replica". `StageLostError` is raised when all are lost.
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
        """Ray, the loaded pipelines and the tokenizer, kept for any number of runs, as
        `Plan.session`. Takes the options of `run`, and raises what it raises.
        """
        chosen = self._calibrated(RunOptions.of({"sampling": sampling, **options}))
        return Session(self.spec, chosen, self._source, on_event)

    @lists_options(RunKeywords, RunOptions)
    def run_dataset(
        self,
        dataset: Any,
        sampling: SamplingInput = None,
        *,
        on_event: OnEvent | None = None,
        **options: Unpack[RunKeywords],
    ) -> Any:
        """Generate for every row of a `ray.data.Dataset`, as `Plan.run_dataset`; takes the options
        of `run`.
        """
        from llmpq.jobs.python_rows import dataset_of, rows_in

        chosen = RunOptions.of({"sampling": sampling, **options})
        with self._results(rows_in(dataset), chosen, on_event) as results:
            return dataset_of(results)

    def _results(
        self, rows: Iterable[Row | BadRow], options: RunOptions, on_event: OnEvent | None
    ) -> Results:
        from llmpq.run.engine import RunResources
        from llmpq.run.run import Run

        chosen = self._calibrated(options)
        return Results(Run(RunResources(self.spec, chosen, self._source), on_event=on_event), rows)

    def _calibrated(self, options: RunOptions) -> RunOptions:
        check_fleet(self.spec, options, self._source)
        return with_calibrated(self.spec.replicas[0], options)


def load_plan(path: str | Path) -> Plan | Fleet:
    """Read the file of a plan or of a fleet; raises `SpecError` naming file and field."""
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError):  # said with its place by the reader of plans
        return Plan.load(path)
    return Fleet.load(path) if is_fleet(content) else Plan.load(path)

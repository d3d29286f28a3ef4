"""`Cluster`, which users hold: read or detect one, and plan for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.keywords import PlanKeywords, lists_options
from llmpq.model_check import checked_shape
from llmpq.plan import Fleet, Plan
from llmpq.profile.first_use import with_own_times
from llmpq.workload import LEAVE
from llmpq.workload.input_job import InputJob, LongRows
from llmpq.workload.long_rows import naming
from llmpq.workload.request_lengths import Requests, bound_request, bounded_plan, requests_of
from planner.cluster.spec import ClusterSpec
from planner.fleet.planning import FleetRequest, as_job, find_fleet, number_of
from planner.latency_bound.bounded_plan import KindFronts, kind_fronts
from planner.lengths import RequestLengths
from planner.option_rules import refuse_ignored
from planner.options import AUTO, UNBOUNDED, PlanOptions
from planner.plan.spec import PlanSpec
from planner.planning_rules import FRONT_RULES
from planner.search.find import FrontPoint, find_plan, trace_front
from planner.search.request import with_heads
from planner.workload import Job, Workload
from quant.common.errors import InfeasibleError, SpecError

if TYPE_CHECKING:
    from typing import Unpack


class Cluster:
    """Devices, their nodes and the network between them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Read a cluster file; raises `SpecError` naming file, key and the nearest known key.

        Warns where a name, such as V100, fits several accelerators (`spec.notes`).
        """
        return cls(_warned(ClusterSpec.from_yaml(Path(path))))

    @classmethod
    def from_counts(cls, device_names: Sequence[str], device_numbers: Sequence[int]) -> Cluster:
        """A cluster with one node per device type, as the paper's command line describes it."""
        return cls(_warned(ClusterSpec.from_counts(device_names, device_numbers)))

    @classmethod
    def detect(cls, address: str | None = None) -> Cluster:
        """The GPUs of a running Ray cluster (`address` or RAY_ADDRESS), else those of this machine.

        A machine without a GPU becomes one CPU device. Raises `DeviceError` when `address` does not
        answer.
        """
        from llmpq.detect import detect_cluster

        return cls(_warned(detect_cluster(address)))

    def __repr__(self) -> str:
        counts = Counter(device.accelerator.name for device in self.spec.devices)
        named = ", ".join(f"{count} × {name}" for name, count in counts.items())
        return f"<Cluster {self.spec.name}: {named}>"

    def _repr_html_(self) -> str:
        from llmpq.report.notebook import cluster_html

        return cluster_html(self.spec)

    def to_yaml(self) -> str:
        """The cluster as the text of a cluster file."""
        return self.spec.to_yaml()

    @lists_options(PlanKeywords, PlanOptions)
    def plan(
        self,
        model: str | Path,
        workload: Workload | Job | InputJob | RequestLengths | Requests,
        **options: Unpack[PlanKeywords],
    ) -> Plan:
        """The best plan for `model` (folder, config.json, built-in name or hub id) and `workload`:
        one batch, a job of many prompts, or that of files (`job_of_input`). With
        `max_request_latency_s` the plan and the schedule of the most requests per second of which a
        share `quantile` is done within so many seconds (math.inf: any), for the lengths of
        `request_lengths`, of files or of a job.

        `options` are the fields of `PlanOptions`: `quality`, `in_flight`, `theta`, `bits`, `dtype`,
        `objective`, `method`, `solver`, `group`, … `policy` is `auto` of a job of unlike lengths,
        unless one or what only `static` has is given. Raises `SpecError` for what cannot be planned
        as asked and `InfeasibleError` when it does not fit.
        """
        shape = checked_shape(model)
        if isinstance(workload, Workload | Job):
            with_heads(workload, PlanOptions.of(options))  # refused before anything is measured
        chosen = self._options(model, options)
        if chosen.bounds_requests:
            return Plan(bounded_plan(self.spec, shape, str(model), requests_of(workload), chosen))
        if isinstance(workload, RequestLengths | Requests):
            raise SpecError(
                "lengths of requests are planned for under a bound on their latency; give "
                "max_request_latency_s (math.inf: any), or a Job"
            )
        ordinary = workload.ordinary if isinstance(workload, InputJob) else workload
        if isinstance(ordinary, Job):
            chosen = chosen.of_job(ordinary.lengths, options)
        with naming(workload.longest if isinstance(workload, InputJob) else None):
            found = find_plan(self.spec, shape, str(model), ordinary, chosen)
        plan = found.plan
        if isinstance(workload, InputJob) and workload.long_rows is not None:
            same = chosen.under(plan.policy.name)
            plan = replace(plan, long_rows=self._long_plan(model, workload.long_rows, same))
        return Plan(plan, found.costs)

    @lists_options(PlanKeywords, PlanOptions)
    def latency_front(
        self,
        model: str | Path,
        workload: Job | InputJob | RequestLengths | Requests,
        **options: Unpack[PlanKeywords],
    ) -> KindFronts:
        """Requests per second over bounds on their latency, for every kind of schedule; workload,
        options and errors as in `plan` with `max_request_latency_s`.
        """
        chosen = self._options(model, {"max_request_latency_s": UNBOUNDED, **options})
        request = bound_request(requests_of(workload), chosen)
        return kind_fronts(self.spec, checked_shape(model), request, chosen)

    @lists_options(PlanKeywords, PlanOptions)
    def fleet(
        self,
        model: str | Path,
        workload: Workload | Job | InputJob,
        replicas: int | str = AUTO,
        **options: Unpack[PlanKeywords],
    ) -> Fleet:
        """The pipelines that together finish `workload` soonest: `replicas` of them, or `auto` for
        as many as are best.

        `options` and errors as in `plan`; those of one pipeline are refused. A batch is a job of so
        many prompts here.
        """
        shape, chosen = checked_shape(model), self._options(model, options)
        if isinstance(workload, InputJob) and workload.long_rows is not None:
            raise SpecError(
                f"{workload.long_rows.rows.are} much longer than the others "
                f"({workload.long_rows.rows.shown}), and pipelines that share rows have room for "
                f"the same ones; leave them out (--long_rows {LEAVE}), so that they become error "
                "rows of the run"
            )
        ordinary = workload.ordinary if isinstance(workload, InputJob) else workload
        with naming(workload.longest if isinstance(workload, InputJob) else None):
            request = FleetRequest(
                self.spec, shape, str(model), as_job(ordinary), chosen, number_of(replicas)
            )
            return Fleet(find_fleet(request))

    def _options(self, model: str | Path, given: Mapping[str, Any]) -> PlanOptions:
        """The options, with times of this machine's CPU where they name no others."""
        return with_own_times(self.spec, model, PlanOptions.of(given))

    def _long_plan(self, model: str | Path, long: LongRows, chosen: PlanOptions) -> PlanSpec:
        """The plan of long rows; sizes that were fixed for the others are open again."""
        chosen = replace(chosen, in_flight=AUTO, prefill_micro_batch=None, decode_micro_batch=None)
        try:
            return find_plan(self.spec, checked_shape(model), str(model), long.job, chosen).plan
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{long.rows.are} much longer than the others ({long.rows.shown}), and there is no "
                f"plan for them: {error}; or leave them out (--long_rows {LEAVE}), so that they "
                "become error rows of the run"
            ) from error

    @lists_options(PlanKeywords, PlanOptions)
    def pareto(
        self,
        model: str | Path,
        workload: Workload | Job | InputJob,
        most_points: int = 12,
        **options: Unpack[PlanKeywords],
    ) -> tuple[FrontPoint, ...]:
        """The front of latency against quality, fastest first; options and errors as in `plan`.

        It has the plans of all thetas, so `theta`, `quality` and bounds are refused. Of a job with
        long rows it is the front of the others.
        """
        refuse_ignored({"pareto": True, **options}, FRONT_RULES)
        shape, chosen = checked_shape(model), self._options(model, options)
        ordinary = workload.ordinary if isinstance(workload, InputJob) else workload
        return trace_front(self.spec, shape, ordinary, chosen, most_points)


def _warned(spec: ClusterSpec) -> ClusterSpec:
    """Warn of the cluster's notes and return it."""
    for note in spec.notes:
        warnings.warn(note, stacklevel=3)
    return spec

"""`Cluster`, which users hold: read or detect one, and plan for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from llmpq.model_check import checked_shape
from llmpq.plan import Plan
from planner.cluster.spec import ClusterSpec
from planner.option_rules import refuse_ignored
from planner.options import FRONT_RULES, PlanOptions
from planner.search.front import FrontPoint, trace_front
from planner.search.search import find_priced_plan
from planner.workload import Workload


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

    def to_yaml(self) -> str:
        """The cluster as the text of a cluster file."""
        return self.spec.to_yaml()

    def plan(self, model: str | Path, workload: Workload, **options: object) -> Plan:
        """The best plan for `model` (folder, config.json, built-in name or hub id) and `workload`.

        `options` are the fields of `PlanOptions`: `theta`, `bits`, `dtype`, `objective`, `method`,
        `solver`, `group`, … Raises `SpecError` for what cannot be planned as asked and
        `InfeasibleError` when it does not fit.
        """
        shape, chosen = checked_shape(model), PlanOptions.of(options)
        found = find_priced_plan(self.spec, shape, str(model), workload, chosen)
        return Plan(found.plan, found.costs)

    def pareto(
        self, model: str | Path, workload: Workload, most_points: int = 12, **options: object
    ) -> tuple[FrontPoint, ...]:
        """The front of latency against quality, fastest first; options and errors as in `plan`.

        It has the plans of all thetas, so `theta` and bounds are refused.
        """
        refuse_ignored({"pareto": True, **options}, FRONT_RULES)
        chosen = PlanOptions.of(options)
        return trace_front(self.spec, checked_shape(model), workload, chosen, most_points)


def _warned(spec: ClusterSpec) -> ClusterSpec:
    """Warn of the cluster's notes and return it."""
    for note in spec.notes:
        warnings.warn(note, stacklevel=3)
    return spec

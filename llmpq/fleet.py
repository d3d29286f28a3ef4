"""`Fleet`, which users hold: pipelines that share the rows of a job."""

from __future__ import annotations

from pathlib import Path

from llmpq.report.formatting import per_second, plain
from planner.fleet.spec import FleetSpec
from planner.plan.spec import PlanSpec


class Fleet:
    """Pipelines of unequal make-up that share a job; made by `Cluster.fleet` or `load`. `spec` has
    everything that is in its file.
    """

    def __init__(self, spec: FleetSpec, source: str = "the fleet") -> None:
        self.spec = spec
        self._source = source

    @classmethod
    def load(cls, path: str | Path) -> Fleet:
        """Read a fleet file; raises `SpecError` naming file and field."""
        return cls(FleetSpec.load(path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the fleet as JSON; an existing file is replaced whole or not at all."""
        self.spec.save(path)

    @property
    def replicas(self) -> tuple[PlanSpec, ...]:
        """The plans of the pipelines."""
        return self.spec.replicas

    def __repr__(self) -> str:
        made = ", ".join(f"{len(plans)} of {name}" for name, plans in self.spec.make_ups().items())
        speed = per_second(self.spec.tokens_per_s)
        return plain(f"<Fleet {self.spec.replicas[0].model.name}: {made}; {speed} tokens/s>")

"""The baselines of LLM-PQ section 6.1, those of `llmpq plan --compare`, on measured layer times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import Baseline
from planner.profiles.fit import FittedLatency
from planner.profiles.rows import read_profiles
from planner.quality.sensitivity import default_sensitivity
from planner.search.baselines.comparison import baseline, offloading
from planner.workload import Workload


@dataclass(frozen=True)
class Setting:
    """A model on a cluster; `profiles` is a CSV of layer times, `bits` ascending."""

    cluster: ClusterSpec
    model: str
    workload: Workload
    profiles: Path
    bits: tuple[int, ...]

    def baseline(self, name: str) -> Baseline:
        """The baseline of this name (`planner.search.baselines`)."""
        return baseline(self._costs(), name)

    def streamed_bytes(self, name: str) -> float:
        """Bytes that the fullest GPU streams in a round of this offloading baseline."""
        return float(offloading(self._costs(), name).host_bytes.max())

    def at_bitwidth(self, bits: int) -> Setting:
        """The setting with one bitwidth to choose from."""
        return replace(self, bits=(bits,))

    def _costs(self) -> CostModel:
        shape = model_shape(self.model)
        latency = FittedLatency(read_profiles(self.profiles), RooflineLatency(shape))
        options = PlanOptions(dtype="float16", bits=self.bits, memory_margin=0.0)
        sensitivity = default_sensitivity(shape, options.bits)
        return CostModel(self.cluster, shape, self.workload, options, latency, sensitivity)

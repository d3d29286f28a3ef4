"""The figures of a simulated batch or job that a plan states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import FloatArray
from planner.simulation.job_simulation import MOST_PASSES, SimulatedJob, simulate_job_assignment
from planner.simulation.simulation import Simulated, simulate_assignment


@dataclass(frozen=True, eq=False)
class Forecast:
    """Seconds of a batch or of a whole job, and its new tokens per second.

    `prefill_s`: until every request of a batch has its first token; of a job, in which prefills
    come all along, and under a policy that mixes the phases the share of the busiest stage's work
    that is prefill. `busy_s`: seconds in which each stage computes in prefill [N] and in decode
    [N]; `busy_share` [N] is of `seconds`.
    """

    seconds: float
    prefill_s: float
    tokens_per_s: float
    busy_s: tuple[FloatArray, FloatArray]
    busy_share: tuple[float, ...]

    @classmethod
    def of_batch(cls, batch: Simulated) -> Forecast:
        """The figures of a batch."""
        busy_s = batch.busy_s("prefill"), batch.busy_s("decode")
        rate = batch.tokens_per_s
        return cls(batch.latency_s, batch.prefill_s, rate, busy_s, batch.busy_share)

    @classmethod
    def of_job(cls, job: SimulatedJob) -> Forecast:
        """The figures of a job."""
        prefill_s, decode_s = job.prefill_busy_s, job.decode_busy_s
        busiest = int((prefill_s + decode_s).argmax())
        share = float(prefill_s[busiest] / (prefill_s[busiest] + decode_s[busiest]))
        rate, both = job.tokens_per_s, (prefill_s, decode_s)
        return cls(job.seconds, share * job.seconds, rate, both, job.busy_share)


def forecast_assignment(
    costs: CostModel,
    devices: Sequence[Device],
    sizes: MicroBatches,
    first_layer: Sequence[int],
    bitwidth: Sequence[int],
    *,
    most_passes: int = MOST_PASSES,
) -> Forecast:
    """Simulate the batch or the job of `costs`; assignments as in `simulate_assignment`,
    `most_passes` as in `simulate_job_assignment`.
    """
    placed = costs, devices, sizes, first_layer, bitwidth
    if costs.job is None and costs.options.policy == "static":
        return Forecast.of_batch(simulate_assignment(*placed))
    return Forecast.of_job(simulate_job_assignment(*placed, most_passes=most_passes))

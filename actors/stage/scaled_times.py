"""The modelled times that an emulated stage is held to, as drivers know them: without torch."""

from __future__ import annotations

from dataclasses import dataclass

from actors.messages import MicroBatch
from planner.costs.communication import HostCopies
from planner.plan.kv_copies import host_copies
from planner.plan.modelled_times import ModelledTimes
from planner.plan.spec import PlanSpec, StagePlan


@dataclass(frozen=True)
class ScaledTimes:
    """A stage's modelled `times`, of which every second takes `scale` seconds. `copies`: those of
    its keys and values to host memory and back (None: they take no time).
    """

    times: ModelledTimes
    scale: float
    copies: HostCopies | None = None

    def compute_s(self, batch: MicroBatch) -> float:
        computing_s = self.times.pass_s(batch.starts, batch.counts)
        if self.copies is None:
            return self.scale * computing_s
        copied = (*batch.parks, *batch.restores, *batch.keeps)
        copying_s = sum(self.copies.one_way_s(each.tokens) for each in copied)
        return self.scale * (computing_s + copying_s)

    def transfer_s(self, batch: MicroBatch) -> float:
        tokens, answers = int(batch.counts.sum()), len(batch.sampled_rows)
        return self.scale * self.times.transfer_s(tokens, answers)


def emulated_times(plan: PlanSpec, stage: StagePlan) -> ScaledTimes | None:
    """The times that `stage` is held to; None where its device is real or takes no modelled time.

    Plans without tabulated times have constant ones, those of full micro-batches.
    """
    if not (stage.emulated and plan.time_scale):
        return None
    times = stage.modelled or ModelledTimes.constant(stage.prefill_s, stage.decode_s)
    return ScaledTimes(times, plan.time_scale, host_copies(plan)[stage.index])

"""Passes of a job under a schedule that repeats: turns of newcomers, and decode steps between them.

It is the schedule of the policy `exegpt` in its steady state (ExeGPT section 4.1), in which as many
requests end as come.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from planner.micro_batches import MicroBatches
from planner.optimiser.problem import JobPasses

LATENCY_SHARE = 0.1
"""Share of the turns for which the way through all stages counts where they only prefill."""


@dataclass(frozen=True)
class SteadyCycle:
    """A cycle of `prefill_requests` (B_E) newcomers and `decode_steps` (N_D) steps of every group
    (B_m; None: by size), again until all `prompts` are done. Stages that only prefill have no
    steps; those that only decode have newcomers that others prefill: `prefills` is false.
    """

    prefill_requests: int
    decode_steps: int
    in_flight: int
    prompts: int
    mean_steps: float
    groups: int | None = None
    prefills: bool = True

    def passes(self, sizes: MicroBatches) -> JobPasses:
        """The passes of the job; groups take turns one after the other, so the pipeline fills once
        a cycle. Where stages only prefill it never runs empty.
        """
        cycles = self.prompts / self.prefill_requests
        groups = self.groups or ceil(self.in_flight / sizes.decode)
        turns = min(groups, self.prefill_requests) if self.decode_steps else 1
        newcomers = self.prefill_requests / turns
        prefills = turns * ceil(newcomers / sizes.prefill)
        steps = self.decode_steps * groups
        decoding = self.prefill_requests * self.mean_steps / steps if steps else 0.0
        return JobPasses(
            prefills=cycles * prefills * self.prefills,
            bursts=cycles * self.prefills * (1.0 if self.decode_steps else LATENCY_SHARE),
            decode_steps=cycles * steps,
            rounds=cycles * self.decode_steps,
            prefill_requests=self.prefill_requests / prefills,
            decode_requests=max(1.0, decoding),
        )

"""The offloading baseline of LLM-PQ section 6.1, FlexGen with an even partition, as an estimate.

Every stage holds the same number of layers at one bitwidth. The weights and KV cache that do not
fit the device lie in host memory and are streamed in once for all micro-batches of a round
(FlexGen's block schedule), while they are computed: a round takes the longer of the two. Disk is
not used: host memory must hold the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.heuristics.uniform import even_sizes
from planner.optimiser.latency import latency_form
from planner.optimiser.problem import AssignmentProblem, FloatArray
from quant.common.errors import InfeasibleError, SpecError
from quant.common.units import GIB


@dataclass(frozen=True, eq=False)
class OffloadingEstimate:
    """Seconds of one batch, the bitwidth, and the bytes [N] that each stage keeps on its host."""

    latency_s: float
    bits: int
    host_bytes: FloatArray


def estimate_offloading(
    problem: AssignmentProblem,
    bits: int,
    host_link_bytes_per_s: Sequence[float],
    host_memory_bytes: Sequence[float],
) -> OffloadingEstimate:
    """Estimate a batch with offloading; rates [N] in one direction, memory [N] of each stage.

    A device whose own parts do not fit offloads the shortfall too. Raises SpecError for a bitwidth
    that is not the problem's, InfeasibleError where a device cannot run it or host memory is short.
    """
    if bits not in problem.bitwidths:
        raise SpecError(f"{bits} bit is none of {', '.join(map(str, problem.bitwidths))}")
    choice = problem.bitwidths.index(bits)
    if not problem.available[:, choice].all():
        stage = int(np.flatnonzero(~problem.available[:, choice])[0])
        raise InfeasibleError(f"stage {stage} cannot run {bits} bit; estimate another bitwidth")
    sizes = even_sizes(problem.layers, problem.stages)
    host = np.maximum(sizes * problem.layer_bytes[:, choice] - problem.memory_bytes, 0.0)
    short = host - np.asarray(host_memory_bytes, dtype=np.float64)
    if (short > 0).any():
        stage = int(short.argmax())
        raise InfeasibleError(
            f"stage {stage} offloads {host[stage] / GIB:.2f} GiB, {short[stage] / GIB:.2f} GiB "
            "more than its host memory; use fewer bits or more host memory"
        )
    streamed_s = host / np.asarray(host_link_bytes_per_s, dtype=np.float64)
    prefill = problem.fixed_prefill_s + sizes * problem.prefill_s[:, choice]
    decode = problem.fixed_decode_s + sizes * problem.decode_s[:, choice]
    prefill = np.maximum(prefill, streamed_s / problem.prefill_micro_batches)
    decode = np.maximum(decode, streamed_s / problem.decode_micro_batches)
    return OffloadingEstimate(latency_form(problem).of_stages(prefill, decode), bits, host)

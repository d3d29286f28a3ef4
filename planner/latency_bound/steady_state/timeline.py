"""The steady state of a schedule: how fast it is, and what each request waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.latency_bound.steady_state.performance import Performance
from planner.length_distribution import FloatArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule in its steady state.

    `performance` has the latency at the quantile asked for, `mean_latency_s` the mean. A turn of
    newcomers begins every `cycle_s` in each group; `decode_requests` (B_D) decode at the beginning
    of a phase of decoding, and `admission_wait_s` is the longest that a request waits for a turn
    where fewer come than are served. `latency_s` [longest output + 1]: mean latency by the tokens
    of an answer.
    """

    performance: Performance
    mean_latency_s: float
    cycle_s: float
    decode_requests: float
    admission_wait_s: float
    latency_s: FloatArray

    def latency_of(self, output_tokens: int) -> float:
        """Mean seconds from when the prefill of a request begins to its last token."""
        return float(self.latency_s[min(output_tokens, len(self.latency_s) - 1)])


def mixed_quantile(
    means: FloatArray, deviations: FloatArray, chances: FloatArray, share: float
) -> float:
    """The value that such a share does not exceed of normal distributions with these means and
    deviations, each of which has its chance.
    """
    from scipy.special import ndtr  # takes a tenth of a second, which commands do not wait for

    spread = np.maximum(deviations, 1e-9 * float(means.max()))
    low, high = float((means - 9 * spread).min()), float((means + 9 * spread).max())
    for _ in range(40):
        middle = (low + high) / 2
        if float(np.dot(chances, ndtr((middle - means) / spread))) < share:
            low = middle
        else:
            high = middle
    return high

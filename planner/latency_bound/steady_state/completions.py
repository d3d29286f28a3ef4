"""Which requests end at which decode step after a prefill, and how many are in flight (ExeGPT
section 6).

Names for the paper's symbols: N_D `decode_steps`, B_E `prefill_requests`, B_D `decode_requests`,
S the decode steps that a request makes in all, U the step since the last prefill with which it
ends. Our prefill gives the first token, so S is one less than the tokens of an answer; requests of
one token end with their prefill, U = 0, which stands for a phase of decoding of its own.

P_D(U) weighs P_D(U|S) with the probability of S. The paper leaves open of which requests: those
that come, or those that are in flight at a time, among which long ones are more frequent as they
stay longer. Both are here. Only with the latter do as many end as come: a request stays for
ceil(S / N_D) phases, so B_E * E[ceil(S / N_D)] are in flight by Little's law, and for N_D = 1 that
is the paper's own B_E * S_D of WAA. With the former B_E / sum P_D(U) is never more, and it is less
wherever some requests stay for more phases than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.length_distribution import FloatArray, LengthDistribution


def phases_of(steps: int, decode_steps: int) -> int:
    """The phases of `decode_steps` steps for which a request of so many steps stays."""
    return max(1, -(-steps // decode_steps))


def completion_chances(steps: int, decode_steps: int) -> FloatArray:
    """P_D(U|S) as published: the chance [decode_steps + 1] that a request of `steps` decode steps
    ends with step U = 0, 1, … of a phase of decoding in which it takes part.
    """
    chances = np.zeros(decode_steps + 1)
    last = 1 + (steps - 1) % decode_steps if steps else 0
    chances[last] = 1 / phases_of(steps, decode_steps)
    return chances


@dataclass(frozen=True)
class Completions:
    """Requests with these `outputs` under phases of `decode_steps` decode steps (N_D)."""

    outputs: LengthDistribution
    decode_steps: int

    @cached_property
    def of_those_that_come(self) -> FloatArray:
        """P_D(U) [decode_steps + 1] with the lengths of requests as they come."""
        return self._weighed(np.array(self.outputs.probabilities))

    @cached_property
    def of_those_in_flight(self) -> FloatArray:
        """P_D(U) [decode_steps + 1] with the lengths of the requests in flight at a time."""
        weights = np.array(self.outputs.probabilities) * self._stays
        return self._weighed(weights / self.phases)

    @cached_property
    def phases(self) -> float:
        """Mean number of phases for which a request stays, E[ceil(S / N_D)]."""
        return float(np.dot(self._stays, self.outputs.probabilities))

    def decode_requests(self, prefill_requests: float) -> float:
        """B_D = B_E / sum P_D(U) of those in flight: how many there are after a turn."""
        return prefill_requests * self.phases

    def printed_decode_requests(self, prefill_requests: float) -> float:
        """B_D = B_E / sum P_D(U) of those that come."""
        return prefill_requests / float(self.of_those_that_come.sum())

    @cached_property
    def decoding(self) -> FloatArray:
        """Requests that make step 1, 2, … of a phase for each that comes, [decode_steps]."""
        return np.asarray(self._by_phase(self._reached).sum(axis=0))

    @cached_property
    def answer_tokens(self) -> FloatArray:
        """Mean tokens of the answers before step 1, 2, … of a phase, beside the one that is fed,
        [decode_steps]; 0 at steps that none makes.
        """
        earlier = np.arange(len(self._reached))
        sums, decoding = self._by_phase(self._reached * earlier).sum(axis=0), self.decoding
        means = np.divide(sums, decoding, out=np.zeros_like(sums), where=decoding > 0)
        return np.asarray(means)

    @cached_property
    def _stays(self) -> FloatArray:
        steps = np.array(self.outputs.lengths, dtype=np.float64) - 1
        return np.maximum(1.0, np.ceil(steps / self.decode_steps))

    @cached_property
    def _reached(self) -> FloatArray:
        """The chance [steps] that a request makes its decode step 1, 2, …; one entry at least."""
        steps = max(1, self.outputs.longest - 1)
        ended = np.zeros(steps + 1)
        ended[np.array(self.outputs.lengths) - 1] = self.outputs.probabilities
        return np.asarray(np.clip(1 - np.cumsum(ended)[:steps], 0.0, None))

    def _by_phase(self, by_step: FloatArray) -> FloatArray:
        """Values of steps 1, 2, … laid out as [phases, decode_steps]."""
        phases = phases_of(len(by_step), self.decode_steps)
        padded = np.zeros(phases * self.decode_steps)
        padded[: len(by_step)] = by_step
        return padded.reshape(phases, self.decode_steps)

    def _weighed(self, weights: FloatArray) -> FloatArray:
        steps = np.array(self.outputs.lengths) - 1
        last = np.where(steps > 0, 1 + (steps - 1) % self.decode_steps, 0)
        counts = np.bincount(last, weights / self._stays, self.decode_steps + 1)
        return counts.astype(np.float64)


def waa_decode_requests(outputs: LengthDistribution, prefill_requests: float) -> float:
    """B_D = B_E * S_D of WAA: a request decodes for as many rounds as it makes decode steps."""
    return prefill_requests * (outputs.mean - 1)

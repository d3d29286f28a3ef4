"""Which requests end at which decode step after a prefill, and how many are in flight (ExeGPT
section 6).

Names for the paper's symbols: N_D `decode_steps`, B_E `prefill_requests`, B_D `decode_requests`,
U the decode step since the last prefill, S the decode steps that a request makes in all. Our
prefill gives the first token, so S is one less than the tokens of an answer, and requests of one
token never decode.

P_D(U) weighs P_D(U|S) with the probability of S. The paper's text leaves open of which requests:
those that come, or those that decode at a time, among which long ones are more frequent as they
stay longer. Both are here. Only with the latter do as many end as come: a request of S steps stays
for ceil(S / N_D) phases of decoding, so B_E * E[ceil(S / N_D)] decode by Little's law, and with
N_D = 1 that is the paper's own B_E * S_D of WAA. With the former B_E / sum P_D(U) is never more,
and less wherever requests stay for different numbers of phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.length_distribution import FloatArray, LengthDistribution


def completion_chances(steps: int, decode_steps: int) -> FloatArray:
    """P_D(U|S) as published: the chance [decode_steps] that a request of `steps` decode steps ends
    with step U = 1, 2, … of a phase of decoding in which it takes part.
    """
    chances = np.zeros(decode_steps)
    if steps > 0:
        chances[(steps - 1) % decode_steps] = 1 / phases_of(steps, decode_steps)
    return chances


def phases_of(steps: int, decode_steps: int) -> int:
    """The phases of `decode_steps` steps for which a request of so many steps stays."""
    return -(-steps // decode_steps)


@dataclass(frozen=True)
class Completions:
    """Requests with these `outputs` under phases of `decode_steps` decode steps (N_D)."""

    outputs: LengthDistribution
    decode_steps: int

    @cached_property
    def phases(self) -> float:
        """Mean number of phases for which a request stays, those of one token counted as 0."""
        return float(self.alive[0])

    @cached_property
    def alive(self) -> FloatArray:
        """Requests that make step U = 1, 2, … of a phase for each that comes, [decode_steps]."""
        return np.asarray(self._by_phase(self._reached).sum(axis=0))

    @cached_property
    def tokens_before(self) -> FloatArray:
        """Mean tokens of its answer that a request at step U has beside the one that is fed,
        [decode_steps]; 0 at steps that none reaches.
        """
        earlier = np.arange(len(self._reached))
        sums = self._by_phase(self._reached * earlier).sum(axis=0)
        return np.asarray(
            np.divide(sums, self.alive, out=np.zeros_like(sums), where=self.alive > 0)
        )

    @cached_property
    def of_those_that_come(self) -> FloatArray:
        """P_D(U) [decode_steps] with the lengths of requests as they come."""
        return self._weighed(np.array(self.outputs.probabilities))

    @cached_property
    def of_those_that_decode(self) -> FloatArray:
        """P_D(U) [decode_steps] with the lengths of the requests that decode at a time."""
        stays = [phases_of(length - 1, self.decode_steps) for length in self.outputs.lengths]
        weights = np.array(self.outputs.probabilities) * stays
        return self._weighed(weights / max(self.phases, np.finfo(float).tiny))

    def decode_requests(self, prefill_requests: float) -> float:
        """B_D = B_E / sum P_D(U) of those that decode, at the first step of a phase."""
        return prefill_requests * self.phases

    def printed_decode_requests(self, prefill_requests: float) -> float:
        """B_D = B_E / sum P_D(U) of those that come, of which those of one token never decode."""
        decoding = 1 - self.outputs.probabilities[0] * (self.outputs.lengths[0] == 1)
        ended = float(self.of_those_that_come.sum())
        return prefill_requests * decoding**2 / ended if ended else 0.0

    @cached_property
    def _reached(self) -> FloatArray:
        """The chance [steps] that a request makes its decode step 1, 2, …; one entry at least."""
        steps = max(1, self.outputs.longest - 1)
        ended = np.zeros(steps + 1)
        np.add.at(ended, np.array(self.outputs.lengths) - 1, self.outputs.probabilities)
        return np.asarray(1 - np.cumsum(ended)[:steps]).clip(0.0)

    def _by_phase(self, by_step: FloatArray) -> FloatArray:
        """Values of steps 1, 2, … laid out as [phases, decode_steps]."""
        phases = phases_of(len(by_step), self.decode_steps)
        padded = np.zeros(phases * self.decode_steps)
        padded[: len(by_step)] = by_step
        return padded.reshape(phases, self.decode_steps)

    def _weighed(self, weights: FloatArray) -> FloatArray:
        chances = np.zeros(self.decode_steps)
        for length, weight in zip(self.outputs.lengths, weights, strict=True):
            if length > 1:
                place = (length - 2) % self.decode_steps
                chances[place] += weight / phases_of(length - 1, self.decode_steps)
        return chances


def waa_decode_requests(outputs: LengthDistribution, prefill_requests: float) -> float:
    """B_D = B_E * S_D of WAA: a request decodes for as many rounds as it makes decode steps."""
    return prefill_requests * (outputs.mean - 1)

"""Seconds of the stages of a pipeline for a pass of any size, quick enough for a search.

A search asks for thousands of sizes and lengths, fractions among them, since sizes are means.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Literal, Protocol

import numpy as np

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.costs.unlike_prompts import lengths_around
from planner.length_distribution import FloatArray
from planner.simulation.simulation import (
    assignment_timing,
    check_assignment,
    link_terms,
    occupied_stages,
)

_Work = Literal["prefill", "decode", "attention"]


class StageTimes(Protocol):
    """Seconds of a pass on each of N stages, and on the links behind them; all results are [N].

    `requests` may be any number from 1. `prompt_tokens` are those of each prompt, and
    `context_tokens` those of each request before the new one. The last link leads back to the first
    stage.
    """

    @property
    def stages(self) -> int:
        """Number of stages, N."""

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Compute seconds of the prompts of a micro-batch."""

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """The part of those seconds that is attention's; the rest is by their tokens together."""

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        """Compute seconds of a decode step."""

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Seconds of the transfers behind the stages for the prompts of a micro-batch."""

    def decode_hop_s(self, requests: float) -> FloatArray:
        """Seconds of the transfers behind the stages for a decode step."""


class PipelineTimes:
    """The times of `costs` for layers on `devices` in stage order; `first_layer` [N+1] and
    `bitwidth` [L], indices into the bitwidths of its options, are by layer. Devices without layers
    are no stages.

    Whole numbers of requests at whole lengths take the seconds of
    `planner.simulation.simulation.AssignmentTiming`; between them, and between lengths a fiftieth
    apart, time is linear. SpecError where the two do not cover the model's layers.
    """

    def __init__(
        self,
        costs: CostModel,
        devices: Sequence[Device],
        first_layer: Sequence[int],
        bitwidth: Sequence[int],
    ) -> None:
        check_assignment(costs, devices, first_layer, bitwidth)
        occupied = occupied_stages(devices, first_layer)
        self._timing = assignment_timing(costs, occupied, bitwidth)
        self._links = np.array(link_terms(costs, occupied.devices))
        self._known: dict[tuple[_Work, int, int], FloatArray] = {}

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return len(self._links)

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Compute seconds of the prompts of a micro-batch [N]."""
        return self._between_requests("prefill", requests, max(prompt_tokens, 1.0))

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """The part of those seconds that is attention's [N]."""
        return self._between_requests("attention", requests, max(prompt_tokens, 1.0))

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        """Compute seconds of a decode step [N]."""
        return self._between_requests("decode", requests, max(context_tokens, 1.0))

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Seconds of the transfers behind the stages for the prompts of a micro-batch [N]."""
        latency_s, per_token_s, per_request_s = self._links.T
        tokens = requests * prompt_tokens
        return np.asarray(latency_s + tokens * per_token_s + requests * per_request_s)

    def decode_hop_s(self, requests: float) -> FloatArray:
        """Seconds of the transfers behind the stages for a decode step [N]."""
        return self.prefill_hop_s(requests, 1.0)

    def _between_requests(self, work: _Work, requests: float, length: float) -> FloatArray:
        requests = max(requests, 1.0)
        low, share = floor(requests), requests - floor(requests)
        seconds = self._between_lengths(work, low, length)
        if share:
            seconds = seconds + share * (self._between_lengths(work, low + 1, length) - seconds)
        return seconds

    def _between_lengths(self, work: _Work, requests: int, length: float) -> FloatArray:
        low, high = lengths_around(length)
        seconds = self._of(work, requests, low)
        if high > low:
            above = self._of(work, requests, high)
            seconds = seconds + (length - low) / (high - low) * (above - seconds)
        return seconds

    def _of(self, work: _Work, requests: int, length: int) -> FloatArray:
        key = work, requests, length
        if key not in self._known:
            if work == "attention":
                self._known[key] = self._timing.prefill_parts(requests, length)[0]
            else:
                self._known[key] = np.array(self._timing.compute_s(work, requests, length))
        return self._known[key]

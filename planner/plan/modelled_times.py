"""The latency model's seconds of a stage for any micro-batch, as plans carry them to emulated
devices: tabulated over requests and length, as kernels need not be linear, and thinned to the
points between which they are; every pass of the planned batch is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from planner.cluster.device import Device
from planner.costs.latency_model import between, together_s
from planner.costs.model import CostModel
from planner.costs.pass_times import link_terms
from planner.optimiser.problem import FloatArray, IntArray
from planner.plan.parts import STRICT, Seconds
from planner.scheduling import Phase
from planner.workload import MicroBatches, Workload

Compute = Callable[[Phase, int, int], Sequence[float]]
"""Seconds of every stage [N] for a phase, a number of requests, and the length of each of them."""

_Count = Annotated[int, Field(ge=0)]

_LINEAR = 1e-12
"""Relative distance from a straight line below which a point is left out: rounding errors."""
_EVERY_UP_TO = 8  # requests and lengths up to here are all tabulated,
_GROWTH = 1.25  # from there on each is longer by this factor, and between them time is linear


@dataclass(frozen=True, config=STRICT)
class LengthCurve:
    requests: Annotated[int, Field(ge=1)]
    lengths: Annotated[tuple[_Count, ...], Field(min_length=1)]
    seconds: Annotated[tuple[Seconds, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        ascending = list(self.lengths) == sorted(set(self.lengths))
        if not ascending or len(self.lengths) != len(self.seconds):
            raise ValueError(
                f"{len(self.seconds)} seconds at lengths {list(self.lengths)[:5]}; give one for "
                "each of ascending lengths"
            )

    def seconds_at(self, lengths: IntArray | FloatArray) -> FloatArray:
        return np.interp(lengths, self.lengths, self.seconds)

    def mean_s(self, lengths: IntArray) -> float:
        """Mean over requests of `lengths`: exact where time is a sum over requests."""
        return float(self.seconds_at(lengths).mean())


Curves = Annotated[tuple[LengthCurve, ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class ModelledTimes:
    """A stage's seconds, by ascending requests: `prefill` over prompt lengths, `decode` over tokens
    before the new one; a result takes `link_latency_s` and more for each token and request.
    """

    prefill: Curves
    decode: Curves
    link_latency_s: Seconds = 0.0
    link_s_per_token: Seconds = 0.0
    link_s_per_request: Seconds = 0.0

    def __post_init__(self) -> None:
        for curves in (self.prefill, self.decode):
            sizes = [curve.requests for curve in curves]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"curves of {sizes} requests; give them in ascending order")

    @classmethod
    def constant(cls, prefill_s: float, decode_s: float) -> ModelledTimes:
        prefill, decode = ((LengthCurve(1, (1,), (each,)),) for each in (prefill_s, decode_s))
        return cls(prefill, decode)

    def compute_s(self, is_decode: bool, lengths: IntArray) -> float:
        """Seconds for `lengths` [requests], linear between numbers of requests, constant beyond."""
        curves = self.decode if is_decode else self.prefill
        requests = len(lengths)
        above = bisect_left(curves, requests, key=lambda curve: curve.requests)
        if above == len(curves):
            return curves[-1].mean_s(lengths)
        high = curves[above]
        if high.requests == requests or above == 0:
            return high.mean_s(lengths)
        low = curves[above - 1]
        known = {each.requests: each for each in (low, high)}
        sizes = low.requests, high.requests
        return between(requests, *sizes, lambda size: known[size].mean_s(lengths))

    def pass_s(self, starts: IntArray, counts: IntArray) -> float:
        """Seconds of `counts` tokens after `starts`: a longer prompt's less a shorter's."""
        decodes = (counts == 1) & (starts > 0)
        decode_s = self.compute_s(True, starts[decodes]) if decodes.any() else 0.0
        if decodes.all():
            return decode_s
        earlier, ends = starts[~decodes], (starts + counts)[~decodes]
        prefill_s = self.compute_s(False, ends)
        if earlier.any():
            constant_s = self.compute_s(False, np.zeros_like(earlier))
            prefill_s += constant_s - self.compute_s(False, earlier)
        least_s = self.decode[0].seconds[0] if decodes.any() else 0.0
        return float(together_s(*np.array([prefill_s, decode_s, least_s])))

    def transfer_s(self, tokens: int, requests: int) -> float:
        per_part = tokens * self.link_s_per_token + requests * self.link_s_per_request
        return self.link_latency_s + per_part


def modelled_times(
    costs: CostModel, devices: Sequence[Device], sizes: MicroBatches, compute: Compute
) -> tuple[ModelledTimes, ...]:
    workload = costs.workload
    prompts = range(workload.prompt_length, workload.prompt_length + 1)
    longest = workload.prompt_length + max(1, workload.new_tokens - 1)
    contexts = range(workload.prompt_length, min(longest, workload.total_length))
    prefill = _tables("prefill", sizes.prefill, prompts, workload, compute)
    decode = _tables("decode", sizes.decode, contexts, workload, compute)
    links = link_terms(costs, devices)
    stages = zip(prefill, decode, links, strict=True)
    return tuple(ModelledTimes(first, then, *link) for first, then, link in stages)


def _tables(
    phase: Phase, size: int, planned: range, workload: Workload, compute: Compute
) -> list[tuple[LengthCurve, ...]]:
    ragged = workload.global_batch % size
    exact = {size, ragged} - {0}
    grid = set(_grid(workload.total_length))
    curves = []
    for requests in sorted({*_grid(size), *exact}):
        lengths = sorted(grid.union(planned) if requests in exact else grid)
        seconds = np.array([compute(phase, requests, length) for length in lengths])
        curves.append([_thinned(requests, lengths, column) for column in seconds.T])
    return list(zip(*curves, strict=True))


def _grid(most: int) -> Iterator[int]:
    at = 1
    while at < most:
        yield at
        at = at + 1 if at < _EVERY_UP_TO else round(at * _GROWTH)
    yield most


def _thinned(requests: int, lengths: Sequence[int], seconds: FloatArray) -> LengthCurve:
    """The fewest points between which straight lines give all others (Douglas and Peucker)."""
    at = np.array(lengths, dtype=np.float64)
    kept = {0, len(at) - 1}
    spans = [(0, len(at) - 1)]
    while spans:
        first, last = spans.pop()
        inner = slice(first + 1, last)
        line = np.interp(at[inner], at[[first, last]], seconds[[first, last]])
        off = np.abs(line - seconds[inner]) / np.maximum(seconds[inner], np.finfo(float).tiny)
        if off.size and off.max() > _LINEAR:
            middle = first + 1 + int(off.argmax())
            kept.add(middle)
            spans += [(first, middle), (middle, last)]
    chosen = sorted(kept)
    return LengthCurve(
        requests, tuple(lengths[i] for i in chosen), tuple(float(seconds[i]) for i in chosen)
    )

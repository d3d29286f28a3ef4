"""Traces of requests: lengths as in ORCA section 6.2 or of real conversations, Poisson arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PROMPTS = (32, 512)
OUTPUTS = (1, 128)
"""Least and most tokens of uniform lengths (section 6.2)."""
HOMOGENEOUS = (32, 32)
"""Tokens of every prompt and answer of the trace of figure 11. The text does not name them; section
6.1 measures batches with 32 prompt and 32 new tokens."""
EQUAL_PROMPT = 272
"""Tokens of every prompt of the trace whose answers only differ: the mean of the uniform trace."""
KINDS = ("uniform", "homogeneous", "conversation", "equal prompts")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request's prompt and of its answer, which never ends earlier."""

    prompt: int
    new: int

    @property
    def total(self) -> int:
        """Tokens that the request has when it is done."""
        return self.prompt + self.new


@dataclass(frozen=True)
class Arrival:
    """A request of a trace and the second at which it comes."""

    at_s: float
    lengths: Lengths


Trace = Sequence[Arrival]


def lengths_of(kind: str, count: int, seed: int, data: Path | None = None) -> list[Lengths]:
    """Lengths of so many requests of a trace of this kind; `data` has the recorded traces."""
    random = np.random.default_rng([seed, 1])
    if kind == "homogeneous":
        return [Lengths(*HOMOGENEOUS)] * count
    if kind in ("uniform", "equal prompts"):
        prompts = random.integers(PROMPTS[0], PROMPTS[1] + 1, count)
        outputs = random.integers(OUTPUTS[0], OUTPUTS[1] + 1, count)
        if kind == "equal prompts":
            prompts[:] = EQUAL_PROMPT
        return [Lengths(*pair) for pair in zip(prompts.tolist(), outputs.tolist(), strict=True)]
    if data is None:
        raise ValueError("the conversation trace needs the folder of the reference data")
    rows = random.choice(np.array(_conversations(data)), count)
    return [Lengths(*pair) for pair in rows.tolist()]


def _conversations(data: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of recorded requests, scaled to the lengths of the uniform trace.

    Both are multiplied by what brings their 99th percentile to the greatest length of each kind,
    and bounded by that.
    """
    columns = []
    for values, most in zip(recorded_tokens(data, "conv").T, (PROMPTS[1], OUTPUTS[1]), strict=True):
        scaled = np.rint(values * (most / np.percentile(values, 99))).astype(np.int64)
        columns.append(np.clip(scaled, 1, most).tolist())
    return list(zip(*columns, strict=True))


def recorded_tokens(data: Path, trace: str) -> npt.NDArray[np.int64]:
    """Prompt and output tokens of the requests of a recorded trace [requests, 2]."""
    path = data / "traces" / f"splitwise_{trace}.csv"
    return np.loadtxt(path, np.int64, delimiter=",", skiprows=1, usecols=(1, 2))


def poisson(lengths: Sequence[Lengths], per_s: float, seed: int) -> Trace:
    """The requests as they come at this mean rate; another rate stretches the same arrivals."""
    gaps = np.random.default_rng([seed, 2]).exponential(1.0, len(lengths))
    times = (gaps.cumsum() / per_s).tolist()
    return [Arrival(*pair) for pair in zip(times, lengths, strict=True)]

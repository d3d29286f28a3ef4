"""The assignment problem of one device order and one pair of micro-batch sizes.

LLM-PQ section 4.3. Names used here for the paper's symbols: `prefill_s[j, b]` is l(i,j,b) of the
prefill phase, `decode_s[j, b]` that of decode (the same for every layer i), `prefill_comm_s[j]` is
P_pre / f_j, `layer_bytes[j, b]` is M(i,b) at length s+n, `memory_bytes[j]` is M_j,
`sensitivity[i, b]` is omega(i,b), `prefill_micro_batches` is ceil(B/eta) and
`decode_micro_batches` is ceil(B/xi).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt

from planner.optimiser.names import Objective
from quant.common.errors import SpecError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

Scalar = TypeVar("Scalar", bound=np.generic)

STAGE_TIMES = ("fixed_prefill_s", "fixed_decode_s", "prefill_comm_s", "decode_comm_s")


@dataclass(frozen=True)
class JobPasses:
    """The passes of a whole job, counted by its schedule; fractions are means.

    `prefills` micro-batches of `prefill_requests` come in `bursts`, after each of which only decode
    steps follow for a while. Each of `decode_steps` passes has `decode_requests`; each of the
    decode groups makes `rounds` steps one after the other.
    """

    prefills: float
    bursts: float
    decode_steps: float
    rounds: float
    prefill_requests: float
    decode_requests: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentProblem:
    """The costs of placing L layers on N stages, each layer at one of K bitwidths.

    Seconds are for one micro-batch of the phase. `layer_bytes` holds one layer with its KV cache
    for all requests; `memory_bytes` is what is left for layers and may be negative where the fixed
    parts do not fit. `available` says which bitwidths a device can run. Arrays become read-only
    float64; `layer_bytes` may be given as [K]. Raises SpecError for shapes or values that make no
    problem.
    """

    prefill_s: FloatArray  # [N, K], one layer
    decode_s: FloatArray  # [N, K], one layer
    fixed_prefill_s: FloatArray  # [N], what else lives on the stage
    fixed_decode_s: FloatArray  # [N]
    prefill_comm_s: FloatArray  # [N], to the next stage; entry N-1 goes back to the first
    decode_comm_s: FloatArray  # [N]
    layer_bytes: FloatArray  # [N, K]
    memory_bytes: FloatArray  # [N]
    sensitivity: FloatArray  # [L, K]
    theta: float
    bitwidths: tuple[int, ...]  # K, ascending
    prefill_micro_batches: int
    decode_micro_batches: int
    new_tokens: int
    objective: Objective = "pipeline"
    available: BoolArray = field(default_factory=lambda: np.ones((1, 1), dtype=bool))  # [N, K]
    passes: JobPasses | None = None  # of objective "job"

    def __post_init__(self) -> None:
        """Convert to read-only arrays and check them."""
        object.__setattr__(self, "bitwidths", tuple(int(bits) for bits in self.bitwidths))
        _check_scalars(self)
        shape = (len(np.atleast_1d(np.asarray(self.memory_bytes))), len(self.bitwidths))
        for name in ("prefill_s", "decode_s", "layer_bytes"):
            _store(self, name, shape, least=0.0, broadcast=name == "layer_bytes")
        for name in STAGE_TIMES:
            _store(self, name, shape[:1], least=0.0)
        _store(self, "memory_bytes", shape[:1], least=-np.inf)
        layers = len(np.atleast_1d(np.asarray(self.sensitivity)))
        _store(self, "sensitivity", (layers, shape[1]), least=0.0)
        _check_sensitivity(self.sensitivity, self.bitwidths)
        available = _broadcast("available", np.asarray(self.available, dtype=bool), shape)
        object.__setattr__(self, "available", available)

    @property
    def stages(self) -> int:
        """Number of pipeline stages, N."""
        return len(self.prefill_s)

    @property
    def layers(self) -> int:
        """L, the number of decoder layers."""
        return len(self.sensitivity)

    @property
    def decode_rounds(self) -> int:
        """Decode steps of each request, n - 1: the first new token comes from the prefill."""
        return self.new_tokens - 1


def _check_scalars(problem: AssignmentProblem) -> None:
    """Check counts, theta, the order of bitwidths and the objective's name."""
    for name in ("prefill_micro_batches", "decode_micro_batches", "new_tokens"):
        value = getattr(problem, name)
        if value < 1:
            raise SpecError(f"{name} is {value}; give at least 1")
    if not (np.isfinite(problem.theta) and problem.theta >= 0):
        raise SpecError(f"theta is {problem.theta}; give a finite number of at least 0")
    bits = problem.bitwidths
    if not bits or any(low >= high for low, high in pairwise(bits)):
        raise SpecError(f"bitwidths are {list(bits)}; give one or more, ascending, each once")
    if problem.objective not in get_args(Objective):
        choices = ", ".join(get_args(Objective))
        raise SpecError(f"objective {problem.objective!r} is unknown; choose one of {choices}")
    if (problem.objective == "job") != (problem.passes is not None):
        raise SpecError("objective 'job' and passes go together; give both or neither")


def _store(
    problem: AssignmentProblem,
    name: str,
    shape: tuple[int, ...],
    *,
    least: float,
    broadcast: bool = False,
) -> None:
    """Replace a field by a read-only float64 array of `shape` whose values are at least `least`."""
    values = np.asarray(getattr(problem, name), dtype=np.float64)
    if 0 in shape:
        raise SpecError(f"{name} would have shape {list(shape)}; give at least one stage and layer")
    if broadcast:
        values = _broadcast(name, values, shape)
    if values.shape != shape:
        raise SpecError(f"{name} has shape {list(values.shape)}; give {list(shape)}")
    if not np.isfinite(values).all():
        raise SpecError(f"{name} holds {values[~np.isfinite(values)][0]}; give finite numbers")
    if (values < least).any():
        raise SpecError(f"{name} holds {values.min():g}; give numbers of at least {least:g}")
    values = values.copy()
    values.flags.writeable = False
    object.__setattr__(problem, name, values)


def _broadcast(
    name: str, values: npt.NDArray[Scalar], shape: tuple[int, ...]
) -> npt.NDArray[Scalar]:
    """Repeat `values` to `shape`, read-only."""
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise SpecError(f"{name} has shape {list(values.shape)}; give {list(shape)}") from None


def _check_sensitivity(sensitivity: FloatArray, bitwidths: tuple[int, ...]) -> None:
    """Check that more bits never hurt quality: each row falls or stays level."""
    rising = np.argwhere(np.diff(sensitivity, axis=1) > 0)
    if rising.size:
        layer, choice = (int(index) for index in rising[0])
        low, high = sensitivity[layer, choice], sensitivity[layer, choice + 1]
        raise SpecError(
            f"sensitivity of layer {layer} rises from {low:g} at {bitwidths[choice]} bit to "
            f"{high:g} at {bitwidths[choice + 1]} bit; give values that fall with the bitwidth"
        )

"""The assignment problem of one device order and pair of micro-batch sizes, and its objective.

LLM-PQ section 4.3. Names used here for the paper's symbols: `prefill_s[j, b]` is l(i,j,b) of the
prefill phase, `decode_s[j, b]` that of decode (the same for every layer i), `prefill_comm_s[j]` is
P_pre / f_j, `layer_bytes[j, b]` is M(i,b) at length s+n, `memory_bytes[j]` is M_j,
`sensitivity[i, b]` is omega(i,b), `prefill_micro_batches` is ceil(B/eta) and
`decode_micro_batches` is ceil(B/xi).

Layers may be of C kinds, which cost differently: the columns of these arrays are then *cells*,
column kind * K + choice is a layer of that kind at that bitwidth.

The seconds of a batch, or of a whole job, have the same form by every objective, and only this
file states them. P and D are the seconds of the slowest stage per micro-batch of prefill and
decode; sum P_j and sum D_j add up all stages:

    latency = constant + prefill_max * max(P, prefill_floor) + prefill_each * sum P_j
                + decode_each * sum D_j
                + max(decode_max * max(D, decode_floor), round_trips * (sum D_j + trip))

The floors are the slowest transfers (LLM-PQ eq. 7). A new objective is a function that gives the
coefficients, an entry in `OBJECTIVES`, and its name in `names.Objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from planner.optimiser.names import Objective
from quant.common.errors import SpecError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Seconds = float | FloatArray
Scalar = TypeVar("Scalar", bound=np.generic)
STAGE_TIMES = ("fixed_prefill_s", "fixed_decode_s", "prefill_comm_s", "decode_comm_s")


@dataclass(frozen=True)
class JobPasses:
    """The passes of a whole job; fractions are means. `prefills` come in `bursts`, after each of
    which only decode steps follow for a while; each decode group makes `rounds` steps one after the
    other.
    """

    prefills: float
    bursts: float
    decode_steps: float
    rounds: float
    prefill_requests: float
    decode_requests: float


class Memory(NamedTuple):
    """A memory of each stage: bytes of a layer by cell [N, C * K], and those for layers [N]."""

    layer_bytes: FloatArray
    limit_bytes: FloatArray


class Host(NamedTuple):
    """Stages that share the memory of a host."""

    stages: tuple[int, ...]
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignmentProblem:
    """The costs of placing L layers of C kinds on N stages, each at one of K bitwidths; seconds are
    of one micro-batch. `memory_bytes` is left for layers and may be negative. `joined` layers lie
    on the stage of the layer before them. Arrays become read-only; `layer_bytes` and `available`
    may be [K], the same for all kinds. `host_bytes` are what a layer takes of a second memory: a
    choice may be there twice, with a part of the layer on either; `hosts` are those that stages
    share, each up to its `host_memory_bytes`. SpecError for shapes or values that make no problem.
    """

    prefill_s: FloatArray  # [N, C * K], one layer
    decode_s: FloatArray  # [N, C * K], one layer
    fixed_prefill_s: FloatArray  # [N], what else lives on the stage
    fixed_decode_s: FloatArray  # [N]
    prefill_comm_s: FloatArray  # [N], to the next stage; entry N-1 goes back to the first
    decode_comm_s: FloatArray  # [N]
    layer_bytes: FloatArray  # [N, C * K]
    memory_bytes: FloatArray  # [N]
    sensitivity: FloatArray  # [L, K]
    theta: float
    bitwidths: tuple[int, ...]  # K, never falling
    prefill_micro_batches: int
    decode_micro_batches: int
    new_tokens: int
    objective: Objective = "pipeline"
    available: BoolArray = field(default_factory=lambda: np.ones((1, 1), dtype=bool))  # [N, C * K]
    passes: JobPasses | None = None  # of objective "job"
    kind_of_layer: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # [L]
    joined: tuple[int, ...] = ()  # of layers 1 to L-1
    host_bytes: FloatArray = field(default_factory=lambda: np.zeros((1, 1)))  # [N, C * K]
    host_memory_bytes: FloatArray = field(default_factory=lambda: np.zeros(1))  # [N]
    hosts: tuple[Host, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bitwidths", tuple(int(bits) for bits in self.bitwidths))
        _check_scalars(self)
        stages, choices = len(np.atleast_1d(np.asarray(self.memory_bytes))), len(self.bitwidths)
        cells = max(1, np.atleast_1d(self.prefill_s).shape[-1] // choices) * choices
        if not np.any(self.host_bytes):
            object.__setattr__(self, "host_bytes", np.zeros((1, 1)))
        if not np.any(self.host_memory_bytes):
            object.__setattr__(self, "host_memory_bytes", np.zeros(stages))
        for name in ("prefill_s", "decode_s", "layer_bytes", "host_bytes"):
            _store(self, name, (stages, cells), least=0.0, broadcast=name.endswith("bytes"))
        for name in (*STAGE_TIMES, "host_memory_bytes"):
            _store(self, name, (stages,), least=0.0)
        own = self.host_memory_bytes
        scarce = (each for each in self.hosts if own[list(each.stages)].sum() > each.memory_bytes)
        object.__setattr__(self, "hosts", tuple(scarce) if self.host_bytes.any() else ())
        _store(self, "memory_bytes", (stages,), least=-np.inf)
        layers = len(np.atleast_1d(np.asarray(self.sensitivity)))
        _store(self, "sensitivity", (layers, choices), least=0.0)
        _check_sensitivity(self.sensitivity, self.bitwidths)
        usable = np.asarray(self.available, dtype=bool)
        usable = _broadcast("available", usable, (stages, cells), choices)
        object.__setattr__(self, "available", usable)
        object.__setattr__(self, "kind_of_layer", _checked_kinds(self, layers))
        object.__setattr__(self, "joined", _checked_joined(self.joined, layers))

    @property
    def stages(self) -> int:
        return len(self.prefill_s)

    @property
    def layers(self) -> int:
        return len(self.sensitivity)

    @property
    def kinds(self) -> int:
        """How many kinds of layers there may be, C."""
        return int(self.prefill_s.shape[1]) // len(self.bitwidths)

    @property
    def is_even(self) -> bool:
        """Whether all layers are of one kind, and any boundary may be."""
        return self.kinds == 1 and not self.joined

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """The devices' memory, and the hosts' if any layer takes some."""
        device = Memory(self.layer_bytes, self.memory_bytes)
        host = Memory(self.host_bytes, self.host_memory_bytes)
        return (device, host) if self.host_bytes.any() else (device,)

    @cached_property
    def open_boundaries(self) -> IntArray:
        """Where a stage may begin or end, from 0 to L."""
        return np.setdiff1d(np.arange(self.layers + 1), self.joined)

    @cached_property
    def kinds_before(self) -> IntArray:
        """How many layers of each kind lie before each boundary, [L+1, C]."""
        before = np.zeros((self.layers + 1, self.kinds), dtype=np.int64)
        before[np.arange(1, self.layers + 1), self.kind_of_layer] = 1
        return np.asarray(before.cumsum(axis=0))

    def by_layer(self, cells: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """The values [N, C * K] of cells as each layer has them, [N, L, K]."""
        by_kind = cells.reshape(len(cells), self.kinds, -1)
        if self.kinds == 1:
            return np.broadcast_to(by_kind, (len(cells), self.layers, by_kind.shape[2]))
        return by_kind[:, self.kind_of_layer]

    def with_choices(self, choices: IntArray) -> AssignmentProblem:
        """The problem with some choices [P] alone."""
        width = len(self.bitwidths)
        cells = (np.arange(self.kinds)[:, np.newaxis] * width + choices).ravel()
        names = ("prefill_s", "decode_s", "layer_bytes", "host_bytes", "available")
        own: dict[str, Any] = {name: getattr(self, name)[:, cells] for name in names}
        own["sensitivity"] = self.sensitivity[:, choices]
        return replace(self, bitwidths=tuple(np.array(self.bitwidths)[choices].tolist()), **own)

    @property
    def decode_rounds(self) -> int:
        """Decode steps of each request, n - 1: the first new token comes from the prefill."""
        return self.new_tokens - 1


def _check_scalars(problem: AssignmentProblem) -> None:
    for name in ("prefill_micro_batches", "decode_micro_batches", "new_tokens"):
        value = getattr(problem, name)
        if value < 1:
            raise SpecError(f"{name} is {value}; give at least 1")
    if not (np.isfinite(problem.theta) and problem.theta >= 0):
        raise SpecError(f"theta is {problem.theta}; give a finite number of at least 0")
    bits = problem.bitwidths
    if not bits or any(low > high for low, high in pairwise(bits)):
        raise SpecError(f"bitwidths are {list(bits)}; give one or more, ascending")
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
    values = np.asarray(getattr(problem, name), dtype=np.float64)
    if 0 in shape:
        raise SpecError(f"{name} would have shape {list(shape)}; give at least one stage and layer")
    if broadcast:
        values = _broadcast(name, values, shape, len(problem.bitwidths))
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
    name: str, values: npt.NDArray[Scalar], shape: tuple[int, ...], choices: int
) -> npt.NDArray[Scalar]:
    """The values as `shape` [N, C * K], from those of any stage or of the choices of any kind."""
    if values.shape[-1:] == (choices,):
        values = np.tile(values, shape[1] // choices)
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise SpecError(f"{name} has shape {list(values.shape)}; give {list(shape)}") from None


def _checked_kinds(problem: AssignmentProblem, layers: int) -> IntArray:
    """The kind of each layer, for which the arrays have columns."""
    given, kinds = np.asarray(problem.kind_of_layer), problem.kinds
    if kinds == 1 and not given.any():
        return np.zeros(layers, dtype=np.int64)
    if given.shape != (layers,):
        raise SpecError(f"kind_of_layer has shape {list(given.shape)}; give [{layers}]")
    if (given < 0).any() or (given >= kinds).any() or (given != given.astype(np.int64)).any():
        raise SpecError(
            f"kind_of_layer holds {given.tolist()}, but prefill_s has columns of {kinds} kinds; "
            f"give whole numbers from 0 to {kinds - 1}, or a column for each kind and bitwidth"
        )
    own = given.astype(np.int64)
    own.flags.writeable = False
    return own


def _checked_joined(joined: tuple[int, ...], layers: int) -> tuple[int, ...]:
    inner = tuple(sorted({int(layer) for layer in joined}))
    if inner and (inner[0] < 1 or inner[-1] >= layers):
        raise SpecError(
            f"joined holds layers {list(inner)}; give some of 1 to {layers - 1}, which have a "
            "layer before them"
        )
    return inner


def _check_sensitivity(sensitivity: FloatArray, bitwidths: tuple[int, ...]) -> None:
    """Check that a bitwidth that is there twice has the same. More bits may lose more, as of
    weights that are stored with fewer, and rounded again.
    """
    twice = np.array(bitwidths[1:]) == bitwidths[:-1]
    unlike = twice & (sensitivity[:, 1:] != sensitivity[:, :-1])
    if unlike.any():
        layer, choice = (int(index) for index in np.argwhere(unlike)[0])
        one, other = sensitivity[layer, choice], sensitivity[layer, choice + 1]
        raise SpecError(
            f"sensitivity of layer {layer} is {one:g} and {other:g}, both at {bitwidths[choice]} "
            "bit; give the same for the same bitwidth"
        )


@dataclass(frozen=True)
class LatencyForm:
    """The form's coefficients; `transfer_each`: how often `constant_s` has a prefill transfer."""

    prefill_max: float
    prefill_each: float
    decode_max: float
    decode_each: float
    round_trips: float
    transfer_each: float
    constant_s: float
    trip_s: float
    prefill_floor_s: float
    decode_floor_s: float

    def seconds(
        self,
        slowest_prefill_s: Seconds,
        slowest_decode_s: Seconds,
        prefill_sum_s: Seconds,
        decode_sum_s: Seconds,
    ) -> FloatArray:
        """Latency for the slowest stages' seconds and the sums over stages; arrays broadcast."""
        fill: Seconds = self.prefill_max * np.maximum(slowest_prefill_s, self.prefill_floor_s)
        decode = np.maximum(self.rounds_s(slowest_decode_s), self.trips_s(decode_sum_s))
        once = self.constant_s + self.prefill_each * prefill_sum_s
        once = once + self.decode_each * decode_sum_s
        return np.asarray(once + fill + decode)

    def of_stages(self, prefill_s: FloatArray, decode_s: FloatArray) -> float:
        """Latency for the seconds that each stage [N] takes per micro-batch."""
        slowest = prefill_s.max(), decode_s.max()
        return float(self.seconds(*slowest, prefill_s.sum(), decode_s.sum()))

    def rounds_s(self, slowest_decode_s: Seconds) -> FloatArray:
        """Decode seconds if the slowest stage or transfer decides."""
        return self.decode_max * np.maximum(slowest_decode_s, self.decode_floor_s)

    def trips_s(self, decode_sum_s: Seconds) -> Seconds:
        """Decode seconds if each token's way round all stages decides."""
        return self.round_trips * (decode_sum_s + self.trip_s)


def latency_form(problem: AssignmentProblem) -> LatencyForm:
    return OBJECTIVES[problem.objective](problem, problem.decode_rounds)


def decode_round_form(problem: AssignmentProblem) -> LatencyForm:
    """The form of the pipeline with one decode round, whatever the problem's objective."""
    return _pipeline(problem, 1)


def typical_objective_s(problem: AssignmentProblem) -> float:
    """A positive number of seconds of the objective's size: layers spread evenly; 1 if zero."""
    each, stages = problem.layers / problem.stages, problem.stages
    prefill_s = float(each * problem.prefill_s.mean() + problem.fixed_prefill_s.max())
    decode_s = float(each * problem.decode_s.mean() + problem.fixed_decode_s.max())
    latency_s = latency_form(problem).seconds(
        prefill_s, decode_s, stages * prefill_s, stages * decode_s
    )
    quality_s = problem.theta * float(problem.sensitivity.mean(axis=1).sum())
    seconds = float(latency_s) + quality_s
    return seconds if seconds > 0 else 1.0


def _pipeline(problem: AssignmentProblem, decode_rounds: int) -> LatencyForm:
    return LatencyForm(
        prefill_max=problem.prefill_micro_batches - 1,
        prefill_each=1.0,
        decode_max=problem.decode_micro_batches * decode_rounds,
        decode_each=0.0,
        round_trips=decode_rounds,
        transfer_each=1.0,
        constant_s=float(problem.prefill_comm_s.sum()),
        trip_s=float(problem.decode_comm_s.sum()),
        prefill_floor_s=float(problem.prefill_comm_s.max()),
        decode_floor_s=float(problem.decode_comm_s.max()),
    )


def _paper(problem: AssignmentProblem, decode_rounds: int) -> LatencyForm:
    """LLM-PQ eq. 4 to 8: transfers count in the maxima only, and no token waits for another."""
    return replace(
        _pipeline(problem, decode_rounds),
        decode_max=(problem.decode_micro_batches - 1) * decode_rounds,
        decode_each=1.0,
        round_trips=0.0,
        transfer_each=0.0,
        constant_s=0.0,
        trip_s=0.0,
    )


def _job(problem: AssignmentProblem, decode_rounds: int) -> LatencyForm:
    """A job whose slots are refilled; stages idle while a burst's first prefill goes through."""
    passes, batch = problem.passes, _pipeline(problem, decode_rounds)
    assert passes is not None, "a problem of a job counts its passes"
    return replace(
        batch,
        prefill_max=passes.prefills - passes.bursts,
        prefill_each=passes.bursts,
        decode_max=passes.decode_steps,
        round_trips=passes.rounds,
        transfer_each=passes.bursts,
        constant_s=passes.bursts * batch.constant_s,
    )


OBJECTIVES: dict[Objective, Callable[[AssignmentProblem, int], LatencyForm]] = {
    "pipeline": _pipeline,
    "paper": _paper,
    "job": _job,
}

"""Random assignment problems shaped like real clusters, and a solver that tries everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import transfer_terms
from planner.optimiser.assignment import Assignment, SolveOptions
from planner.optimiser.feasibility import is_feasible
from planner.optimiser.names import Objective
from planner.optimiser.problem import AssignmentProblem, FloatArray, Host, JobPasses
from planner.optimiser.solve import solve_by

FOUR_BITS = (3, 4, 8, 16)
PRECISION = 1e-6  # relative difference to brute force

# Half-precision TFLOP/s, memory GB/s and usable GiB, from the makers' data sheets.
DEVICES = {
    "T4": (65.0, 320.0, 14.6),
    "P100": (18.7, 732.0, 11.9),
    "V100": (125.0, 900.0, 31.7),
    "A100": (312.0, 1555.0, 39.4),
}
SPARE_BYTES_PER_WEIGHT = {3: 0.03, 4: 0.03, 5: 0.03, 6: 0.03, 8: 0.01, 16: 0.0}  # scales and zeros
SLOWDOWN = {3: 1.35, 4: 1.15, 5: 1.25, 6: 1.2, 8: 1.1, 16: 1.0}


@dataclass(frozen=True)
class Shape:
    """The figures that a random problem is made from."""

    devices: tuple[str, ...]
    layers: int
    hidden: int
    bitwidths: tuple[int, ...] = FOUR_BITS
    global_batch: int = 32
    prompt: int = 512
    new_tokens: int = 100
    theta: float = 1.0
    objective: Objective = "pipeline"
    memory_factor: float = 1.0


def cluster_problem(shape: Shape, seed: int) -> AssignmentProblem:
    """Roofline costs with a few percent of noise; memory net of embedding and head."""
    rng = np.random.default_rng(seed)
    flops, traffic, memory = np.array([DEVICES[name] for name in shape.devices]).T
    stages, bits = len(shape.devices), np.array(shape.bitwidths)
    weights = 12.0 * shape.hidden**2
    weight_bytes = weights * (bits / 8 + [SPARE_BYTES_PER_WEIGHT[b] for b in shape.bitwidths])
    kv_bytes = 4.0 * shape.global_batch * (shape.prompt + shape.new_tokens) * shape.hidden
    decode_size = max(1, shape.global_batch // stages)
    prefill_size = max(1, decode_size // 2)
    slow = np.array([SLOWDOWN[b] for b in shape.bitwidths]) * rng.uniform(
        0.97, 1.03, (stages, len(bits))
    )
    compute_s = 2 * weights * prefill_size * shape.prompt / (flops * 0.6e12)
    read_s = (weight_bytes + kv_bytes * decode_size / shape.global_batch) / (
        traffic[:, np.newaxis] * 0.7e9
    )
    head_bytes = 2.0 * 50_000 * shape.hidden
    edge = np.zeros(stages)
    edge[[0, -1]] = 1.0
    token_bytes = 2.0 * shape.hidden / 3e9
    moved = np.where(np.arange(stages) < stages - 1, token_bytes, 1e-6)
    return AssignmentProblem(
        prefill_s=compute_s[:, np.newaxis] * slow,
        decode_s=read_s * slow + 5e-5,
        fixed_prefill_s=edge * 0.1 * compute_s,
        fixed_decode_s=edge * head_bytes / (traffic * 0.7e9),
        prefill_comm_s=moved * prefill_size * shape.prompt if stages > 1 else moved * 0,
        decode_comm_s=moved * decode_size if stages > 1 else moved * 0,
        layer_bytes=np.ceil(weight_bytes + kv_bytes),  # whole bytes add up exactly
        memory_bytes=shape.memory_factor * memory * 2**30 - edge * head_bytes,
        sensitivity=_sensitivity(rng, shape.layers, bits),
        theta=shape.theta,
        bitwidths=shape.bitwidths,
        prefill_micro_batches=-(-shape.global_batch // prefill_size),
        decode_micro_batches=-(-shape.global_batch // decode_size),
        new_tokens=shape.new_tokens,
        objective=shape.objective,
        passes=_passes(rng) if shape.objective == "job" else None,
    )


def small_problem(seed: int, objective: Objective) -> AssignmentProblem:
    """At most 3 stages, 5 layers and 3 bitwidths, with memory that is ample, tight or too small.

    Some have bitwidths a device lacks, free transfers, equal layers, one token, or theta 0.
    """
    rng = np.random.default_rng(seed)
    stages, layers, choices = (int(rng.integers(1, high + 1)) for high in (3, 5, 3))
    bitwidths = tuple(sorted(rng.choice([3, 4, 8, 16], choices, replace=False).tolist()))
    names = tuple(rng.choice(list(DEVICES), stages).tolist())
    shape = Shape(
        devices=names,
        layers=layers,
        hidden=int(rng.choice([1024, 4096, 7168])),
        bitwidths=bitwidths,
        global_batch=int(rng.integers(1, 33)),
        new_tokens=int(rng.choice([1, 2, 50])),
        theta=float(rng.choice([0.0, 0.01, 1.0, 100.0])),
        objective=objective,
    )
    problem = cluster_problem(shape, seed)
    total = problem.layer_bytes.mean(axis=1).max() * layers
    shares = rng.dirichlet(np.ones(stages)) * float(rng.choice([0.7, 1.0, 1.5, 4.0]))
    return replace(
        problem,
        memory_bytes=np.floor(shares * total),
        available=rng.random((stages, choices)) < rng.choice([0.8, 1.0]),
        prefill_comm_s=problem.prefill_comm_s * float(rng.choice([0.0, 1.0, 100.0])),
        decode_comm_s=problem.decode_comm_s * float(rng.choice([0.0, 1.0, 100.0])),
    )


def of_kinds(
    problem: AssignmentProblem, pattern: Sequence[int], seed: int, joined: Sequence[int] = ()
) -> AssignmentProblem:
    """The problem with layers of the kinds of `pattern` [L], which cost up to three times as much
    and as little as its own, each choice in a way of its own.
    """
    rng = np.random.default_rng(seed)
    kinds = 1 + max(pattern)

    def cells(values: FloatArray) -> FloatArray:
        factors = np.exp(rng.uniform(-1.1, 1.1, (kinds, 1, 1))) * rng.uniform(
            0.9, 1.1, (kinds, *values.shape)
        )
        factors[0] = 1.0
        return np.concatenate(list(factors * values), axis=1)

    return replace(
        problem,
        prefill_s=cells(problem.prefill_s),
        decode_s=cells(problem.decode_s),
        layer_bytes=np.ceil(cells(problem.layer_bytes)),
        available=np.tile(problem.available, kinds),
        kind_of_layer=np.array(pattern),
        joined=tuple(joined),
    )


def small_uneven_problem(seed: int, objective: Objective) -> AssignmentProblem:
    """A small problem with up to three kinds of layers, in turns or anyhow; some have layers that
    are joined, cells that a device lacks, memory that is tight, or a bitwidth at which they lose
    nothing, as one has that is stored.
    """
    rng = np.random.default_rng([seed, 5])
    problem = small_problem(seed, objective)
    kinds = int(rng.integers(1, 4))
    pattern = np.arange(problem.layers) % kinds
    if rng.random() < 0.6:
        pattern = rng.integers(0, kinds, problem.layers)
    inner = np.arange(1, problem.layers)
    joined = inner[rng.random(inner.size) < (0.4 if kinds == 1 else rng.choice([0.0, 0.4]))]
    uneven = of_kinds(problem, pattern.tolist(), seed, joined.tolist())
    lacks = rng.random(uneven.available.shape) < rng.choice([0.0, 0.2])
    mean = uneven.layer_bytes.mean() / problem.layer_bytes.mean()
    losses, draws = uneven.sensitivity.copy(), np.random.default_rng([seed, 6])
    if draws.random() < 0.5:
        stored = draws.integers(0, losses.shape[1], kinds)[pattern]
        losses[np.arange(len(losses)), stored] = 0.0
    return replace(
        uneven,
        sensitivity=losses,
        available=uneven.available & ~lacks,
        memory_bytes=np.floor(problem.memory_bytes * mean * rng.choice([1.0, 1.4])),
    )


def with_hosts(problem: AssignmentProblem, seed: int, share: float) -> AssignmentProblem:
    """The problem with each bitwidth twice, the second time with a good part of the layer in its
    host's memory and slower or faster, for some kinds only; hosts have `share` of all bytes.
    """
    rng = np.random.default_rng([seed, 9])
    kinds, width = problem.kinds, len(problem.bitwidths)

    def twice(cells: np.ndarray, factor: float) -> np.ndarray:
        by_kind = cells.reshape(len(cells), kinds, width)
        factors = factor * rng.uniform(0.9, 1.1, by_kind.shape)
        both = np.stack([by_kind, by_kind * factors], axis=3)
        return both.reshape(len(cells), -1)

    on_device, slower = rng.uniform(0.1, 0.7), float(rng.choice([0.6, 2.0]))
    held = twice(problem.layer_bytes, on_device)
    hosted = np.tile([0.0, 1.0], kinds * width)
    has_hosted = np.repeat(rng.random(kinds) < 0.7, 2 * width)
    hosts = np.floor(rng.dirichlet(np.ones(problem.stages)) * share * problem.layer_bytes.mean())
    return replace(
        problem,
        bitwidths=tuple(np.repeat(problem.bitwidths, 2).tolist()),
        prefill_s=twice(problem.prefill_s, slower),
        decode_s=twice(problem.decode_s, slower),
        layer_bytes=np.floor(held),
        available=np.repeat(problem.available, 2, axis=1) & (has_hosted | (hosted == 0)),
        host_bytes=np.ceil(hosted * np.repeat(problem.layer_bytes, 2, axis=1) * (1 - on_device)),
        host_memory_bytes=hosts * problem.layers,
        sensitivity=np.repeat(problem.sensitivity, 2, axis=1),
    )


def small_hosted_problem(seed: int, objective: Objective) -> AssignmentProblem:
    """A small problem with two memories, of one kind of layers or several."""
    even = seed % 3 == 0
    problem = (small_problem if even else small_uneven_problem)(seed, objective)
    keeps = min(2, len(problem.bitwidths))
    rng = np.random.default_rng([seed, 11])
    cells = (
        np.arange(problem.kinds)[:, np.newaxis] * len(problem.bitwidths) + range(keeps)
    ).ravel()
    fewer = replace(
        problem,
        bitwidths=problem.bitwidths[:keeps],
        sensitivity=problem.sensitivity[:, :keeps],
        prefill_s=problem.prefill_s[:, cells],
        decode_s=problem.decode_s[:, cells],
        layer_bytes=problem.layer_bytes[:, cells],
        available=problem.available[:, cells],
    )
    return with_hosts(fewer, seed, float(rng.choice([0.3, 0.6, 1.0])))


def small_sharing_problem(seed: int, objective: Objective) -> AssignmentProblem:
    """A small problem with two memories, of which all stages share hosts, one or two."""
    problem = small_hosted_problem(seed, objective)
    rng = np.random.default_rng([seed, 13])
    on_second = rng.random(problem.stages) < rng.choice([0.0, 0.5])
    groups = np.flatnonzero(~on_second), np.flatnonzero(on_second)
    own = np.zeros(problem.stages)
    for stages in groups:
        own[stages] = problem.host_memory_bytes[stages].sum()
    hosts = [Host(tuple(each.tolist()), float(own[each[0]])) for each in groups if each.size]
    return replace(problem, host_memory_bytes=own, hosts=tuple(hosts))


def feasible_problems(
    count: int,
    objective: Objective,
    made: Callable[[int, Objective], AssignmentProblem] = small_problem,
) -> list[AssignmentProblem]:
    """The first small problems that have a solution; some of each sort are among any twenty."""
    problems = (made(seed, objective) for seed in itertools.count())
    return list(itertools.islice(filter(is_feasible, problems), count))


def brute_force(problem: AssignmentProblem) -> float:
    """The least objective over all boundaries and bitwidths, written from the formulas alone."""
    stages, layers = problem.stages, problem.layers
    best = float("inf")
    inner = [cut for cut in range(1, layers) if cut not in problem.joined]
    for cuts in itertools.combinations_with_replacement(inner, stages - 1):
        stage_of = [sum(layer >= cut for cut in cuts) for layer in range(layers)]
        for bits in itertools.product(range(len(problem.bitwidths)), repeat=layers):
            best = min(best, _price(problem, stage_of, bits))
    return best


def _price(problem: AssignmentProblem, stage_of: list[int], bits: tuple[int, ...]) -> float:
    """The objective of one plan by plain loops."""
    prefill = problem.fixed_prefill_s.tolist()
    decode = problem.fixed_decode_s.tolist()
    free, host = problem.memory_bytes.tolist(), problem.host_memory_bytes.tolist()
    omega = 0.0
    for layer, (stage, bit) in enumerate(zip(stage_of, bits, strict=True)):
        cell = problem.kind_of_layer[layer] * len(problem.bitwidths) + bit
        if not problem.available[stage, cell]:
            return float("inf")
        prefill[stage] += problem.prefill_s[stage, cell]
        decode[stage] += problem.decode_s[stage, cell]
        free[stage] -= problem.layer_bytes[stage, cell]
        host[stage] -= problem.host_bytes[stage, cell]
        omega += problem.sensitivity[layer, bit]
    left = [
        shared.memory_bytes - sum(problem.host_memory_bytes[j] - host[j] for j in shared.stages)
        for shared in problem.hosts
    ]
    if min(*free, *host, *left) < 0:
        return float("inf")
    comm_p, comm_d = problem.prefill_comm_s.tolist(), problem.decode_comm_s.tolist()
    slow_p, slow_d = max(prefill + comm_p), max(decode + comm_d)
    batches_p, batches_d = problem.prefill_micro_batches, problem.decode_micro_batches
    tokens = problem.new_tokens - 1
    if problem.passes is not None:
        count = problem.passes
        latency = (count.prefills - count.bursts) * slow_p
        latency += count.bursts * (sum(prefill) + sum(comm_p))
        latency += max(count.decode_steps * slow_d, count.rounds * (sum(decode) + sum(comm_d)))
    elif problem.objective == "paper":
        latency = (batches_p - 1) * slow_p + (batches_d - 1) * tokens * slow_d
        latency += sum(prefill) + sum(decode)
    else:
        latency = (batches_p - 1) * slow_p + sum(prefill) + sum(comm_p)
        latency += tokens * max(batches_d * slow_d, sum(decode) + sum(comm_d))
    return latency + problem.theta * omega


def _passes(rng: np.random.Generator) -> JobPasses:
    """Counts of a job: from one burst for all prefills to each a burst of its own."""
    prefills = float(rng.uniform(1, 200))
    bursts = float(rng.choice([1.0, prefills, rng.uniform(1, prefills)]))
    rounds = float(rng.choice([0.0, rng.uniform(1, 500)]))
    decode_steps = rounds * float(rng.uniform(1, 6))
    return JobPasses(prefills, bursts, decode_steps, rounds, 2.5, 7.25)


def _sensitivity(rng: np.random.Generator, layers: int, bits: np.ndarray) -> np.ndarray:
    """A layer's factor times a bitwidth's, disturbed in half of the problems.

    The values at 4 bit sum to about 1.
    """
    factor = np.exp(rng.normal(0, 0.5, layers)) * np.linspace(1.5, 0.7, layers) / layers
    fall = np.where(bits < 16, (2.0**bits - 1) ** -2 * 225, 0.0)
    values = factor[:, np.newaxis] * fall
    if rng.random() < 0.5:
        values *= rng.uniform(0.5, 1.5, values.shape)
    return -np.sort(-values, axis=1)


def solve(problem: AssignmentProblem, method: str = "auto", **options: Any) -> Assignment:
    return solve_by(method, problem, SolveOptions(**options))


def check_cutoff(solve: Callable[..., Assignment], problem: AssignmentProblem) -> None:
    """An upper bound cuts off exactly what cannot beat it."""
    least = brute_force(problem)
    assert 0 < least < math.inf
    below = solve(problem, relative_gap=0, upper_bound=least * 0.999)
    assert (below.status, below.first_layer, below.objective) == ("cutoff", (), math.inf)
    assert below.bound <= least
    above = solve(problem, relative_gap=0, upper_bound=least * 1.001)
    assert above.objective == pytest.approx(least, rel=PRECISION)


def transfer_s(
    cluster: ClusterSpec, sender: Device, receiver: Device, payload_bytes: float
) -> float:
    """Seconds of a hop of so many bytes."""
    latency_s, per_byte_s = transfer_terms(cluster, sender, receiver)
    return latency_s + payload_bytes * per_byte_s

"""What WAA holds and loads: memory of both kinds of GPUs (fig. 9), loading models again (table 4),
and layers at every tensor-parallel degree (section 3, XProfiler).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.lab import header, table_row
from benchmarks.reproduction.latency_bounds.models import (
    A40,
    BITS,
    DEGREES,
    MODELS,
    TASKS,
    Model,
    Pipeline,
)
from benchmarks.reproduction.latency_bounds.schedulers import mean_held_tokens
from benchmarks.reproduction.latency_bounds.schedules import WaaSchedules, waa_of
from benchmarks.reproduction.latency_bounds.setting import Setting
from planner.cluster.groups import group_of
from planner.costs.stored_bytes import kv_token_bytes, layer_weight_bytes
from planner.scheduling import Phase

PAPER_MEMORY = {"OPT 13B": "18 %", "GPT-3 101B": "29 %"}
"""How much more memory than FT WAA has for the model (section 7.3)."""
_GB = 1e9


def memory_table() -> Iterator[str]:
    """Yield the lines of the table: GB of a GPU, mean over those of a kind, without a bound."""
    yield header(
        "model, task | FT's batch, GPU: weights, KV | WAA | GPUs that prefill: weights, KV | that "
        "decode: weights, KV | weights / FT's | what is more, of all that FT holds | the paper"
    )
    for model in (MODELS[0], MODELS[2]):
        for task in ("T", "G"):
            setting = Setting(model, TASKS[task].lengths)
            yield table_row([f"{model.label}, {task}", *_memory_cells(setting)])


def _memory_cells(setting: Setting) -> Iterator[str]:
    lengths, count = setting.lengths, setting.model.count
    held = mean_held_tokens(lengths)
    best = max(setting.batches, key=lambda each: each.requests_per_s)
    longest = lengths.prompts.longest + lengths.outputs.longest
    ft = _held(setting.pipeline, best.batch.requests * longest)
    yield f"{best.batch.requests}: {_gb(ft, count)}"
    placed = waa_of(setting).placed(math.inf)
    if placed is None:
        yield from ("NS", *["–"] * 4)
    else:
        schedules = placed.schedules
        assert isinstance(schedules, WaaSchedules)
        schedule = schedules.schedule_at(placed.point)
        sides = schedules.divided
        prompts = 2 * schedule.prefill_requests * lengths.prompts.mean  # a turn, and one on its way
        both = _held(sides.prefill, prompts), _held(sides.decode, schedule.decode_requests * held)
        gpus = [_gpus(side) for side in (sides.prefill, sides.decode)]
        yield schedules.label(placed.point)
        for own, number in zip(both, gpus, strict=True):
            yield f"{number}: {_gb(own, number)}"
        weights = both[0][0] + both[1][0]
        yield f"{weights / ft[0]:.2f}"
        yield f"{(weights - ft[0]) / sum(ft):.0%}"
    yield PAPER_MEMORY[setting.model.name]


def _gpus(pipeline: Pipeline) -> int:
    return sum(stage.degree for stage in pipeline.stages)


def _held(pipeline: Pipeline, tokens: float) -> tuple[float, float]:
    """Bytes of layers' weights, and of the keys and values of so many tokens, on all GPUs."""
    weights = kv = 0.0
    counts = np.diff(pipeline.first_layer).tolist()
    for device, layers in zip(pipeline.stages, counts, strict=True):
        shape, dtype = pipeline.costs.shape_on(device), pipeline.costs.dtype(device)
        each = layers * device.degree
        weights += each * layer_weight_bytes(shape, BITS, device, dtype)
        kv += each * tokens * kv_token_bytes(shape, BITS, dtype)
    return weights, kv


def _gb(held: tuple[float, float], gpus: int) -> str:
    return ", ".join(f"{each / gpus / _GB:.1f}" for each in held)


SSD_BYTES_PER_S = 7e9
"""Of a node, an assumption: what data sheets of drives for four lanes of PCI Express 4.0 state."""
TABLE_4 = {
    "39B": (16, 0.9, 2.1),
    "101B": (32, 1.3, 7.1),
    "175B": (32, 2.1, 11.9),
    "341B": (48, 3.5, 15.1),
}
"""GPUs, seconds from the hosts' DRAM, and from SSD."""


def loading_table() -> Iterator[str]:
    """Yield the lines of table 4: seconds until all weights are on their GPUs, each GPU by its own
    host link, each node by its own drive; one copy, and the two that WAA has.
    """
    yield header(
        "model | A40 | GB a GPU | DRAM, the paper | GB/s a GPU of that | ours | two copies | SSD, "
        "the paper | GB/s a node of that | ours | two copies"
    )
    for size, (gpus, dram_s, ssd_s) in TABLE_4.items():
        model = Model(f"GPT-3 {size}", size, A40, gpus)
        costs, device = model.costs, model.costs.cluster.devices[0]
        dtype = costs.dtype(device)
        layers = costs.shape.layers * layer_weight_bytes(costs.shape, BITS, device, dtype)
        each = layers / gpus
        copy_s, read_s = each / device.host_link_bytes_per_s, each * A40.a_node / SSD_BYTES_PER_S
        yield table_row(
            [
                size,
                gpus,
                f"{each / _GB:.1f}",
                dram_s,
                f"{each / dram_s / _GB:.1f}",
                *(f"{copies * copy_s:.1f}" for copies in (1, 2)),
                ssd_s,
                f"{each * A40.a_node / ssd_s / _GB:.1f}",
                *(f"{copies * read_s:.1f}" for copies in (1, 2)),
            ]
        )


TIMED: tuple[tuple[Phase, int, int], ...] = (("prefill", 8, 256), ("decode", 64, 256))
"""Phase, requests and tokens of the layers of `degrees`."""


def degrees_table() -> Iterator[str]:
    """Yield the lines of the table: milliseconds of a layer's attention and rest, sums included."""
    names = [f"{phase}, {size} x {tokens}" for phase, size, tokens in TIMED]
    columns = [f"{name}: {part}" for name in names for part in ("attention", "rest", "of one GPU")]
    yield header(["model", "GPU", "degree", *columns])
    for model in (MODELS[0], MODELS[2]):
        devices, dtype = (
            model.costs.cluster.devices,
            model.costs.dtype(model.costs.cluster.devices[0]),
        )
        alone = {}
        for degree in (1, *DEGREES):
            if degree > model.whole_node:
                continue
            cells = []
            for phase, size, tokens in TIMED:
                group = group_of(devices[:degree])
                found = model.costs.latency.layer_seconds(group, BITS, phase, size, tokens, dtype)
                alone.setdefault(phase, found.whole_s)
                cells += [f"{1e3 * found.attention_s:.3f}", f"{1e3 * found.rest_s:.3f}"]
                cells.append(f"{found.whole_s / alone[phase]:.2f}")
            yield table_row([model.name, devices[0].accelerator.name, degree, *cells])

"""Recorded decode steps, by a recorder that starts operations and emulated kernels once more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from actors.attention.cuda import RangeAttention
from actors.attention.timer import AttentionTimer
from actors.messages import MicroBatch
from actors.profiling.layers import TimedLayers
from actors.stage import decode_graphs
from actors.stage.decode_graphs import DecodeGraphs, GraphSize, Shared, step_size
from actors.stage.stage import Stage
from planner.costs.memory import MOST_GRAPHS
from planner.profiles.design import LayerWorkload
from quant.backends.cuda.driver import Compute, cuda_recorder
from quant.devices import local_processor
from quant.linear import LayerForm
from tests.actors.configs import EVERY_CONFIG, LAYERS, SHARED_CONFIGS, STATE_CONFIGS
from tests.actors.models import save_tiny, specs_of
from tests.actors.own_kernels import (
    WITH_OWN_LAYERS,
    with_wide_heads,
)
from tests.actors.recorder import record, use_recorder
from tests.cuda_emulation import CPU, needs_compiler

SLOTS, TOKENS = 6, 600
EARLIER = 510
"""Tokens of a request that lie in the cache already: enough for its range to be split."""


def batch_of(*requests: tuple[int, int, int]) -> MicroBatch:
    """Requests of a slot, an earlier and a new number of tokens."""
    slots, starts, counts = (np.array(each) for each in zip(*requests, strict=True))
    return MicroBatch(slots, starts, counts, slots * TOKENS)


PASSES = (
    batch_of((0, 0, 5), (1, EARLIER, 12), (4, 0, 1)),
    *(batch_of((0, 5 + n, 1), (1, EARLIER + 12 + n, 1), (4, 1 + n, 1)) for n in range(2)),
    batch_of((5, 0, 3), (0, 7, 1)),  # one that comes, beside a decode step
    batch_of((5, 3, 1), (1, EARLIER + 14, 1), (0, 8, 1), (4, 3, 1)),
    *(batch_of((4, 4 + n, 1), (0, 9 + n, 1)) for n in range(2)),  # others are gone
    *(batch_of((4, 6 + n, 1), (5, 4 + n, 1), (0, 11 + n, 1)) for n in range(2)),
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "index", "kv_bits"),
    [
        ("mistral-sliding", 0, 8),
        ("bloom", 1, 8),
        *(
            pytest.param(*case, 16, marks=pytest.mark.rare)
            for case in product(WITH_OWN_LAYERS, (0, 1))
        ),
    ],
)
def test_a_replayed_step_is_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, index: int, kv_bits: int
) -> None:
    """Of the first stage and of the last one, with windows, ALiBi and 8-bit keys."""
    use_recorder(monkeypatch)
    save_tiny(tmp_path, with_positions(name))
    check_passes(tmp_path, index, kv_bits, CPU)


def with_positions(name: str) -> PretrainedConfig:
    config = with_wide_heads(name)
    config.max_position_embeddings = TOKENS
    return config


def check_passes(folder: Path, index: int, kv_bits: int, device: torch.device) -> None:
    """Hold hidden states and what lies in the cache against those without graphs."""
    given: Any = {"dtype": "float16", "kv_bits": kv_bits, "head_on_first": True}
    spec = specs_of((0, 2, LAYERS), SLOTS, TOKENS, **given)[index]
    plain, recorded = (
        Stage(replace(spec, cuda_graphs=graphs), folder, device, local_processor(device))
        for graphs in (False, True)
    )
    graphs = recorded._graphs
    assert graphs is not None
    assert plain._graphs is None
    drawn = torch.Generator().manual_seed(2)
    caches = plain._cache, recorded._cache
    held = [
        [part for stored in cache._all() for part in (stored.numbers, stored.scales)]
        for cache in caches
    ]
    held = [[part for part in parts if part is not None] for parts in held]
    for cache in caches:
        for rooms in cache._windows.values():
            rooms.restored(1, EARLIER)
        if cache.states is not None:
            cache.states.restored(1, EARLIER)
    for parts, cache in zip(held, caches, strict=True):
        states = cache.states
        parts += [] if states is None else [states.recurrent, states.inputs]
    for wanted, found in zip(*held, strict=True):
        before = torch.randint(-9, 9, wanted.shape, generator=drawn) / 16.0
        for stored in (wanted, found):
            stored.copy_(16 * before if stored.dtype == torch.int8 else before)
    for batch in PASSES:
        tokens = int(batch.counts.sum())
        inputs = torch.randint(3, 90, (tokens,), generator=drawn)
        if index > 0:
            inputs = torch.randn(tokens, plain.hidden_size, generator=drawn).half()
        wanted, found = plain.step(batch, inputs), recorded.step(batch, inputs)
        assert isinstance(wanted, Tensor)
        assert isinstance(found, Tensor)
        assert found.shape == wanted.shape
        errors = (found - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
        assert errors.max() <= 0.005
    sizes = sorted((size.rows, size.longest) for size in graphs._kept)
    assert sizes == [(2, 256), (4, 256), (4, 1024)]
    for wanted, found in zip(*held, strict=True):
        assert (found.float() - wanted.float()).abs().max() <= 0.02 * wanted.abs().max()


MODULES = ("qwen3_5_moe", "gpt_oss", "gemma4-shared", "glm4_moe", "qwen3_next", "olmo3")
IN_EACH = product(MODULES, (0, 1), (16, 8))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "index", "kv_bits"),
    [
        pytest.param(*case, marks=() if case == ("glm4_moe", 1, 8) else pytest.mark.rare)
        for case in IN_EACH
    ],
)
def test_steps_of_modules_are_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, index: int, kv_bits: int
) -> None:
    """With states of requests, and experts as they are asked; from nothing on."""
    use_recorder(monkeypatch)
    config: Any = copy.deepcopy((EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS)[name])
    config.max_position_embeddings = TOKENS
    if name == "gemma4-shared":
        given = {k: v for k, v in config.to_dict().items() if k != "per_layer_config"}
        config = type(config)(**given | {"head_dim": 16, "global_head_dim": 24})
    save_tiny(tmp_path, config)
    check_passes(tmp_path, index, kv_bits, CPU)


@needs_compiler
@pytest.mark.rare
def test_layers_are_profiled_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are replayed, but those in which attention is timed apart."""
    use_recorder(monkeypatch)
    form = LayerForm(16, local_processor(CPU), torch.float16, CPU)
    layers = TimedLayers(with_wide_heads("llama"), form)
    prepared, timer = layers.prepare(LayerWorkload("decode", 3, 20)), AttentionTimer(CPU)
    assert prepared.graphs is not None
    assert [size.rows for size in prepared.graphs._kept] == [4]
    layers.pass_through(prepared)
    assert timer.take_s() == 0
    layers.pass_through(prepared, timer)
    assert timer.take_s() > 0
    assert layers.prepare(LayerWorkload("prefill", 2, 9)).graphs is None


class Toy:
    """A step whose rows are multiplied by their lengths; a `careless` one has them from Python."""

    def __init__(self, size: GraphSize, like: Tensor, careless: bool = False) -> None:
        self.inputs, self.lengths = like.new_zeros(size.rows, 3), like.new_zeros(size.rows, 1)
        self.careless, self.number = careless, 0

    def fill(self, batch: MicroBatch, inputs: Tensor) -> None:
        self.inputs[: len(inputs)] = inputs
        self.lengths[: len(inputs), 0] = torch.from_numpy(batch.lengths)
        self.number = int(batch.lengths[0])

    def compute(self) -> Tensor:
        return self.inputs * (self.number if self.careless else self.lengths)

    def saved(self, batch: MicroBatch) -> tuple[MicroBatch, Callable[[], None]]:
        return batch, lambda: None


class Counted:
    """Graphs of toys, and how often they were recorded and eager."""

    def __init__(
        self, record: Callable[[Compute], Compute] = record, careless: bool = False
    ) -> None:
        self.recorded = self.eager = 0
        self._record = record
        self.graphs = DecodeGraphs(
            self._eagerly, self._size, partial(Toy, careless=careless), self._counted
        )

    def _size(self, batch: MicroBatch) -> GraphSize:
        return GraphSize(len(batch.slots), 0)

    def _eagerly(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        self.eager += 1
        return inputs * torch.from_numpy(batch.lengths)[:, None]

    def _counted(self, compute: Compute) -> Compute:
        self.recorded += 1
        return self._record(compute)

    def check(self, requests: int, length: int = 6) -> Tensor:
        """Compute a step of requests of one length, and what it must be."""
        inputs = torch.rand(requests, 3)
        batch = batch_of(*((slot, length - 1, 1) for slot in range(requests)))
        found = self.graphs.compute(batch, inputs)
        assert torch.equal(found, inputs * length)
        return found


def test_each_size_is_recorded_once_and_results_stay() -> None:
    toys = Counted()
    first = toys.check(2)
    second = toys.check(2, 8)
    kept = first.clone(), second.clone()
    toys.check(3)
    toys.check(2, 9)
    assert torch.equal(first, kept[0])
    assert torch.equal(second, kept[1])
    assert (toys.recorded, toys.eager) == (2, 0)


def test_sizes_that_take_turns_do_not_drive_each_other_out() -> None:
    toys = Counted()
    for _ in range(2):
        for requests in range(1, MOST_GRAPHS + 2):
            toys.check(requests)
    assert (toys.recorded, toys.eager) == (MOST_GRAPHS, 2)
    for _ in range(decode_graphs._IDLE_STEPS):
        toys.check(2)
    toys.check(MOST_GRAPHS + 1)  # in place of that of one request
    toys.check(1)
    assert (toys.recorded, toys.eager) == (MOST_GRAPHS + 2, 2)


@pytest.mark.parametrize("reason", ["it broke off", "a replay has other results"])
def test_what_cannot_be_replayed_is_not_used(reason: str) -> None:
    def broken(_: Compute) -> Compute:
        raise RuntimeError("it broke off\nby far")

    toys = Counted(broken) if reason == "it broke off" else Counted(careless=True)
    with pytest.warns(RuntimeWarning, match=f"not recorded as CUDA graphs: {reason}[^\n]*$"):
        toys.check(2)
    toys.check(2)
    toys.check(3)
    assert (toys.recorded, toys.eager) == (1, 3)


def test_numbers_that_are_not_finite_are_no_fault_of_a_replay() -> None:
    toys = Counted()
    inputs = torch.tensor([[1.0, torch.nan, torch.inf]])
    found = toys.graphs.compute(batch_of((0, 5, 1)), inputs)
    assert torch.equal(found.nan_to_num(), (6 * inputs).nan_to_num())
    toys.check(1)
    assert (toys.recorded, toys.eager) == (1, 0)


def test_sizes_by_rows_and_by_splits_of_the_longest_range() -> None:
    """Where there are blocks enough for the GPU, no range is split: one size serves all lengths."""
    own = RangeAttention(None, blocks=320)  # type: ignore[arg-type]

    def size(requests: int, length: int, kv_heads: int = 8) -> GraphSize:
        batch = batch_of(*((slot, length - 1, 1) for slot in range(requests)))
        return step_size([Shared(own, kv_heads, 4)], 4000, batch)

    assert size(40, 3) == size(33, 3999) == GraphSize(48, 4096)
    assert size(1, 3) == size(1, 256) == GraphSize(1, 256)
    assert size(1, 513) == size(1, 1000) == GraphSize(1, 1024)
    assert size(8, 513) == GraphSize(8, 1024)
    assert size(8, 1025) == size(8, 4000) == GraphSize(8, 4096)  # 5 splits at most


class PretendGraph:
    """torch's graph, and what is called around it, in order."""

    calls: ClassVar[list[object]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.calls.append("end")
        if "failed" in self.calls:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Warm-ups come before a recording; one that fails ends, for the allocator too."""
    calls, current = PretendGraph.calls, ["usual"]
    calls.clear()

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current[0] = stream
        yield
        current[0] = "usual"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "side")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    end_pool = "_cuda_endAllocateToPool"
    monkeypatch.setattr(torch._C, end_pool, lambda *ended: calls.append(ended), raising=False)

    def compute() -> Tensor:
        calls.append(current[0])
        if fails and current[0] == "side":
            calls.append("failed")
            raise ValueError("the real reason")
        return torch.ones(1)

    made = cuda_recorder.__wrapped__(torch.device("cuda", 1))
    begun = ["usual", "usual", ("begin", "pool", "thread_local"), "side"]
    if fails:
        with pytest.raises(ValueError, match="the real reason"):
            made(compute)
        assert calls == [*begun, "failed", "end", (1, "pool")]
    else:
        assert torch.equal(made(compute)(), torch.ones(1))
        assert calls == [*begun, "end", "replay"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("name", "kv_bits"), [("llama", 16), ("bloom", 8)])
def test_on_a_gpu(tmp_path: Path, name: str, kv_bits: int) -> None:
    save_tiny(tmp_path, with_positions(name))
    for index in (0, 1):
        check_passes(tmp_path, index, kv_bits, torch.device("cuda", 0))

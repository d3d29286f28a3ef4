"""Timed layers: what runs is a stage's layer, and times are corrected by the machine's speed."""

from __future__ import annotations

import copy
import itertools
import json
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from actors.attention.timer import AttentionTimer
from actors.profiling.beside import others_busy
from actors.profiling.layers import TimedLayers, longest_range
from actors.profiling.loading import LoadTask, time_loading
from actors.profiling.task import ProfileTask, ReferenceTimes, ReferenceWork, _Passes, measure
from actors.stage.model_config import config_of_values
from llmpq.profile.layers import timed_kinds
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import shape_from_config
from planner.model.layer_parts import Experts
from planner.profiles.design import LayerWorkload
from quant.common.errors import DeviceError
from quant.devices import local_processor
from quant.experts import QuantizedExperts
from quant.linear import LayerForm
from quant.scheme import BITWIDTHS, Processor
from tests.actors.configs import CONFIGS, EVERY_CONFIG, SHARED_CONFIGS, STATE_CONFIGS

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}
DECODE = LayerWorkload("decode", 3, 20)


def timed(config: PretrainedConfig, bits: int = 16) -> TimedLayers:
    form = LayerForm(bits, local_processor(CPU), torch.bfloat16, CPU)
    return TimedLayers(copy.deepcopy(config), form)  # which changes it


FAMILIES = ("llama", "qwen2-sliding", "qwen3", "mistral-sliding", "gpt_neox", "opt", "bloom")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture_passes_through_all_its_copies(name: str) -> None:
    layers = timed(CONFIGS[name])
    called: list[int] = []
    for index, layer in enumerate(layers._layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))
    for workload in (LayerWorkload("prefill", 2, 9), DECODE):
        prepared = layers.prepare(workload)
        called.clear()
        layers.pass_through(prepared)
        assert called == list(range(prepared.copies))
    assert prepared.copies > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_every_layer_is_timed_where_it_runs(name: str) -> None:
    """On a clock that goes on by a second whenever it is asked."""
    layers, timer = timed(CONFIGS[name]), AttentionTimer(CPU)
    for workload in (LayerWorkload("prefill", 2, 9), DECODE):
        prepared = layers.prepare(workload)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "actors.attention.timer.time.perf_counter",
                map(float, itertools.count()).__next__,
            )
            layers.pass_through(prepared, timer)
        assert timer.take_s() == prepared.copies
        assert timer.take_s() == 0


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma4-shared", "gpt_oss"])
def test_each_kind_of_layers_is_timed_by_itself(name: str) -> None:
    """Its own layers alone run, in the bytes that the planner counts, with their experts apart."""
    config = copy.deepcopy((EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS)[name])
    shape = shape_from_config(name, json.loads(config.to_json_string(use_diff=False)))
    device: Any = Here()
    form, called = LayerForm(4, local_processor(CPU), torch.bfloat16, CPU), list[int]()
    for kind in timed_kinds(shape)[:-1]:  # the last one is the head
        layers = TimedLayers(config, form, alike=kind.alike)
        for index, layer in zip(layers._own, layers._layers, strict=True):
            layer.register_forward_hook(lambda *_, index=index: called.append(index))
        timers = AttentionTimer(CPU), AttentionTimer(CPU)
        for workload in (LayerWorkload("prefill", 2, 9), DECODE):
            prepared = layers.prepare(workload)
            called.clear()
            layers.pass_through(prepared, *timers)
            assert len(called) == prepared.copies
            assert {*called} <= {*kind.alike}
            assert timers[0].take_s() > 0
            assert (timers[1].take_s() > 0) == (kind.shape.experts is not None)
            states = prepared.cache.states
            assert (states is not None and len(states.layers) > 0) == (kind.shape.delta is not None)
        assert layers.weight_bytes == layer_weight_bytes(kind.shape, 4, device, "bfloat16")


def test_random_inputs_ask_experts_about_evenly() -> None:
    """As the planner counts them: E (1 - (1 - k/E)^tokens) of E are read for some tokens."""
    layers = timed(EVERY_CONFIG["qwen3_moe"])
    asked: list[torch.Tensor] = []
    for module in layers._layers[0].modules():
        if isinstance(module, QuantizedExperts):
            module.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[1]))
    layers.pass_through(layers.prepare(LayerWorkload("prefill", 4, 100)))
    experts = Experts(6, 2, 32)
    for tokens in (1, 2, 4):
        read = [len(part.unique()) for part in asked[-1].split(tokens)]
        assert sum(read) / len(read) == pytest.approx(experts.asked(tokens), rel=0.1)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([3], range(3, 4)),
        ([0, 1, 2, 4, 5, 6], range(0, 7, 2)),
        ([3, 7, 11, 15, 19], range(3, 19, 4)),
        ([0, 3, 4], range(0, 6, 3)),
    ],
)
def test_layers_that_are_timed_lie_evenly(numbers: list[int], found: range) -> None:
    assert longest_range(numbers) == found


def test_decode_steps_of_unlike_requests_attend_to_all_that_each_has() -> None:
    layers = timed(CONFIGS["llama"])
    workload = LayerWorkload("decode", 3, 20, unlike=True)
    prepared = layers.prepare(workload)
    batch = prepared.batch
    assert batch.starts.tolist() == list(workload.lengths) == [10, 20, 30]
    assert batch.begins.tolist() == [0, 11, 32]
    assert prepared.cache.addresses(batch).in_place is None, "a GPU gathers them"
    (stored, *_) = prepared.cache.of_tokens(0, 63)
    assert stored.abs().amax((0, 2)).ne(0).all()


def test_long_prompts_pass_through_one_layer() -> None:
    """As they take so long, and a pass through several would tell no more."""
    layers = timed(CONFIGS["llama"])
    copies = [layers.prepare(LayerWorkload("prefill", 2, length)).copies for length in (64, 128)]
    assert copies == [2, 1]


def test_prompts_of_unlike_lengths_are_a_workload() -> None:
    """Ranges one after another, and as many tokens as all have."""
    prompts = LayerWorkload("prefill", 3, 30, (9, 2, 30))
    layers = timed(CONFIGS["llama"])
    prepared = layers.prepare(prompts)
    batch = prepared.batch
    assert (batch.counts.tolist(), batch.begins.tolist()) == ([9, 2, 30], [0, 9, 11])
    assert len(prepared.inputs) == prompts.tokens == 41
    assert layers.kv_bytes(prompts) == layers.kv_bytes(LayerWorkload("prefill", 1, 41))


class Operations(TorchDispatchMode):
    """Counts those of the products of linears and of attention, of all tokens with all."""

    count = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.linear.default:
            self.count += 2 * args[0].numel() * len(args[1])
        elif function is torch.ops.aten.scaled_dot_product_attention.default:
            self.count += 4 * args[0].numel() * args[1].shape[-2]
        return function(*args, **(kwargs or {}))


def test_attention_and_the_rest_of_a_layer_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that shows the operations until now: those of attention grow with the square of
    the length, those of linears with the length.
    """
    todo = {16: tuple(LayerWorkload("prefill", 1, length) for length in (256, 1024))}
    with Operations() as done:
        monkeypatch.setattr(time, "perf_counter", lambda: done.count)
        monkeypatch.setattr(ReferenceWork, "run", lambda _: ReferenceTimes(1.0, 1.0))
        *_, state = measure(ProfileTask(TINY, "float32", todo, threads=1, rounds=1))
    width, inner, keys = TINY["hidden_size"], TINY["intermediate_size"], 32
    for each in state.measured:
        length = each.workload.length
        linears = 2 * length * width * (2 * width + 2 * keys + 3 * inner)
        assert each.attention_s == pytest.approx(4 * width * length**2)
        assert each.seconds == pytest.approx(4 * width * length**2 + linears)


def test_what_stands_before_is_filled() -> None:
    """Zeros would be read from one page of memory, and faster than any request's."""
    prepared = timed(CONFIGS["llama"]).prepare(DECODE)
    cache = prepared.cache
    for stored in (each.numbers for each in (*cache._keys.values(), *cache._values.values())):
        requests = stored.unflatten(1, (3, -1))
        assert bool((requests[:, :, :20] != 0).any(dim=-1).all())
    assert cache.nbytes == pytest.approx(timed(CONFIGS["llama"]).kv_bytes(DECODE), rel=0.1)


class Here:
    """As much of a planner's device as byte rules ask for: kernels go by this machine's units."""

    processor = local_processor(CPU)


@pytest.mark.parametrize("bits", BITWIDTHS)
def test_a_layer_holds_what_the_planner_counts(bits: int) -> None:
    device: Any = Here()
    layers = timed(config_of_values(TINY), bits)
    planned = layer_weight_bytes(shape_from_config("tiny", TINY), bits, device, "bfloat16")
    assert layers.weight_bytes == planned


def test_a_slow_moment_is_taken_out() -> None:
    """Half of the passes at half the speed: the same times, no spread."""
    passes = _Passes(16, DECODE, "plain", seconds=[2e-3, 4e-3] * 4, reference_s=[1e-3, 2e-3] * 4)
    measured = passes.measured(usual_reference_s=1e-3)
    assert measured.seconds == pytest.approx(2e-3)
    assert measured.raw_s == pytest.approx(3e-3)
    assert measured.spread == pytest.approx(0.0, abs=1e-9)
    assert measured.repetitions == 8
    assert passes.measured(2e-3).seconds == pytest.approx(4e-3)


def test_a_group_of_workloads_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are measured in turns, so that none is done long before the others."""
    monkeypatch.setattr("actors.profiling.task.TELL_S", -1.0)
    todo = {16: (LayerWorkload("prefill", 2, 8), DECODE)}
    *within, done, last = measure(ProfileTask(TINY, "float32", todo, threads=1, rounds=12))
    assert len(within) == 12
    assert all(state.measured == () and state.left == 2 for state in within)
    told = [state.under_way for state in within]
    assert told[:9] == [0] * 9
    assert told == sorted(told)
    assert (len(done.measured), done.under_way, last.left) == (2, 0, 0)


def test_a_task_measures_every_workload_or_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.profiling.task.TELL_S", 1e9)
    todo = {bits: (DECODE, LayerWorkload("prefill", 1, 16)) for bits in (4, 16)}
    task = ProfileTask(TINY, "bfloat16", todo, threads=1, rounds=2)
    states = list(measure(task))
    assert [(len(s.measured), s.left) for s in states] == [(4, 0), (4, 0)], "all in turns"
    assert {(m.bits, m.workload) for m in states[-1].measured} == {
        (bits, workload) for bits, workloads in todo.items() for workload in workloads
    }
    assert all(m.seconds > 0 and m.repetitions == 2 for m in states[-1].measured)
    assert {each.backend for each in states[-1].measured if each.bits == 16} == {"plain"}
    (state,) = measure(ProfileTask(TINY, "bfloat16", todo, budget_s=-1.0))
    assert (state.measured, state.left) == ((), 4)
    monkeypatch.setattr("actors.profiling.task._GROUP_BYTES", 1)
    assert [s.left for s in measure(task)] == [3, 2, 1, 0, 0], "one by one where there is no room"


def test_a_head_takes_longer_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    todo = {16: tuple(LayerWorkload("decode", rows, 0) for rows in (1, 256))}
    with Operations() as done:
        monkeypatch.setattr(time, "perf_counter", lambda: done.count)
        monkeypatch.setattr(ReferenceWork, "run", lambda _: ReferenceTimes(1.0, 1.0))
        *_, state = measure(ProfileTask(TINY, "float32", todo, threads=1, rounds=1, is_head=True))
    for each in state.measured:
        assert (each.attention_s, each.experts_s) == (None, None)
        rows = each.workload.batch_size
        assert each.raw_s == pytest.approx(2 * rows * TINY["hidden_size"] * TINY["vocab_size"])


@pytest.mark.rare
def test_other_processes_are_busy_as_long_as_it_is_measured() -> None:
    todo = {16: (LayerWorkload("decode", 1, 0),)}
    task = ProfileTask(TINY, "float32", todo, threads=1, rounds=1, is_head=True, beside=1)
    with others_busy(task):
        (child,) = (each for each in psutil.Process().children() if "beside" in str(each.cmdline()))
        before = child.cpu_times().user
        while child.cpu_times().user < before + 0.1:
            *_, state = measure(task)
    assert len(state.measured) == 1
    assert not child.is_running()


def test_a_process_that_cannot_be_busy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.profiling.beside.sys.executable", "/bin/false")
    with pytest.raises(DeviceError, match="busy beside"):
        others_busy(ProfileTask(TINY, "float32", {}, beside=1)).__enter__()


def test_reference_work_takes_some_time() -> None:
    work = ReferenceWork(CPU)
    first = work.now()
    times = work.run()
    took_s = work.now() - first
    assert 0 < times.seconds("decode") == times.memory_s < took_s
    assert times.seconds("prefill") ** 2 == pytest.approx(times.compute_s * times.memory_s)


@pytest.mark.parametrize(
    ("instructions", "dtype"), [(("avx512_bf16",), torch.bfloat16), ((), torch.float32)]
)
def test_a_cpu_that_computes_in_float32_is_not_held_up_by_bfloat16(
    monkeypatch: pytest.MonkeyPatch, instructions: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Those without instructions for it take 200 times as long for its product."""
    monkeypatch.setattr(
        "actors.profiling.task.local_processor",
        lambda _: Processor(instruction_sets=frozenset(instructions)),
    )
    used = {work._left.dtype for work in (ReferenceWork(CPU), ReferenceWork(CPU, torch.float16))}
    assert used == {dtype}
    assert ReferenceWork(CPU, torch.float32)._left.dtype == torch.float32


def test_prompts_pass_in_the_parts_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 prompts of 9 tokens, 20 at once: two, two and one; the same results as all at once."""
    layers = timed(CONFIGS["llama"])
    prepared = layers.prepare(LayerWorkload("prefill", 5, 9))
    passed: list[int] = []
    width = CONFIGS["llama"].hidden_size
    layers._layers[0].register_forward_hook(
        lambda _, given, __: passed.append(given[0].numel() // width)
    )
    layers.pass_through(prepared)
    monkeypatch.setattr("actors.stage.stage.CPU_TOKENS_AT_ONCE", 20)
    layers.pass_through(prepared)
    assert passed == [45, 18, 18, 9]


def test_a_workload_is_known_by_its_noise_or_its_length() -> None:
    task = ProfileTask(TINY, "float32", {})
    quiet = _Passes(16, DECODE, "plain", seconds=[1e-3, 1.001e-3] * 8, reference_s=[1e-3] * 16)
    assert quiet.is_known(4, task)
    noisy = _Passes(16, DECODE, "plain", seconds=[1e-3, 2e-3] * 8, reference_s=[1e-3] * 16)
    assert not noisy.is_known(4, task)
    slow = _Passes(16, DECODE, "plain", seconds=[0.1, 0.2] * 8, reference_s=[1e-3] * 16)
    assert slow.is_known(4, task)
    once = _Passes(16, DECODE, "plain", seconds=[0.3], reference_s=[1e-3])
    assert not once.is_known(4, task)
    assert once.is_known(4, replace(task, least_rounds=1))


def test_every_bitwidth_is_loaded_from_where_it_can_come() -> None:
    loads = time_loading(LoadTask(TINY, "bfloat16", BITWIDTHS, threads=1))
    found = {(load.bits, load.origin) for load in loads}
    cached = {(bits, "cache") for bits in BITWIDTHS if bits != 16}
    assert found == {(bits, "checkpoint") for bits in BITWIDTHS} | cached
    shape = shape_from_config("tiny", TINY)
    device: Any = Here()
    for load in loads:
        assert load.seconds > 0
        assert load.checkpoint_bytes == 2 * shape.layer_parameters
        assert load.held_bytes == layer_weight_bytes(shape, load.bits, device, "bfloat16")


def test_what_counts_as_from_the_cache_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is written, the checkpoint's layers are not quantized again."""
    filled: list[str] = []
    from quant.loading import loader

    fill = loader._fill_layer
    monkeypatch.setattr(
        loader,
        "_fill_layer",
        lambda load, checkpoint: (filled.append(load.name_prefix), fill(load, checkpoint)),
    )
    time_loading(LoadTask(TINY, "bfloat16", (4,), threads=1))
    layers, turns = 4, 3
    assert len(filled) == layers * (1 + turns + 1)


@pytest.mark.parametrize("name", ["opt", "bloom", "gpt_neox", "qwen2-sliding", "qwen3_5_moe"])
def test_other_architectures_load(name: str) -> None:
    values = (CONFIGS | STATE_CONFIGS)[name].to_dict()
    assert len(time_loading(LoadTask(values, "bfloat16", (8,), threads=1))) == 2

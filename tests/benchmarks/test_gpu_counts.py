"""Counts of decode steps, against what plans count and closed forms."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from actors.attention.addresses import Scoring
from benchmarks.gpu.counting import Recorded, Started
from benchmarks.gpu.counts import Case as Counted
from benchmarks.gpu.counts import chosen, compiled, parse, unlike
from planner.costs.machine import REPLAYED_S
from planner.costs.roofline import layer_launches
from tests.actors.attention.test_cuda import Case, attention, ragged
from tests.cuda_emulation import CPU, needs_compiler

LARGE = Counted("llama-13b", "V100-32G", 16, 16, 32, 1024)
GROUPED = Counted("llama-3-8b", "A100", 16, 16, 32, 1024)


@pytest.mark.parametrize("case", [LARGE, GROUPED])
def test_own_kernels_move_keys_and_values_once(case: Counted) -> None:
    own, other = (each.attention_bytes / case.kv_layer_bytes for each in (case.own, case.other))
    assert 1 <= own <= 1.1
    assert other > 2.9  # copied, and read again


@pytest.mark.parametrize("case", [LARGE, GROUPED])
def test_plans_count_the_bytes_and_launches_that_are_counted(case: Counted) -> None:
    """But for embedding, head and sampling, which are no part of a layer."""
    assert case.own.kernels.total() == layer_launches(case.shape, case.kv_bits, own_kernels=True)
    launches_s = case.shape.layers * case.own.kernels.total() * REPLAYED_S
    assert case.planned_layers_s == pytest.approx(case.moved_s(case.own) + launches_s, rel=0.05)


def test_lengths_are_unlike_and_of_the_mean() -> None:
    for requests in (1, 2, 7, 32):
        lengths = unlike(requests, 1025)
        assert sum(lengths) == requests * 1025
        assert len(set(lengths)) == (1 if requests == 1 else 2 + requests % 2)


def test_each_number_is_changed_alone() -> None:
    options = parse(["--gpus", "T4", "A100", "--models", "opt-30b", "--bits", "4", "16"])
    found = [(case.gpu, case.bits, case.kv_bits, case.requests) for case in chosen(options)]
    first = ("T4", 4, 16, 32)
    assert found[:3] == [first, ("A100", 4, 16, 32), ("T4", 16, 16, 32)]
    assert all(sum(map(str.__ne__, map(str, each), map(str, first))) <= 1 for each in found)


def test_what_an_assembler_says_is_read() -> None:
    log = """ptxas info    : 32 bytes gmem, 64 bytes cmem[4]
ptxas info    : Compiling entry function 'merge' for 'sm_70'
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 412 bytes cmem[0]
ptxas info    : Compiling entry function 'attend_8' for 'sm_70'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 195 registers, used 1 barriers, 18528 bytes smem, 476 bytes cmem[0]
"""
    assert list(compiled(log)) == [("merge", 32, 12, 0), ("attend_8", 195, 0, 18528)]


@needs_compiler
@pytest.mark.rare
def test_counted_bytes_are_those_that_emulated_blocks_load() -> None:
    """Of attention; what it writes is counted too, and all of the cache."""
    case = Case(ragged((900, 1), (813, 1)), (8, 2), 128)
    kernels = attention(128, torch.float16, coded=False)
    driver, held = kernels.kernels.driver, (case.keys, case.values)
    driver.moved_bytes.restype = ctypes.c_size_t
    driver.moved_bytes()
    out = kernels.attend(case.query, case.where, Scoring(0.1), held)
    loaded = driver.moved_bytes()
    started = Started()
    recorded = replace(kernels, kernels=Recorded(driver, {}, CPU, started, set(), 0.0))
    recorded.attend(case.query, case.where, Scoring(0.1), held)
    unread = sum(each.nbytes for each in held)
    unread -= unread * int(case.batch.lengths.sum()) // held[0].numbers.shape[1]
    counted = started.moved_bytes.total() - out.nbytes - unread
    assert counted == pytest.approx(loaded, rel=0.03)

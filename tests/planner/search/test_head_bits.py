"""Bits of embedding and LM head as a choice of plans: what fits, what is weighed, what is told."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import embedding_bytes, head_bytes
from planner.explanation.planned_assignment import rebuilt_costs
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import (
    HEAD_SHARE,
    HEAD_TIMES,
    OmegaContent,
    load_omega,
    save_omega,
)
from planner.search.find import find_plan
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Workload
from quant.common.errors import DoesNotFitError, SpecError
from quant.common.units import MIB
from quant.scheme import Processor
from tests.planner.problems import FOUR_BITS

SHAPE = model_shape("qwen2.5-0.5b")
WORKLOAD = Workload(1, 64, 16)
BITS = (4, 8, 16)


def cluster_of(mib: float, devices: int = 1) -> ClusterSpec:
    found = ClusterSpec.from_counts(["T4"], [devices])
    small = tuple(replace(each, memory_bytes=round(mib * MIB)) for each in found.devices)
    return replace(found, devices=small)


def planned(mib: float, devices: int = 1, **options: Any) -> PlanSpec:
    chosen = PlanOptions(**{"bits": BITS, "theta": 1.0, "memory_margin": 0.0} | options)
    return find_plan(cluster_of(mib, devices), SHAPE, "qwen2.5-0.5b", WORKLOAD, chosen).plan


def needed_mib(**options: Any) -> float:
    """Least memory of the device, of which a share is the allocator's."""
    (stage,) = planned(16000, **{"head_bits": (16,)} | options).stages
    slack = 0.02
    own = stage.memory_bytes - slack * 16000 * MIB
    return own / (1 - slack) / MIB + 1


def test_one_weight_of_the_kernel_is_counted_for_a_tied_head() -> None:
    """A row's codes and its scale, once on one stage and twice on two; an untied one always."""
    gpu, rows, width = Processor(compute_capability=(7, 5)), SHAPE.vocab_size, SHAPE.hidden_size
    coded, rotated = rows * width + 4 * rows, rows * width + 4 * rows + 4 * width
    narrow = rows * width * 6 // 8 + rows * width // 32 * 2 + 2 * rows
    for tied, (bits, looked_up, held) in product(
        (True, False), ((8, coded, rotated), (6, narrow, narrow))
    ):
        shape = SHAPE.with_all(head_bits=bits, tied_embeddings=tied)
        together = embedding_bytes(shape, "float16", gpu, with_head=True)
        assert together == (held if tied else looked_up)
        assert head_bytes(shape, "float16", gpu, on_first=True) == (0 if tied else held)
        assert embedding_bytes(shape, "float16", gpu) == looked_up
        assert head_bytes(shape, "float16", gpu) == held
    assert SHAPE.with_all(head_bits=8).fingerprint() == SHAPE.fingerprint()


def test_what_does_not_fit_names_the_option_that_helps() -> None:
    full, coded = (needed_mib(bits=(4,), head_bits=(bits,)) for bits in (16, 8))
    assert full - coded == pytest.approx(SHAPE.head_parameters / MIB, rel=0.02)
    between = (full + coded) / 2
    with pytest.raises(DoesNotFitError, match=r"LM head in 8 bit \(--head_bits 8\)"):
        planned(between, bits=(4,), head_bits=(16,))
    found = planned(between, bits=(4,))
    assert found.head_bits == 8
    assert found.stages[0].memory_bytes <= between * MIB


def test_ends_are_weighed_with_layers() -> None:
    """The sum of what both lose decides: ends take 8 bit before layers take 4."""
    low, high = needed_mib(bits=(4,)), needed_mib(bits=(8,))
    chosen = []
    for share in (0.1, 0.9, 2.0):
        mib = low + share * (high - low)
        each = [planned(mib, head_bits=(bits,), theta=1e6) for bits in (6, 8, 16)]
        for named in ((16, 8, 6), ()):
            found = planned(mib, head_bits=named, theta=1e6)
            assert found.solver.sensitivity == min(plan.solver.sensitivity for plan in each)
            chosen.append(found.head_bits)
    assert chosen == [6, 6, 8, 8, 16, 16]
    assert planned(16000, head_bits=(8, 16), theta=1e6).solver.sensitivity == 0


def test_ends_have_16_bit_where_layers_have_8_and_nobody_asks() -> None:
    """Even where 8 bit would be faster, at no worth of quality."""
    assert planned(16000, bits=(8, 16), theta=0.0).head_bits == 16
    assert planned(16000, bits=(8, 16), head_bits=(6, 8, 16), theta=0.0).head_bits == 6
    assert planned(16000, bits=(4, 16), theta=0.0).head_bits == 6


def test_a_plan_counts_what_its_ends_lose_beside_its_layers() -> None:
    plan = planned(16000, bits=(16,), head_bits=(8,))
    request = PlanningRequest.of(
        cluster_of(16000), SHAPE, WORKLOAD, PlanOptions(bits=(8,), theta=1.0)
    )
    layers = float(costs_of(request)[0].sensitivity.sum())
    assert plan.solver.sensitivity == pytest.approx(HEAD_SHARE * layers)
    assert plan.quality is not None
    assert 0 < plan.quality.divergence < 0.002


def test_measured_losses_of_ends_come_from_the_file(tmp_path: Path) -> None:
    path, matrix = tmp_path / "omega.json", np.ones((SHAPE.layers, 1)) * [[4.0, 2.0, 1.0, 0.0]]
    content = OmegaContent(FOUR_BITS, SHAPE.fingerprint(), matrix)
    assumed = HEAD_SHARE * SHAPE.layers
    for head, eight, six in (
        ({6: 0.75, 8: 0.25}, 0.25, 0.75),
        ({8: 0.25}, 0.25, HEAD_TIMES[6] * 0.25),
        (None, assumed, HEAD_TIMES[6] * assumed),
    ):
        save_omega(path, replace(content, head=head))
        omega = load_omega(path, SHAPE, (4, 16))
        for bits, expected in ((8, eight), (6, six)):
            added = omega.with_head(bits).matrix - omega.matrix
            assert added[:-1].sum() == 0
            assert added[-1] == pytest.approx([expected] * 2)
        assert omega.with_head(16) is omega


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (0.25, None),  # as files had it before there were heads of 6 bit
        (-1, "head is -1; a number of at least 0"),
        ({"6": 0.5}, "head has 6 bits; .* at 6 and 8 bit"),
        ({"8": 0.5, "x": 1}, "head has 8, x bits; .* at 6 and 8 bit"),
        ({"8": True}, "head is True; a number of at least 0"),
    ],
)
def test_what_files_say_of_ends_is_checked(tmp_path: Path, head: Any, problem: str | None) -> None:
    path, matrix = tmp_path / "omega.json", np.ones((SHAPE.layers, 1)) * [[4.0, 2.0, 1.0, 0.0]]
    save_omega(path, OmegaContent(FOUR_BITS, SHAPE.fingerprint(), matrix))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head": head}))
    if problem is None:
        assert load_omega(path, SHAPE, (4, 16)).head[8] == head
        return
    with pytest.raises(SpecError, match=problem):
        load_omega(path, SHAPE, (4, 16))


def test_a_file_says_its_ends_and_their_bytes_are_checked() -> None:
    plan = planned(16000, 2, head_bits=(8, 16), keep_all_devices=True, theta=0.0)
    assert plan.head_bits == 8
    check_plan(plan, SHAPE)
    with pytest.raises(SpecError, match=r"memory\.embedding"):
        check_plan(replace(plan, head_bits=16), SHAPE)
    assert rebuilt_costs(plan).shape.head_bits == 8


def test_products_of_coded_heads_are_timed_as_such() -> None:
    device = cluster_of(16000).devices[0]
    six, eight, full = (
        RooflineLatency(SHAPE.with_all(head_bits=bits)).final_s(device, 1, "float16")
        for bits in (6, 8, 16)
    )
    assert 0.5 < eight / full < 0.8
    assert 0.75 < six / eight < 0.95

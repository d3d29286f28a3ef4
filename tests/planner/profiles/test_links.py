"""Measured hops: the line fitted to them, its use by the planner, and bad files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.explanation.what_if import Question, _changed
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.links import (
    LinkRow,
    LoadRow,
    Origin,
    Way,
    fit_links,
    links_beside,
    links_path,
    loading_path,
    loading_s,
    read_measured,
)
from planner.profiles.rows import read_table, write_table
from planner.profiles.sensitivity import default_sensitivity
from planner.search.request import cost_model
from planner.workload import Workload
from quant.common.errors import InputError, SpecError
from quant.common.units import MIB
from tests.planner.plan_alone import find_plan
from tests.planner.problems import FOUR_BITS, transfer_s

CLUSTER = ClusterSpec.from_counts(["T4", "V100-32G"], [2, 1], internode_gbit_per_s=8)
T4, T4_TOO, V100 = CLUSTER.devices
SIZES = (4096, 65536, 1 << 20, 4 << 20)
HEADER = "version,sender,receiver,place,way,payload_bytes,seconds,spread,repetitions"
GOOD = "1,T4,V100-32G,network,gloo,4096,0.001,0.1,9"
LAYER_HEADER = "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer"


def hop(size: int, seconds: float, way: Way = "gloo") -> LinkRow:
    return LinkRow("V100-32G", "T4", "network", way, size, seconds, 0.1, 60)


def line(latency_s: float, rate: float, way: Way = "gloo") -> tuple[LinkRow, ...]:
    return tuple(hop(size, latency_s + size / rate, way) for size in SIZES)


def test_a_line_is_found_again_by_the_way_that_runs_take() -> None:
    (link,) = fit_links((*line(5e-4, 1e9, "ray"), *line(2e-4, 3e9)), "t.links.csv")
    assert (link.one, link.other, link.way) == ("T4-16GB", "V100-SXM2-32GB", "gloo")
    assert link.latency_s == pytest.approx(2e-4)
    assert link.bytes_per_s == pytest.approx(3e9)
    (by_nccl,) = fit_links((*line(2e-4, 3e9), *line(1e-5, 2e11, "nccl")))
    assert (by_nccl.way, by_nccl.bytes_per_s) == ("nccl", pytest.approx(2e11))
    (by_ray,) = fit_links(line(5e-4, 1e9, "ray"))
    assert by_ray.latency_s == pytest.approx(5e-4)
    assert fit_links([hop(4096, 1e-3), hop(4096, 2e-3)]) == ()


def test_relative_errors_are_least() -> None:
    """Against numpy's least squares, where neither term wants to be negative."""
    noise = np.random.default_rng(0).uniform(0.8, 1.25, len(SIZES))
    rows = [
        replace(row, seconds=row.seconds * n) for row, n in zip(line(1e-3, 2e9), noise, strict=True)
    ]
    (link,) = fit_links(rows)
    seconds = np.array([row.seconds for row in rows])
    matrix = np.stack([1 / seconds, np.array(SIZES) / seconds], axis=1)
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(1 / per_byte_s, rel=1e-6)


def test_measured_links_count_more_than_the_file() -> None:
    measured = replace(CLUSTER, measured_links=fit_links(line(2e-4, 3e9)))
    for pair in ((T4, V100), (V100, T4_TOO)):
        assert transfer_s(measured, *pair, 3_000_000) == pytest.approx(1.2e-3)
        assert transfer_s(CLUSTER, *pair, 3_000_000) > 3e-3
    assert transfer_s(measured, T4, T4_TOO, 10**6) == transfer_s(CLUSTER, T4, T4_TOO, 10**6)
    assert transfer_s(measured, T4, T4, 10**6) == 0
    assert measured.fingerprint() != CLUSTER.fingerprint()
    assert measured.link_provenance(T4, T4_TOO) is None
    assert measured.link_provenance(T4, T4) is None
    provenance = measured.link_provenance(T4, V100)
    assert provenance is not None
    assert provenance.startswith("hop to V100-SXM2-32GB of another node measured (gloo")


def test_a_plan_takes_them_from_beside_the_profile(tmp_path: Path) -> None:
    profile = tmp_path / "times.csv"
    profile.write_text(LAYER_HEADER + "\n")
    cluster = ClusterSpec.from_counts(["T4", "V100-32G"], [1, 1], internode_gbit_per_s=8)
    shape, workload = model_shape("opt-13b"), Workload(8, 128, 10)
    options = PlanOptions(profiles=profile, keep_all_devices=True, group=10)
    before = find_plan(cluster, shape, "opt-13b", workload, options).plan
    write_table(links_path(profile), LinkRow, line(0.0, 1e12))
    after = find_plan(cluster, shape, "opt-13b", workload, options).plan
    assert "measured" not in before.stages[0].provenance
    assert "measured (gloo, times.links.csv)" in after.stages[0].provenance
    first = after.stages[0]
    payload = after.micro_batches.prefill * 128 * shape.hidden_size * 2
    assert first.prefill_comm_s == pytest.approx(payload / 1e12)
    assert after.predicted.latency_s < before.predicted.latency_s
    assert after.origin is not None


def test_experts_come_from_hosts_as_fast_as_copies_were_measured(tmp_path: Path) -> None:
    """Tokens there and back, and the codes of experts that stream, without the datasheet's link."""
    profile, size = tmp_path / "times.csv", 1 << 20
    profile.write_text(LAYER_HEADER + "\n")
    rows = [
        LinkRow("T4", "CPU", "host", "copy", times * size, 1e-3 + times * size / 1e8, 0.1, 30)
        for times in (1, 2, 4)
    ]
    write_table(links_path(profile), LinkRow, rows)
    node = {"name": "a", "accelerators": {"T4": 1}, "host_memory_gib": 64}
    cluster = ClusterSpec.from_dict({"name": "c", "nodes": [node]})
    shape, options = model_shape("qwen3-30b-a3b"), PlanOptions(profiles=profile, bits=FOUR_BITS)
    sensitivity, (t4,) = default_sensitivity(shape, options.bits), cluster.devices
    costs = cost_model(cluster, shape, Workload(8, 128, 10), options, sensitivity)
    found = costs.latency.hosted_experts_s(t4, 16, 10, "float16")
    estimate = RooflineLatency(shape).hosted_experts_s(t4, 16, 10, "float16")
    assert found.copies_s == pytest.approx(2 * (1e-3 + 10 * 2048 * 2 / 1e8))
    assert found.computed_s == estimate.computed_s
    held = 128 * (1 - (1 - 8 / 128) ** 10) * 3 * 2048 * 768 * 2
    by_link = held / 1e8 - held / t4.host_link_bytes_per_s
    assert found.streamed_s - estimate.streamed_s == pytest.approx(by_link)


def test_faster_links_are_faster_where_they_are_measured(tmp_path: Path) -> None:
    profile = tmp_path / "times.csv"
    profile.write_text(LAYER_HEADER + "\n")
    write_table(links_path(profile), LinkRow, line(2e-4, 3e9))
    shape, options = model_shape("opt-13b"), PlanOptions(profiles=profile, bits=FOUR_BITS)
    sensitivity = default_sensitivity(shape, options.bits)
    costs = cost_model(CLUSTER, shape, Workload(8, 128, 10), options, sensitivity)

    class Planned:
        devices = CLUSTER.devices

    planned = Planned()
    planned.costs = costs  # type: ignore[attr-defined]
    changed, _ = _changed(planned, Question("links", 2.0))  # type: ignore[arg-type]
    assert changed.cluster.link_bytes_per_s(T4, V100) == pytest.approx(6e9)


def test_rows_come_back_and_none_are_needed(tmp_path: Path) -> None:
    path = links_path(tmp_path / "times.csv")
    assert path.name == "times.links.csv"
    assert links_beside(tmp_path / "times.csv") == ()
    rows = (*line(2e-4, 3e9), hop(7, 1 / 3, "ray"))
    write_table(path, LinkRow, rows)
    assert read_measured(path, LinkRow) == rows
    with pytest.raises(InputError, match="cannot write"):
        write_table(tmp_path / "none" / "x.csv", LinkRow, rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2", ":1: the columns must be version,sender"),
        (f"{HEADER}\n{GOOD.replace('1,T4', '2,T4')}", "version 2 of a newer llmpq"),
        (f"{HEADER}\n{GOOD.replace('T4', 'X9')}", ":2: sender is 'X9'"),
        (f"{HEADER}\n{GOOD.replace('network', 'moon')}", ":2: place is 'moon'"),
        (f"{HEADER}\n{GOOD.replace('0.001', '-1')}", ":2: seconds is '-1'"),
        (f"{HEADER}\n{GOOD.replace('0.001', 'nan')}", ":2: seconds is 'nan'"),
        (f"{HEADER}\n{GOOD.replace('4096', '4.5')}", ":2: payload_bytes is '4.5'"),
        (f"{HEADER}\n{GOOD},1", "as many fields"),
        (f"{HEADER}\n{GOOD[:-4]}", "as many fields"),
        ("\0", "times.links.csv"),
    ],
)
def test_bad_rows_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "times.links.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        read_measured(path, LinkRow)


def load(bits: int, origin: Origin, seconds: float, device: str = "T4") -> LoadRow:
    backend = "plain" if bits == 16 else "rows"
    return LoadRow(
        device, "opt", "float16", 0, bits, backend, origin, seconds, 10 * MIB, 5 * MIB, 3
    )


@pytest.fixture(scope="module")
def plan() -> PlanSpec:
    cluster = ClusterSpec.from_counts(["T4"], [3])
    options = PlanOptions(bits=(4, 16), keep_all_devices=True, group=4)
    return find_plan(cluster, model_shape("opt-30b"), "opt-30b", Workload(8, 128, 10), options).plan


def test_the_slowest_stage_counts(plan: PlanSpec) -> None:
    name = plan.stages[0].accelerator
    rows = [
        load(16, "checkpoint", 1.0, name),
        *(load(4, "checkpoint", s, name) for s in (2.9, 3.0, 9.0)),
        load(4, "cache", 0.5, name),
        load(4, "cache", 0.1, "A100"),
    ]
    four = [sum(b == 4 for b in stage.bitwidths) for stage in plan.stages]
    full = [len(s.bitwidths) - n for s, n in zip(plan.stages, four, strict=True)]
    assert max(four) > 0
    for origin, each in (("checkpoint", 3.0), ("cache", 0.5)):
        # layers of twice the size take twice as long
        wanted = max(2 * (n * each + f) for n, f in zip(four, full, strict=True))
        found = loading_s(rows, plan, 20 * MIB, "cache" if origin == "cache" else "checkpoint")
        assert found == pytest.approx(wanted)
    assert loading_s(rows[:1], plan, MIB, "checkpoint") is None
    assert loading_s([replace(r, dtype="float32") for r in rows], plan, MIB, "cache") is None
    assert loading_s([replace(r, threads=3) for r in rows], plan, MIB, "cache") is None


def test_rows_come_back(tmp_path: Path) -> None:
    path = loading_path(tmp_path / "t.csv")
    assert path.name == "t.loading.csv"
    rows = (load(3, "cache", 1 / 3), load(16, "checkpoint", 2.0))
    write_table(path, LoadRow, rows)
    assert read_table(path, LoadRow) == rows
    path.write_text(path.read_text().replace(",3,rows", ",7,rows"))
    with pytest.raises(SpecError, match=":2: bits is '7'"):
        read_table(path, LoadRow)

"""Cluster files: round trip, messages, links, and every shipped file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmpq import Cluster
from planner.cluster.accelerators import registry
from planner.cluster.device import Device
from planner.cluster.file import Emulation
from planner.cluster.spec import ClusterSpec
from planner.options import PlanOptions
from planner.plan.origin import PlanOrigin
from quant.common.errors import SpecError
from quant.common.units import GIB
from tests.paths import SPECS

FILE = """\
name: mixed
nodes:
  - name: a
    accelerators: {T4: 3, V100-32G: 1}
    usable_memory_gib: {T4: 14}
    host_memory_gib: 64.5
  - accelerators: CPU:2
    threads: 2
    memory_gib: 3
    link_gbyte_per_s: 7.3
network: {internode_gbit_per_s: 800}
"""
# LLM-PQ table 3: devices by nominal GB, and the model whose size matches the cluster.
PAPER = {
    1: "1xV100-32G",
    2: "1xA100-40G",
    3: "3xT4-16G + 1xV100-32G",
    4: "3xP100-12G + 1xV100-32G",
    5: "4xT4-16G + 2xV100-32G",
    6: "2xV100-32G + 2xA100-40G",
    7: "4xV100-32G + 4xA100-40G",
    8: "4xV100-32G + 2xA800-80G",
    9: "4xT4-16G",
    10: "4xV100-32G",
    11: "4xA800-80G",
}


def load(tmp_path: Path, text: str = FILE) -> ClusterSpec:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return ClusterSpec.from_yaml(path)


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_file_loads_and_round_trips(path: Path) -> None:
    cluster = ClusterSpec.from_yaml(path)
    assert ClusterSpec.from_dict(yaml.safe_load(cluster.to_yaml())) == cluster


@pytest.mark.parametrize(("number", "devices"), PAPER.items())
def test_paper_cluster_is_table_3(number: int, devices: str) -> None:
    cluster = ClusterSpec.from_yaml(SPECS / f"paper_{number:02d}.yaml")
    groups: dict[str, int] = {}
    for device in cluster.devices:
        family = device.accelerator.name.split("-")[0]
        size = device.accelerator.nominal_memory_bytes // GIB
        groups[f"{family}-{size}G"] = groups.get(f"{family}-{size}G", 0) + 1
    assert " + ".join(f"{count}x{kind}" for kind, count in groups.items()) == devices


def test_file_becomes_devices(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    names = [device.name for device in cluster.devices]
    assert names == [
        "a/T4-16GB:0",
        "a/T4-16GB:1",
        "a/T4-16GB:2",
        "a/V100-SXM2-32GB:0",
        "node1/CPU:0",
        "node1/CPU:1",
    ]
    t4, v100, cpu = cluster.devices[0], cluster.devices[3], cluster.devices[4]
    assert (t4.memory_bytes, v100.memory_bytes) == (14 * GIB, round(31.7 * GIB))
    assert (cpu.memory_bytes, cpu.threads, cpu.link_bytes_per_s) == (3 * GIB, 2, 7.3e9)
    assert t4.host_memory_bytes == round(64.5 * GIB)
    assert t4.custom_resource == "T4-16GB"  # Ray names one type of GPU a node
    assert cpu.custom_resource is None
    assert cluster.nodes == ("a", "node1")


def test_links(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    t4, other, v100, cpu = (cluster.devices[index] for index in (0, 1, 3, 4))
    assert cluster.link_bytes_per_s(t4, v100) == 16e9
    assert cluster.link_bytes_per_s(t4, cpu) == 100e9
    assert cluster.link_bytes_per_s(t4, t4) == float("inf")
    assert 0 == cluster.link_latency_s(t4, t4) < cluster.link_latency_s(t4, other)
    assert cluster.link_latency_s(t4, other) < cluster.link_latency_s(t4, cpu)


def test_emulated_devices_compute_on_the_host(tmp_path: Path) -> None:
    emulated = load(tmp_path, FILE + "emulate: {time_scale: 0}\n")
    real = load(tmp_path)
    assert emulated.emulate == Emulation(time_scale=0.0)
    for device, twin in zip(emulated.devices, real.devices, strict=True):
        assert (device.processor.is_cpu, device.runtime_bytes) == (True, 0)
        assert (device.default_dtype, device.custom_resource) == ("bfloat16", None)
        assert device.memory_bytes == twin.memory_bytes
    assert real.devices[0].processor.compute_capability == (7, 5)
    assert real.devices[0].runtime_bytes > 0
    assert emulated.fingerprint() != real.fingerprint()
    paced = load(tmp_path, FILE + "emulate: {time_scale: 2.5}\n")
    assert paced.fingerprint() == emulated.fingerprint()


def test_where_a_stand_in_computes_the_planned_bytes_are_the_accelerators(tmp_path: Path) -> None:
    played = load(tmp_path, FILE + "emulate: {time_scale: 0.1, stand_in: small}\n")
    real = load(tmp_path)
    assert played.emulate == Emulation(time_scale=0.1, stand_in="small")
    for device, twin in zip(played.devices, real.devices, strict=True):
        assert device.emulated
        assert device.custom_resource is None
        for trait in ("processor", "runtime_bytes", "default_dtype", "memory_bytes", "threads"):
            assert getattr(device, trait) == getattr(twin, trait)
    hosted = load(tmp_path, FILE + "emulate: {}\n")
    assert len({each.fingerprint() for each in (played, hosted, real)}) == 3
    text = tmp_path / "again.yaml"
    text.write_text(played.to_yaml())
    assert ClusterSpec.from_yaml(text) == played


def test_fingerprint_follows_budgets_not_names(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    assert load(tmp_path, FILE.replace("mixed", "x")).fingerprint() == cluster.fingerprint()
    assert load(tmp_path, FILE.replace("14}", "13}")).fingerprint() != cluster.fingerprint()


def priced(tmp_path: Path, *prices: float) -> ClusterSpec:
    """The cluster of `FILE` with `prices` of its two nodes."""
    first, second = prices
    text = FILE.replace("64.5\n", f"64.5\n    price_per_hour: {first}\n")
    return load(tmp_path, text.replace("7.3\n", f"7.3\n    price_per_hour: {second}\n"))


def test_prices_of_nodes_add_up_and_are_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    plain, cluster = load(tmp_path), priced(tmp_path, 1.25, 2)
    assert plain.price_per_hour is None
    assert cluster.price_per_hour == 3.25  # once a node, however many devices it has
    free = priced(tmp_path, 0, 0)
    assert free.price_per_hour == 0
    assert ClusterSpec.from_dict(yaml.safe_load(free.to_yaml())) == free
    assert cluster.fingerprint() == plain.fingerprint()
    again = ClusterSpec.from_dict(yaml.safe_load(cluster.to_yaml()))
    assert (again, again.price_per_hour) == (cluster, 3.25)
    unknown = [replace(each, node_price_per_hour=None) for each in cluster.devices[:4]]
    part = replace(cluster, devices=(*unknown, *cluster.devices[4:]))
    assert part.price_per_hour is None  # the other node's price is not that of the cluster
    left = replace(cluster, devices=cluster.devices[1:4])
    assert left.price_per_hour == 1.25  # a node that is gone is not paid for


def test_fingerprint_of_a_file_without_host_links_is_what_it_always_was(tmp_path: Path) -> None:
    """Plans that were saved before the key existed still belong to their cluster."""
    plain = load(tmp_path)
    assert plain.has_fingerprint("1c0dfa3b07fc9975")
    assert plain.has_fingerprint(plain.fingerprint())
    larger = load(tmp_path, FILE.replace("64.5\n", "65.5\n"))
    assert not plain.has_fingerprint(larger.fingerprint())
    same = load(tmp_path, FILE.replace("64.5\n", "64.5\n    host_link_gbyte_per_s: 16\n"))
    assert same.fingerprint() == plain.fingerprint()
    other = load(tmp_path, FILE.replace("64.5\n", "64.5\n    host_link_gbyte_per_s: 12\n"))
    assert other.fingerprint() != plain.fingerprint()


def test_nvlink_joins_gpus_of_one_type_only(tmp_path: Path) -> None:
    nodes = "nodes:\n  - {accelerators: {V100: 2, A100: 1}MORE}\n"
    cluster = load(tmp_path, "name: x\n" + nodes.replace("MORE", ""))
    v100, twin, a100 = cluster.devices
    assert cluster.link_bytes_per_s(v100, twin) == 150e9
    assert cluster.link_bytes_per_s(v100, a100) == 16e9 == cluster.link_bytes_per_s(a100, v100)
    stated = ", host_link_gbyte_per_s: 24.5"
    cluster = load(tmp_path, "name: x\n" + nodes.replace("MORE", stated))
    v100, twin, a100 = cluster.devices
    assert [d.host_link_bytes_per_s for d in cluster.devices] == [24.5e9] * 3
    assert cluster.link_bytes_per_s(v100, twin) == 150e9
    assert cluster.link_bytes_per_s(v100, a100) == 24.5e9
    assert ClusterSpec.from_dict(yaml.safe_load(cluster.to_yaml())) == cluster
    faster = v100.with_faster_links(10).node_link_bytes_per_s(a100.with_faster_links(10))
    assert faster == 245e9


def test_compute_dtype(tmp_path: Path) -> None:
    t4, cpu = (load(tmp_path).devices[index] for index in (0, 4))
    assert (t4.compute_dtype(), cpu.compute_dtype()) == ("float16", "bfloat16")
    assert t4.compute_dtype("float32") == "float32"
    with pytest.raises(SpecError, match=r"a/T4-16GB:0 has no bfloat16 arithmetic"):
        t4.compute_dtype("bfloat16")
    with pytest.raises(SpecError, match="'int4' is not one of auto, float32"):
        t4.compute_dtype("int4")


def test_counts_of_the_command_line() -> None:
    cluster = ClusterSpec.from_counts(["T4", "V100-32G"], [3, 1], internode_gbit_per_s=800)
    assert [device.node for device in cluster.devices] == ["node0"] * 3 + ["node1"]
    assert cluster.internode_bytes_per_s == 100e9
    with pytest.raises(SpecError, match="2 device names but 1 numbers"):
        ClusterSpec.from_counts(["T4", "V100"], [1])
    with pytest.raises(SpecError, match="greater than or equal to 1"):
        ClusterSpec.from_counts(["T4"], [0])
    with pytest.raises(SpecError, match="at least 1 item"):
        ClusterSpec.from_counts([], [])


def test_thousands_of_devices_are_read(tmp_path: Path) -> None:
    node = "  - accelerators: {T4: 8}\n    host_memory_gib: 108\n"
    text = f"name: large\nnodes:\n{node * 500}network: {{internode_gbit_per_s: 25}}\n"
    cluster = load(tmp_path, text)
    assert len(cluster.devices) == 4000
    assert len(cluster.nodes) == 500
    assert len(ClusterSpec.from_counts(["T4", "V100"], [9999, 1]).devices) == 10_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("accelerators: {T4", "acelerators: {T4", r":4: .*did you mean 'accelerators'\?"),
        ("{T4: 3", "{T5: 3", r":4: .*unknown accelerator 'T5'; nearest known: T4-16GB"),
        ("threads: 2", "treads: 2", r":8: nodes\.1\.treads: .*did you mean 'threads'\?"),
        ("network", "netwrk", r":11: netwrk: .*did you mean 'network'\?"),
        ("internode_gbit_per_s", "internode_gbits", r"did you mean 'internode_gbit_per_s'\?"),
        ("800", "-1", r":11: .*greater than or equal to 0.000001 \(found -1\)"),
        ("800", "fast", r":11: .*valid number \(found 'fast'\)"),
        ("800", ".inf", "finite number"),
        ("{T4: 14}", "{T4: x}", r":5: nodes\.0\.usable_memory_gib\.T4: .*valid number"),
        ("{T4: 14}", "{A100: 14}", ":5: .*this node has no such accelerator"),
        ("host_memory_gib: 64.5", "threads: 4", ":6: .*only CPU accelerators"),
        ("    memory_gib: 3\n", "", ":7: .*a CPU needs a budget; add memory_gib"),
        (
            "host_memory_gib: 64.5",
            "host_link_gbyte_per_s: 0",
            r":6: nodes\.0\.host_link_gbyte_per_s: .*greater than or equal",
        ),
        ("host_memory_gib", "host_link_gbyte_s", r"did you mean 'host_link_gbyte_per_s'\?"),
        ("T4: 3", "T4: 3.5", r"valid integer \(found 3\.5\)"),
        ("T4: 3", "T4: 0", "greater than or equal to 1"),
        ("T4: 3", "T4: true", "valid integer"),
        ("T4: 3", "T4: 3, Tesla_T4: 1", "T4-16GB is listed under two names"),
        ("CPU:2", "CPU:x", "not of the form TYPE:COUNT"),
        ("  - accelerators", "  - name: a\n    accelerators", ":7: .*second node 'a'"),
        ("name: mixed", "name: mixed\nname: y", ":2: key 'name' stands twice"),
        ("network: {internode_gbit_per_s: 800}", "", "2 nodes but no network"),
        ("name: mixed", "name: [", "not valid YAML"),
        ("T4: 3", "T4: 1000000000", r":2: nodes: 1000000003 devices; at most 100000 can"),
        ("name: mixed", "name: " + "[" * 5000, "nests too deeply"),
        ("name: mixed", "name: &a [*a]", ":1: name: .*valid string"),
        ("{T4: 3", "&a {x: *a, T4: 3", r":4: nodes\.0\.accelerators\.x: .*valid integer"),
        ("name: mixed", "name: &a {b: *a, b: 1}", ":1: key 'b' stands twice"),
        ("T4: 3", f"T4: {'1' * 5000}", "not valid YAML: .*digits"),
        (
            "{T4: 14}",
            "{T4: 60}",
            r":5: nodes\.0\.usable_memory_gib\.T4: 60 GiB, but a T4-16GB has 16; give",
        ),
        ("{T4: 14}", "20", r":5: nodes\.0\.usable_memory_gib: 20 GiB, but a T4-16GB has 16"),
        ("64.5", "64.5\n    price_per_hour: -1", r":7: .*greater than or equal to 0 \(found -1\)"),
        ("64.5", "64.5\n    price_per_hour: .inf", ":7: .*price_per_hour: .*finite|less than"),
        ("64.5", "64.5\n    price_hour: 1", r"did you mean 'price_per_hour'\?"),
        (
            "64.5",
            "64.5\n    price_per_hour: 1",
            r":8: nodes\.1: node1 has no price_per_hour, while 1 of 2 nodes have one; give every",
        ),
        (FILE, "- a", "a cluster is a mapping"),
        (FILE, "name: x", "nodes: Field required"),
    ],
)
def test_bad_file_is_named_with_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(SpecError, match=message) as caught:
        load(tmp_path, FILE.replace(old, new, 1))
    assert "c.yaml" in str(caught.value)


def _refuse_to_build(*_: object) -> None:
    pytest.fail("it was built")


@pytest.mark.parametrize(
    ("first", "form"), [("[1]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}")], ids=["alias", "merge key"]
)
def test_aliases_are_counted_before_they_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, form: str
) -> None:
    """Eight levels of ten are gigabytes; nothing is built of them."""
    levels = [f"b{i}: &b{i} {form.format(', '.join([f'*b{i - 1}'] * 10))}" for i in range(1, 9)]
    text = "\n".join([f"b0: &b0 {first}", *levels])
    assert len(text) < 700
    with monkeypatch.context() as patched:
        patched.setattr(yaml.SafeLoader, "construct_document", _refuse_to_build)
        with pytest.raises(SpecError, match=r"c\.yaml:\d: with its aliases .*without aliases"):
            load(tmp_path, text)
    with pytest.raises(SpecError, match=r"origin\.cluster:\d: with its aliases"):
        PlanOrigin(text, PlanOptions()).cluster_spec()


def test_a_merge_key_is_understood(tmp_path: Path) -> None:
    nodes = "nodes:\n  - &a {name: a, accelerators: {T4: 2}}\n  - {<<: *a, name: b}\n"
    text = f"name: c\n{nodes}network: {{internode_gbit_per_s: 100}}\n"
    assert [device.node for device in load(tmp_path, text).devices] == ["a", "a", "b", "b"]


def test_all_of_a_devices_memory_can_be_stated(tmp_path: Path) -> None:
    assert load(tmp_path, FILE.replace("{T4: 14}", "{T4: 16}")).devices[0].memory_bytes == 16 * GIB
    one_cpu = {"accelerators": {"CPU": 1}, "usable_memory_gib": 900}
    assert ClusterSpec.from_dict({"name": "c", "nodes": [one_cpu]}).devices


def test_what_is_assumed_of_a_name_is_noted_once(tmp_path: Path) -> None:
    nodes = "nodes:\n  - {accelerators: {V100: 1}}\n  - {accelerators: {V100: 1, T4: 1}}\n"
    text = f"name: c\n{nodes}network: {{internode_gbit_per_s: 100}}\n"
    (note,) = load(tmp_path, text).notes
    assert "c.yaml:3: nodes.0.accelerators.V100: V100 is taken for V100-SXM2-16GB (16 GB)" in note
    exact = load(tmp_path, text.replace("V100", "V100-SXM2-32GB"))
    assert exact.notes == ()
    counted = ClusterSpec.from_counts(["V100", "T4"], [1, 1])
    assert counted.notes[0].startswith("V100 is taken for V100-SXM2-16GB")
    assert ClusterSpec.from_dict(yaml.safe_load(counted.to_yaml())).notes == ()
    with pytest.warns(UserWarning, match="V100 is taken for V100-SXM2-16GB"):
        Cluster.from_counts(["V100"], [1])


@pytest.mark.parametrize("scale", [1e9, 1001])
def test_a_time_scale_is_bounded(tmp_path: Path, scale: float) -> None:
    with pytest.raises(SpecError, match=r"time_scale: .*less than or equal to 1000"):
        load(tmp_path, FILE + f"emulate: {{time_scale: {scale!r}}}\n")


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        ClusterSpec.from_yaml(tmp_path / "none.yaml")


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    first, second, *others = cluster.devices
    for change in ({"memory_bytes": GIB}, {"stated_host_link_bytes_per_s": 1e9}):
        uneven = replace(cluster, devices=(first, replace(second, **change), *others))
        with pytest.raises(SpecError, match="different memory or links"):
            uneven.to_yaml()
    t4s = [replace(each, stated_host_link_bytes_per_s=1e9) for each in cluster.devices[:3]]
    with pytest.raises(SpecError, match="node a has 2 host link rates"):
        replace(cluster, devices=(*t4s, *cluster.devices[3:])).to_yaml()
    with pytest.raises(SpecError, match="names 2 devices a/T4-16GB:0"):
        replace(cluster, devices=(first, first))
    with pytest.raises(SpecError, match="has no device"):
        replace(cluster, devices=())


def test_every_accelerator_makes_a_device() -> None:
    for entry in registry():
        node = {"accelerators": {entry.name: 1}, **({"memory_gib": 1} if entry.is_cpu else {})}
        (device,) = ClusterSpec.from_dict({"name": "one", "nodes": [node]}).devices
        assert isinstance(device, Device)
        assert device.memory_bytes > 0


def test_cpus_by_counts_share_this_machine() -> None:
    """No option of a command line says what a CPU may use."""
    one, two = (ClusterSpec.from_counts(["T4", "cpu"], [1, n]) for n in (1, 2))
    (cpu,), pair = one.devices[1:], two.devices[1:]
    assert len(pair) == 2
    assert cpu.threads == len(os.sched_getaffinity(0))
    assert pair[0].threads == max(1, (cpu.threads or 0) // 2)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.memory_bytes == pytest.approx(0.8 * pages, abs=2**30 // 10)
    assert pair[0].memory_bytes == pytest.approx(0.4 * pages, abs=2**30 // 10)
    assert any("each, by this machine" in note for note in one.notes)
    apart = ClusterSpec.from_counts(["CPU", "cpu"], [1, 1]).devices
    assert [(d.threads, d.memory_bytes) for d in apart] == [
        (d.threads, d.memory_bytes) for d in pair
    ]

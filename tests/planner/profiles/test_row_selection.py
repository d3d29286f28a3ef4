"""Plans say where times come from and why profile rows are not used; strict ones refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.run.replan import replan
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.builder import CPU_GUESS
from planner.plan.spec import PlanSpec
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow
from planner.profiles.selection import TimeQuery, select_rows
from planner.workload import Workload
from quant.common.errors import SpecError
from tests.planner.plan_alone import find_plan

SHAPE = model_shape("opt-125m")
CPU = ClusterSpec.from_dict(
    {"name": "c", "nodes": [{"accelerators": {"CPU": 2}, "memory_gib": 2, "threads": 2}]}
)
HEADER = (
    "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer,backend,"
    "dtype,threads\n"
)
OURS = {"device": "CPU", "h1": "768", "dtype": "bfloat16", "threads": "2", "backend": ""}
WHOLE = [("prefill", 8), ("decode", 8), ("prefill", 16), ("decode", 16)]


def profile(path: Path, kinds: Iterable[tuple[str, int]] = WHOLE, **other: str) -> Path:
    """A row for each phase and bitwidth, with what is not as in `OURS`."""
    row = {**OURS, **other}
    lines = [
        f"{row['device']},opt-125m,{row['h1']},3072,{'64,0' if phase == 'prefill' else '1,70'},"
        f"{phase},{bits},4,2.5,{row['backend']},{row['dtype']},{row['threads']}\n"
        for phase, bits in kinds
    ]
    path.write_text(HEADER + "".join(lines))
    return path


def planned(path: Path, **options: object) -> PlanSpec:
    given = {"profiles": path, "bits": [8, 16], **options}
    return find_plan(CPU, SHAPE, "opt-125m", Workload(8, 64, 16), PlanOptions.of(given)).plan


DATASHEET = "CPU estimated: roofline of the datasheet"
REASONS = pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"device": "T4"}, "bits 8, 16: taken on T4-16GB"),
        ({"threads": "4"}, "bits 8, 16: taken at a thread count of 4, not 2"),
        ({"dtype": "float32"}, "bits 8, 16: taken in float32, not bfloat16"),
        ({"kinds": [("prefill", 3)]}, "bits 8, 16: no rows"),
        (
            {"kinds": [("prefill", 8)], "backend": "torch_8bit"},
            "the kernel torch_8bit, not onednn_w8a8",
        ),
        ({"kinds": []}, "bits 8, 16: no rows"),
    ],
)


@REASONS
def test_why_no_row_is_used(tmp_path: Path, other: dict[str, str], reason: str) -> None:
    plan = planned(profile(tmp_path / "p.csv", **other))
    for stage in plan.stages:
        assert stage.provenance.startswith(DATASHEET)
        assert reason in stage.provenance
        assert stage.provenance.endswith(CPU_GUESS)


@REASONS
def test_strict_refuses_it(tmp_path: Path, other: dict[str, str], reason: str) -> None:
    path = profile(tmp_path / "p.csv", **other)
    with pytest.raises(SpecError, match=r"strict_profiles: .*p\.csv .* node0/CPU:0: ") as refusal:
        planned(path, strict_profiles=True)
    assert reason in str(refusal.value)
    assert "llmpq profile" in str(refusal.value)


def test_a_whole_file_is_fitted_and_strict(tmp_path: Path) -> None:
    plan = planned(profile(tmp_path / "p.csv"), strict_profiles=True)
    assert plan.stages[0].provenance == (
        "CPU fitted to 4 profile rows of p.csv (bits 8, 16); embedding and LM head estimated: "
        "roofline of the datasheet; without 3, 4, 5 and 6 bit, which llmpq profile would add"
    )
    assert plan.origin is not None
    assert plan.origin.options.strict_profiles


def test_a_partial_file_says_what_is_mixed(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.csv", kinds=WHOLE[:3])
    provenance = planned(path).stages[0].provenance
    assert provenance.startswith("CPU fitted to 3 profile rows of p.csv (bits 8, 16); estimated: ")
    assert "(decode of bits 16: no rows)" in provenance
    with pytest.raises(SpecError, match=r"node0/CPU:0: decode of bits 16: no rows; measure them"):
        planned(path, strict_profiles=True)
    assert planned(path, strict_profiles=True, bits=[8]).stages


def test_rows_of_another_model_are_scaled_and_said_so(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.csv", h1="512")
    provenance = planned(path).stages[0].provenance
    assert (
        "fitted to 4 profile rows of p.csv (bits 8, 16; bits 8, 16: scaled from opt" in provenance
    )
    with pytest.raises(SpecError, match="bits 8, 16: scaled from opt-125m"):
        planned(path, strict_profiles=True)


def test_a_compute_type_that_was_asked_for_counts(tmp_path: Path) -> None:
    """Not the device's own."""
    path = profile(tmp_path / "p.csv")
    provenance = planned(path, dtype="float32").stages[0].provenance
    assert "taken in bfloat16, not float32" in provenance


def test_measured_times_are_described_alike(tmp_path: Path) -> None:
    plan = planned(profile(tmp_path / "p.csv"), profile_use="measured")
    assert plan.stages[0].provenance.startswith("CPU measured in 4 profile rows of p.csv")


def test_planning_again_is_as_strict(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.csv")
    plan = planned(path, strict_profiles=True, keep_all_devices=True)
    lost = [plan.stages[0].device]
    again = replan(plan, lost)
    assert again.origin is not None
    assert again.origin.options.strict_profiles
    profile(path, kinds=WHOLE[:3])
    with pytest.raises(SpecError, match=r"strict_profiles: .* decode of bits 16"):
        replan(plan, lost)
    path.unlink()
    with pytest.raises(SpecError, match=r"strict_profiles needs .*p\.csv"):
        replan(plan, lost)


def test_strict_without_profiles_has_no_effect() -> None:
    with pytest.raises(SpecError, match="strict_profiles has no effect without profiles"):
        PlanOptions.of({"strict_profiles": True})


def law(path: Path, slowness: Mapping[int, tuple[float, float]]) -> Path:
    """Rows of layers that at each bitwidth take so many times as long in prefill and in decode."""
    lines = [HEADER]
    for bits, (prefill, decode) in slowness.items():
        for batch in (1, 8, 32):
            for length in (16, 64):
                head, tail = "CPU,opt-125m,768,3072,", f",{batch},"
                prompt_ms, step_ms = 1 + 0.02 * batch * length, 1 + 0.05 * batch
                end = ",,bfloat16,2\n"
                lines.append(f"{head}{length},0,prefill,{bits}{tail}{prefill * prompt_ms}{end}")
                lines.append(f"{head}1,{length},decode,{bits}{tail}{decode * step_ms}{end}")
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("slowness", "taken"),
    [
        ({4: (2.0, 1.05), 8: (1.5, 1.2), 16: (1.0, 1.0)}, 16),
        ({4: (2.0, 2.0), 8: (1.1, 0.5), 16: (1.0, 1.0)}, 8),
        ({4: (0.9, 0.9), 8: (3.0, 3.0), 16: (1.0, 1.0)}, 4),
    ],
)
def test_fewer_bits_are_taken_only_where_they_are_measured_to_be_faster(
    tmp_path: Path, slowness: dict[int, tuple[float, float]], taken: int
) -> None:
    """`taken` are the fewest; there is room for 16 bit, and quality does not count."""
    path = law(tmp_path / "p.csv", slowness)
    plan = planned(path, bits=[4, 8, 16], theta=0.0)
    assert min(bits for stage in plan.stages for bits in stage.bitwidths) == taken
    plain = planned(path, bits=[16], theta=0.0)
    assert plan.predicted.tokens_per_s >= plain.predicted.tokens_per_s


def test_rows_taken_beside_as_many_busy_cpus_come_first() -> None:
    device = CPU.devices[0]
    assert device.neighbours == 1
    layer = LayerTerms.of(SHAPE)
    alone, one, three = (
        ProfileRow("CPU", "opt", layer, 3072, "decode", 16, 4, 1, 70, 1e-3, beside=beside)
        for beside in (None, 1, 3)
    )
    wanted = TimeQuery(device, "bfloat16", layer, 16, "decode")
    for rows, used in (([alone, three, one], one), ([alone, three], alone), ([three], three)):
        assert select_rows(rows, wanted).rows == (used,)
    lone = replace(wanted, device=replace(device, host_devices=1))
    assert select_rows([one, alone], lone).rows == (alone,)

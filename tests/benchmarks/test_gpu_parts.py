"""The parts' own code, as far as a CPU runs it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import runner
from benchmarks.gpu.findings import Findings, NotRunError, Place
from benchmarks.gpu.measurements import (
    attention,
    gpu_tests,
    graphs,
    kernels,
    layers,
    loading,
    marlin,
    memory,
    models,
    planned_run,
    stages,
)
from benchmarks.gpu.parts import PARTS
from benchmarks.lab import captured, seconds_of
from benchmarks.speed.linear import Held, Result, Setting, measure
from quant.backends.kernel_classes import BACKENDS
from quant.scheme import LinearShape
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.actors.recorder import use_recorder
from tests.cuda_emulation import needs_compiler

CPU = torch.device("cpu")


def found(part: ModuleType, argument: str, folder: Path) -> dict[str, Any]:
    """What a part finds in a dry run."""
    path = folder / "found.json"
    findings = Findings(path)
    part.run(findings, Place(folder, folder, dry_run=True), argument)
    assert findings.complaints == []
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def by_hand(x: list[list[int]], weight: list[list[Fraction]]) -> list[list[Fraction]]:
    return [[sum((a * b for a, b in zip(t, row, strict=True)), Fraction(0)) for row in weight]
            for t in x]  # fmt: skip


def test_errors_are_those_of_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product that is a quarter too large, with a weight that is rounded to whole numbers."""
    weight = [[Fraction(3, 2), Fraction(-1, 4)], [Fraction(1, 2), Fraction(5, 4)]]
    rounded = [[Fraction(2), Fraction(0)], [Fraction(1), Fraction(1)]]
    x = [[1, 2], [-3, 4], [5, -6]]
    exact, meant = by_hand(x, weight), by_hand(x, rounded)
    output = [[value * Fraction(5, 4) for value in row] for row in meant]

    def norm(rows: list[list[Fraction]]) -> float:
        return float(sum(value * value for row in rows for value in row)) ** 0.5

    def apart(found: list[list[Fraction]], wanted: list[list[Fraction]]) -> float:
        pairs = zip(found, wanted, strict=True)
        return norm([[a - b for a, b in zip(*p, strict=True)] for p in pairs]) / norm(wanted)

    given = torch.tensor(x, dtype=torch.float32)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: given)
    tensors = [torch.tensor([[float(v) for v in row] for row in w]) for w in (weight, rounded)]
    held = [
        Held("plain", 16, 8, [lambda a: a @ tensors[0].t()], tensors[0].double()),
        Held("toy", 8, 4, [lambda a: 1.25 * (a @ tensors[1].t())], tensors[1].double()),
    ]
    setting = Setting(CPU, torch.float32, seconds=0.0)
    _, toy = measure(LinearShape(2, 2), 3, held, setting)
    assert toy.error == pytest.approx(apart(output, exact), rel=1e-6)
    assert toy.own_error == pytest.approx(apart(meant, exact), rel=1e-6)
    assert toy.kernel_error == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize(
    ("backend", "dtype", "error", "is_wrong"),
    [
        ("cuda_4bit", torch.float16, 1e-3, False),
        ("cuda_4bit", torch.float16, 3e-3, True),
        ("cuda_4bit", torch.bfloat16, 3e-3, False),
        ("cuda_4bit", torch.float16, float("nan"), True),
        ("cuda_w8a8", torch.float16, 1e-2, False),
        ("cuda_w8a8", torch.float16, 5e-2, True),
    ],
)
def test_what_counts_as_wrong(
    backend: str, dtype: torch.dtype, error: float, is_wrong: bool
) -> None:
    result = Result(LinearShape(64, 32), 8, backend, 4, 1.0, 1.0, 0.1, 0.1, error, 1.0)
    complaint = kernels.wrong(result, dtype)
    assert (complaint is not None) == is_wrong


@pytest.mark.parametrize(
    "backend", ["cuda_3bit", "cuda_5bit", "cuda_6bit", "cuda_8bit", "cuda_w8a8"]
)
def test_kernels_by_their_cpu_twins(backend: str, tmp_path: Path) -> None:
    content = found(kernels, backend, tmp_path)
    rows = content["tables"][0]["rows"]
    assert [row[:3] for row in rows] == [["bfloat16", "192 x 256", n] for n in (1, 30)]


def test_marlin_is_called_as_vllm_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the argument names of vLLM 0.6 to 0.11, that keeps the rounded weight."""

    def quantize(w: torch.Tensor, kind: str, group: int, act_order: bool) -> tuple[Any, ...]:
        rounded = w.round(decimals=2)
        return (rounded, rounded.clone(), torch.ones(len(w) // group), None, None, None)

    def apply(
        input: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_zp: None,
        g_idx: None, g_idx_sort_indices: None, workspace: str, wtype: str,
        output_size_per_partition: int, input_size_per_partition: int, is_k_full: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert (workspace, wtype, weight_scale.sum()) == ("workspace", "uint4b8", 2)
        assert weight.shape == (input_size_per_partition, output_size_per_partition)
        return input @ weight

    utils = SimpleNamespace(
        marlin_make_empty_g_idx=lambda device: None,
        marlin_make_workspace_new=lambda device: "workspace",
        apply_gptq_marlin_linear=apply,
    )
    package = "vllm.model_executor.layers.quantization.utils"
    tests = SimpleNamespace(marlin_quantize=quantize)
    pretend = SimpleNamespace(marlin_utils=utils, marlin_utils_test=tests)
    monkeypatch.setitem(sys.modules, package, pretend)  # type: ignore[arg-type]
    types = SimpleNamespace(scalar_types=SimpleNamespace(uint4b8="uint4b8"))
    monkeypatch.setitem(sys.modules, "vllm.scalar_type", types)  # type: ignore[arg-type]
    setting = Setting(CPU, torch.float32, seconds=0.0, cache_bytes=3 * 64 * 256 * 4)
    held = marlin.hold_marlin(torch.randn(64, 256), setting)
    assert len(held.products) == 3
    plain = kernels.hold_plain(torch.randn(64, 256), setting)
    *_, own = measure(LinearShape(256, 64), 5, [plain, held], setting)
    assert own.kernel_error < 1e-6
    with pytest.raises(NotRunError, match=r"7\.5 or more"):
        marlin.check_marlin(CPU)


def test_a_kernel_that_is_wrong_makes_its_part_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = BACKENDS["cuda_4bit"]

    class Wrong(twin):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)
            out[..., -1] *= 3
            return out

    monkeypatch.setitem(BACKENDS, "cuda_4bit", Wrong)
    monkeypatch.setattr(runner.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(runner.faulthandler, "dump_traceback_later", lambda _: None)
    place = Place(tmp_path, tmp_path, dry_run=True)
    code = runner.run_part("kernels.cuda_4bit", tmp_path / "found.json", place, 60.0)
    assert code == runner.FAILED
    complaints = json.loads((tmp_path / "found.json").read_text())["complaints"]
    assert any("computes 1 rows of 192 x 256 wrongly" in each for each in complaints)


@pytest.mark.parametrize(
    ("raised", "code", "reason"),
    [
        (NotRunError("too small"), runner.NOT_RUN, "too small"),
        (ModuleNotFoundError("no", name="cupboard.door"), runner.NOT_RUN, "cupboard is missing"),
        (ModuleNotFoundError("no", name="quant.none"), runner.FAILED, None),
    ],
)
def test_a_missing_library_is_no_failure_but_a_missing_file_of_ours_is(
    raised: Exception, code: int, reason: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(runner.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(runner.faulthandler, "dump_traceback_later", lambda _: None)
    monkeypatch.setattr(memory, "run", run)
    path = tmp_path / "found.json"
    assert runner.run_part("memory", path, Place(tmp_path, tmp_path, dry_run=True), 60.0) == code
    if reason is not None:
        assert json.loads(path.read_text())["not_run"] == reason


def test_memory_is_planned_to_the_byte(tmp_path: Path) -> None:
    rows = found(memory, "", tmp_path)["tables"][0]["rows"]
    exact = [row for row in rows if row[1] in ("weights", "KV cache")]
    assert len(exact) == 6
    assert all(row[2] == row[3] for row in exact)


def test_attention_by_the_function_that_it_is_held_against(tmp_path: Path) -> None:
    rows = found(attention, "", tmp_path)["tables"][0]["rows"]
    cases = [(*row[:3], row[4]) for row in rows]
    assert cases == [(8, bits, 3, kind) for bits in (16, 8) for kind in ("equal", "unlike")]
    assert all(row[-1] < 1e-12 for row in rows)


def test_a_decode_step_on_the_cpu(tmp_path: Path) -> None:
    rows = found(graphs, "16", tmp_path)["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [[1, 16], [3, 40]]
    assert all(row[2] > 0 and row[3] is None for row in rows)


@needs_compiler
@pytest.mark.rare
def test_a_recorded_decode_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_recorder(monkeypatch)
    rows = found(graphs, "16", tmp_path)["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [[1, 16], [3, 40]]
    assert all(None not in row for row in rows)


@pytest.mark.rare
def test_parts_that_no_other_test_runs(tmp_path: Path) -> None:
    for part in (layers, planned_run, loading):  # the second one predicts by what the first found
        assert all(table["rows"] for table in found(part, "", tmp_path)["tables"])


@pytest.mark.rare
def test_hidden_states_in_16_bit_are_off_by_rounding_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny-llama", CONFIGS["llama"])
    error = stages.rounding_error("llama", "bfloat16", Place(tmp_path, tmp_path, dry_run=True))
    assert 2e-3 < error < 2e-2, "bfloat16 rounds a number by 0.4 % at most"


def test_marked_tests_are_found_in_the_sources(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "import not_there\n@pytest.mark.gpu\n@pytest.mark.skipif(True)\ndef test_on_gpu(): ...\n"
        "def test_elsewhere(): ...\n"
    )
    assert list(gpu_tests.marked_tests(folder)) == ["tests/test_a.py::test_on_gpu"]


def test_an_unknown_gpu_is_told_how_to_be_made_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Z900 Turbo")
    with pytest.raises(NotRunError, match=r"planner/cluster/accelerators.toml.*NVIDIA_Z900_Turbo"):
        models.accelerator_of(Place(tmp_path, tmp_path))


def test_without_bitsandbytes_our_own_kernels_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    gpu = replace(models.local_processor(CPU), compute_capability=(9, 0))
    monkeypatch.setattr(models, "local_processor", lambda _: gpu)
    found = models.backends_here(Place(tmp_path, tmp_path), (3, 4, 5, 6, 8, 16), "float16")
    own = {bits: f"cuda_{bits}bit" for bits in (3, 4, 5, 6)}
    assert found == own | {8: "cuda_w8a8", 16: "plain"}


def test_every_part_has_its_code() -> None:
    folder = Path(gpu_tests.__file__).parent
    for part in PARTS:
        path = folder / f"{part.module.rpartition('.')[2]}.py"
        assert "def run(findings: Findings, place: Place" in path.read_text(), part.name


def test_on_a_cpu_the_clock_is_the_hosts_and_a_graph_the_work_itself() -> None:
    calls: list[int] = []
    recorded = captured(CPU, lambda: calls.append(1) or len(calls))
    assert (recorded.output, calls) == (1, [1])
    assert seconds_of(CPU, recorded.replay) > 0
    assert calls == [1, 1]

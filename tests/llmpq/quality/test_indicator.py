"""Indicators of whole models against transformers' own inputs, and the command around them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from actors.stage.layer_stream import compute_on
from llmpq import Cluster, Workload
from llmpq.cli import plan as plan_cli
from llmpq.cli.measure.quality import indicator_main
from llmpq.quality.calibration import drawn_windows, token_digest
from llmpq.quality.indicator import measure_indicators
from llmpq.quality.omega import assignments_to_measure, measure_omega
from llmpq.quality.options import IndicatorOptions
from llmpq.quality.text_windows import Windows, token_windows
from planner.model.finding import model_shape
from planner.profiles.sensitivity import load_omega
from quant.common.errors import CheckpointError
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.importance import InputStatistics
from quant.rounding.indicators import (
    HessianStatistics,
    VarianceStatistics,
    squared_rounding_error,
)
from quant.rounding.ways import Rounding
from quant.scheme import VarianceForm
from tests.actors.configs import CONFIGS, LAYERS, VOCABULARY
from tests.actors.models import save_tiny
from tests.llmpq.commands import exit_code

pytestmark = pytest.mark.usefixtures("short_measurement")
BITS = (3, 4, 8, 16)
OUTLIERS = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
IN_FLOAT32 = compute_on(torch.device("cpu"), torch.float32)
FORM = VarianceForm("stochastic", "symmetric")


def tokens(sequences: int = 4, length: int = 12, seed: int = 5) -> Any:
    return np.random.default_rng(seed).integers(3, VOCABULARY, (sequences, length))


def layers_of(model: Any) -> list[nn.Module]:
    decoder = model.get_decoder()
    return list(decoder.h if hasattr(decoder, "h") else decoder.layers)


def by_hand(model: Any, token_ids: Any, lower: Sequence[int]) -> tuple[Any, Any]:
    """Both indicators at `lower` bits, and none at 16, from what every linear sees in transformers'
    forward of the whole model.
    """
    seen: dict[nn.Module, Tensor] = {}
    linears = [
        [m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in layers_of(model)
    ]
    for linear in (each for layer in linears for each in layer):
        linear.register_forward_pre_hook(
            lambda module, inputs: seen.__setitem__(module, inputs[0].flatten(0, -2).double())
        )
    with torch.no_grad():
        model(input_ids=torch.from_numpy(token_ids), use_cache=False)
    variance, hessian = np.zeros((2, LAYERS, len(lower) + 1))
    for index, layer in enumerate(linears):
        for linear in layer:
            x, w = seen[linear], linear.weight.detach()
            gain = float(x.mean() ** 2 + x.var(correction=0)) / 6
            top = float(torch.linalg.eigvalsh(2 * x.T @ x)[-1])
            for column, bits in enumerate(lower):
                step = float(w.abs().max()) / (2 ** (bits - 1) - 1)
                variance[index, column] += w.numel() * step**2 * gain
                hessian[index, column] += top * squared_rounding_error(w, bits)
    return variance, hessian


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llama", "bloom", "opt") else pytest.mark.rare)
        for name in CONFIGS
    ],
)
def test_indicators_of_every_architecture(name: str, tmp_path: Path) -> None:
    """At all bitwidths of one architecture, and at one of every other."""
    lower = BITS[:-1] if name == "llama" else (4,)
    model, token_ids = save_tiny(tmp_path, CONFIGS[name]), tokens()
    indicators = {"variance": partial(VarianceStatistics, FORM), "hessian": HessianStatistics}
    done: list[tuple[int, int]] = []
    found, _ = measure_indicators(
        tmp_path, token_ids, indicators, (*lower, 16), IN_FLOAT32, lambda *at: done.append(at)
    )
    variance, hessian = by_hand(model, token_ids, lower)
    np.testing.assert_allclose(found["variance"].sum(0), variance, rtol=1e-4)
    np.testing.assert_allclose(found["hessian"].sum(0), hessian, rtol=1e-3)
    assert done == [(layer + 1, LAYERS) for layer in range(LAYERS)]


class Counting(VarianceStatistics):
    """Notes whose inputs it was given."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def observe(self, source: str, inputs: Tensor) -> None:
        self.seen.append(source)
        super().observe(source, inputs)


def test_linears_that_share_an_input_are_looked_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    seen: list[str] = []
    measure_indicators(tmp_path, tokens(), {"x": lambda: Counting(seen)}, BITS, IN_FLOAT32)
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    assert seen == names * LAYERS


def test_damaged_weights_name_their_layer(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    with torch.no_grad():
        model.model.layers[2].input_layernorm.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layer 2: .*not finite"):
        measure_indicators(tmp_path, tokens(), {"x": VarianceStatistics}, BITS, IN_FLOAT32)


def test_calibration_draws_whole_windows() -> None:
    windows = token_windows([list(range(95))], None, 10)  # the last has 5 tokens and padding
    sample = drawn_windows(windows, 4, seed=1)
    assert sample.shape == (4, 10)
    assert (np.diff(sample[:, 0]) > 0).all()
    assert not (sample == 0)[:, 1:].any()
    assert token_digest(drawn_windows(windows, 4, seed=2)) != token_digest(sample)
    assert token_digest(drawn_windows(windows, 4, seed=1)) == token_digest(sample)
    assert len(drawn_windows(windows, 99, seed=1)) == 9
    assert isinstance(windows, Windows)


def test_assignments_to_measure_descend_by_least_sensitivity() -> None:
    random = np.random.default_rng(0)
    matrix = random.uniform(1, 9, (8, 1)) * np.array([1, 0.2, 0.01, 0])
    chosen = assignments_to_measure(matrix, BITS)
    assert chosen[:4] == [(bits,) * 8 for bits in (16, 8, 4, 3)]
    assert len(set(chosen)) == len(chosen) >= 9
    sums = [sum(matrix[i, BITS.index(b)] for i, b in enumerate(bits)) for bits in chosen[4:]]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] <= 0.7 * matrix[:, 0].sum()
    order = np.argsort(-matrix[:, 0])
    for bits in chosen[4:]:  # a layer that loses more never has fewer bits
        assert list(np.array(bits)[order]) == sorted(bits, reverse=True)
    assert assignments_to_measure(matrix[:, -1:], (16,)) == [(16,) * 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, CONFIGS["llama"])
    return folder


def text_file(path: Path, count: int, seed: int) -> Path:
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()
    path.write_text(json.dumps({"prompt": ids}) + "\n")
    return path


def run(*arguments: object) -> int:
    return exit_code(indicator_main, [str(argument) for argument in arguments])


def test_command_writes_what_the_planner_takes(
    model: Path, cluster_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, held_out = (
        text_file(tmp_path / "a.jsonl", 130, 1),
        text_file(tmp_path / "b.jsonl", 400, 2),
    )
    omega = tmp_path / "omega.json"
    arguments = ["--model", model, "--calibration", text, "-o", omega, "--sequence-length", 16]
    assert run(*arguments, "--perplexity", held_out, "--bits", 3, 4, 8, "--rounding", "stochastic",
               "--sequences", 5, "--method", "variance") == 0  # fmt: skip
    content = json.loads(omega.read_text())
    windows = token_windows([json.loads(text.read_text())["prompt"]], None, 16)
    sample = drawn_windows(windows, 5, seed=0)
    form = VarianceForm("stochastic")
    expected, _ = measure_indicators(
        model, sample, {"x": partial(VarianceStatistics, form)}, BITS, IN_FLOAT32
    )
    assert content["bits"] == list(BITS)
    assert np.array(content["matrix"]) == pytest.approx(expected["x"][0])
    assert "experts" not in content
    told = content["provenance"]
    assert (told["method"], told["rounding"], told["calibration_tokens"]) == (
        "variance", "stochastic", 80,
    )  # fmt: skip
    assert told["calibration"] == token_digest(sample)
    assert content["points"][0]["bitwidths"] == [16] * LAYERS
    assert len(content["points"]) >= 8
    assert "perplexity, 384 tokens" not in (printed := capsys.readouterr().out)
    assert f"perplexity, {400 - 25} tokens" in printed
    loaded = load_omega(omega, model_shape(str(model)), BITS)
    assert len(loaded.points) == len(content["points"])
    plan = Cluster.from_yaml(cluster_file).plan(
        model, Workload(2, 16, 4), omega_file=omega, dtype="float32", bits=[3, 4, 8, 16]
    )
    assert "variance, stochastic" in plan.spec.sensitivity_source


def log_probabilities(model: Any, token_ids: Any) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(token_ids), use_cache=False).logits
    return torch.log_softmax(logits[:, :-1].double(), dim=-1)


def test_error_is_what_layers_alone_diverge(tmp_path: Path) -> None:
    """3 and 8 bit as transformers' model with one layer rounded, 4 bit by the ratio of errors."""
    model = save_tiny(tmp_path, CONFIGS["llama"])
    text = text_file(tmp_path / "text.jsonl", 130, 1)
    omega = tmp_path / "omega.json"
    assert run("--model", tmp_path, "--calibration", text, "-o", omega,
               "--sequence-length", 16, "--sequences", 5) == 0  # fmt: skip
    content = json.loads(omega.read_text())
    windows = token_windows([json.loads(text.read_text())["prompt"]], None, 16)
    token_ids = drawn_windows(windows, 5, seed=0)
    seen: dict[nn.Module, Tensor] = {}
    handles = [
        linear.register_forward_pre_hook(
            lambda module, inputs: seen.__setitem__(module, inputs[0].flatten(0, -2).double())
        )
        for linear in model.modules()
        if isinstance(linear, nn.Linear)
    ]
    full = log_probabilities(model, token_ids)
    for handle in handles:
        handle.remove()
    for index, layer in enumerate(layers_of(model)):
        linears = [linear for linear in layer.modules() if isinstance(linear, nn.Linear)]
        plain = [linear.weight.data for linear in linears]
        errors, alone = np.zeros(3), np.zeros(3)
        for column, bits in enumerate(BITS[:-1]):
            for linear, weight in zip(linears, plain, strict=True):
                mean_square = seen[linear].square().mean(0)
                inputs = InputStatistics(mean_square.float(), seen[linear].abs().amax(0).float())
                rounding = Rounding(content["provenance"]["rounding"])
                linear.weight.data = dequantize(
                    quantize(weight, bits, None, replace(rounding, inputs=inputs))
                )
                apart = (linear.weight.data - weight).double().square() * mean_square
                errors[column] += apart.sum() / (weight.double().square() * mean_square).sum()
            apart = full - log_probabilities(model, token_ids)
            alone[column] = float((full.exp() * apart).sum(-1).mean())
            for linear, weight in zip(linears, plain, strict=True):
                linear.weight.data = weight
        row = dict(zip(content["bits"], content["matrix"][index], strict=True))
        # A code that falls between two may go to either side, as statistics are summed in float32.
        assert row[3] == pytest.approx(alone[0], rel=2e-2, abs=1e-8)
        assert row[4] == pytest.approx(alone[0] * errors[1] / errors[0], rel=2e-2)
        # kernels of some processors round activations too, and so little is float32's own noise
        assert alone[2] - 1e-7 < row[8] < row[6] < row[5] < row[4]
        assert row[16] == 0
    ends = [(end, end.weight.data) for end in (model.get_input_embeddings(), model.lm_head)]
    mean_square = seen[model.lm_head].square().mean(0).float()
    weighed = Rounding(inputs=InputStatistics(mean_square, mean_square.sqrt()))
    for bits in (6, 8):
        for (end, weight), rounding in zip(ends, (Rounding(), weighed), strict=True):
            end.weight.data = dequantize(quantize(weight, bits, None, rounding))
        apart = full - log_probabilities(model, token_ids)
        lost = float((full.exp() * apart).sum(-1).mean())
        assert content["head"][str(bits)] == pytest.approx(lost, rel=2e-2)
    told = content["provenance"]
    assert (told["method"], told["rounding"], told["unit"]) == (
        "error", "weighted", "nats a token",
    )  # fmt: skip
    source = load_omega(omega, model_shape(str(tmp_path)), BITS).source
    assert "error, weighted, nats a token, calibration tokens 80" in source


def test_layers_alone_may_take_several_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for few hidden states changes nothing, and all layers of all passes are counted."""
    options = IndicatorOptions(method="error", bits=(3, 8), sequence_length=12)
    ids = tokens(1, 60)[0].tolist()
    at_once = measure_omega(model, [ids], options).matrix
    monkeypatch.setattr("llmpq.quality.indicator._HIDDEN_BYTES", 1)
    done: list[tuple[int, int]] = []
    one_by_one = measure_omega(model, [ids], options, lambda *at: done.append(at)).matrix
    assert one_by_one == pytest.approx(at_once, rel=1e-5)
    total = 2 * LAYERS * LAYERS
    assert done[LAYERS:] == [(layer + 1, total) for layer in range(total)]


def test_bound_of_perplexity_from_the_command_line(
    model: Path, cluster_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    omega = tmp_path / "omega.json"
    assert run("--model", model, "--method", "random", "--seed", 4, "-o", omega) == 0
    content = json.loads(omega.read_text())
    shape = model_shape(str(model))
    total = np.array(content["matrix"]).sum(axis=0)
    content["points"] = [
        {"bitwidths": [bits] * shape.layers, "perplexity": 30 + sum_, "error": 0.0}
        for bits, sum_ in zip(content["bits"], total, strict=True)
    ]
    command = ["--model", str(model), "--cluster", str(cluster_file), "--global_bz", "2", "--s",
               "16", "--n", "4", "--omega_file", str(omega), "--max-ppl-delta"]  # fmt: skip
    assert plan_cli.main([*command, "0.5"]) == 2
    assert "llmpq indicator --perplexity" in capsys.readouterr().err
    omega.write_text(json.dumps(content))
    assert plan_cli.main([*command, str(total[0]), "--bits", "3", "4", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "over 30 at 16 bit expected" in printed
    assert "from 5 measured points); at most" in printed


def test_outliers_make_no_higher_bitwidth_worse(tmp_path: Path) -> None:
    """One weight of a row sets its scale at 8 bit, but only its group's at 4."""
    weights = save_tiny(tmp_path, OUTLIERS)
    with torch.no_grad():
        for linear in (m for m in weights.model.layers[1].modules() if isinstance(m, nn.Linear)):
            linear.weight.abs_()
            linear.weight[:, 0] = 30  # 15 steps of 2: at 4 bit the others of its group become 0
    weights.save_pretrained(tmp_path)
    options = IndicatorOptions(method="hessian", bits=BITS, sequence_length=12)
    ids = tokens(1, 60)[0].tolist()
    found, _ = measure_indicators(
        tmp_path, np.array(ids).reshape(5, 12), {"x": HessianStatistics}, BITS, IN_FLOAT32
    )
    raw = found["x"][0]
    assert raw[1, 2] > raw[1, 1]
    matrix = measure_omega(tmp_path, [ids], options).matrix
    assert (np.diff(matrix, axis=1) <= 0).all()
    assert matrix[0] == pytest.approx(raw[0])


def test_bad_input_of_the_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_file(tmp_path / "text.jsonl", 40, 3)
    short = text_file(tmp_path / "short.jsonl", 1, 3)
    long = text_file(tmp_path / "long.jsonl", 500, 3)
    omega = tmp_path / "omega.json"
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    complete = ["--model", model, "--calibration", text, "-o", omega]
    cases: list[tuple[list[object], str]] = [
        (["--model", model, "-o", omega], "give a text to calibrate on: --calibration"),
        ([*complete, "-o", tmp_path], "name a file in a folder that exists"),
        ([*complete, "-o", tmp_path / "no" / "omega.json"], "name a file in a folder that exists"),
        ([*complete, "--sequences", 0], "sequences is 0"),
        ([*complete, "--seed", -1], "seed is -1"),
        (
            [*complete, "--method", "variance", "--rounding", "weighted"],
            "one of nearest, stochastic",
        ),
        ([*complete, "--calibration", long, "--sequence_length", 200], "128 positions"),
        ([*complete, "--device", "tpu"], "choose from auto, cpu, cuda"),
        ([*complete, "--dtype", "int4"], "--dtype: unknown value 'int4'"),
        (["--model", model, "--calibration", short, "-o", omega], "at least 2 are needed"),
        (["--model", tmp_path, "--calibration", text, "-o", omega], "holds no config.json"),
        (["--model", bare, "--calibration", text, "-o", omega], "model.safetensors"),
    ]
    for arguments, message in cases:
        assert run(*arguments) == 2, arguments
        assert message in capsys.readouterr().err
        assert not omega.exists()
    assert run(*complete, "--perplexity", text) == 2  # one window of 40 tokens
    assert "one window, which tells no error" in capsys.readouterr().err
    assert load_omega(omega, model_shape(str(model)), BITS).points == ()  # what was done is kept
    assert run(*complete, "--bits", 7) == 2


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, llmpq.cli.measure.quality; "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

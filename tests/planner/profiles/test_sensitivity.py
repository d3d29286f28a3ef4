"""Sensitivities: the default's closed form, and what an omega file must hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from planner.model.finding import model_shape
from planner.profiles.sensitivity import OmegaContent, default_sensitivity, load_omega, save_omega
from quant.common.errors import SpecError

SHAPE = model_shape("opt-125m")
BITS = (3, 4, 8, 16)
MATRIX = np.linspace(4, 1, 12)[:, None] * np.array([1.0, 0.3, 0.01, 0.0])


def test_default_is_noise_of_the_step() -> None:
    matrix = default_sensitivity(SHAPE, BITS)
    assert matrix.shape == (12, 4)
    assert matrix[:, 1].sum() == pytest.approx(1)
    assert matrix[0] / matrix[0, 1] == pytest.approx([(15 / 7) ** 2, 1, (15 / 255) ** 2, 0])
    assert default_sensitivity(SHAPE, (8,))[:, 0] == pytest.approx(matrix[:, 2])


def test_round_trip_and_choice_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "omega.json"
    save_omega(path, OmegaContent(BITS, SHAPE.fingerprint(), MATRIX))
    assert load_omega(path, SHAPE, BITS).matrix == pytest.approx(MATRIX)
    assert load_omega(path, SHAPE, (4, 16)).matrix == pytest.approx(MATRIX[:, [1, 3]])


MOE = model_shape("qwen3-30b-a3b")


def parts(**changes: object) -> dict[str, object]:
    matrix = np.linspace(4, 1, MOE.layers)[:, None] * np.array([1.0, 0.3, 0.01, 0.0])
    experts = matrix * [0.1, 0.2, 0.9, 0.0]
    held = {"matrix": matrix.tolist(), "experts": experts.tolist()}
    return {"bits": list(BITS), "model_fingerprint": MOE.fingerprint(), **held, **changes}


def test_the_part_of_experts_comes_back_at_the_bits_asked_for(tmp_path: Path) -> None:
    path, held = tmp_path / "omega.json", parts()
    matrix, experts = np.array(held["matrix"]), np.array(held["experts"])
    save_omega(path, OmegaContent(BITS, MOE.fingerprint(), matrix, experts=experts))
    assert json.loads(path.read_text()).items() >= held.items()
    found = load_omega(path, MOE, (4, 16))
    assert found.matrix == pytest.approx(matrix[:, [1, 3]])
    assert found.experts == pytest.approx(experts[:, [1, 3]])
    path.write_text(json.dumps(parts(experts=None)))  # as before experts were measured apart
    assert load_omega(path, MOE, BITS).experts is None


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0.1] * 4], r"field experts holds an array \[1, 4\]; 48 layers by 4"),
        ("none", "field experts holds no matrix of numbers"),
        ([[5.0, 0, 0, 0]] * 48, r"field experts: layer 0, column 0 is 5.0, more .* lose \(4\)"),
        ([[0.1, -0.1, 0, 0]] * 48, "field experts: layer 0, column 1 is -0.1"),
        ([[0.1, 0.2, 0, 0]] * 48, "field experts: layer 0 loses more at 4 than at 3 bits"),
        ([[1, 0.01, 0, 0]] * 48, "matrix - experts: layer 41 loses more at 4 than at 3 bits"),
    ],
)
def test_bad_parts_of_experts(tmp_path: Path, experts: object, message: str) -> None:
    (tmp_path / "omega.json").write_text(json.dumps(parts(experts=experts)))
    with pytest.raises(SpecError, match=message):
        load_omega(tmp_path / "omega.json", MOE, BITS)


def test_layers_without_experts_lose_nothing_by_them(tmp_path: Path) -> None:
    held = content(experts=(MATRIX / 2).tolist())
    (tmp_path / "omega.json").write_text(json.dumps(held))
    with pytest.raises(SpecError, match=r"field experts: layer 0, column 0 .* lose \(0\)"):
        load_omega(tmp_path / "omega.json", SHAPE, BITS)


def test_bare_array_is_taken(tmp_path: Path) -> None:
    (tmp_path / "omega.json").write_text(json.dumps(MATRIX.tolist()))
    assert load_omega(tmp_path / "omega.json", SHAPE, BITS).matrix == pytest.approx(MATRIX)


def content(**changes: object) -> object:
    return {
        "bits": list(BITS),
        "model_fingerprint": SHAPE.fingerprint(),
        "matrix": MATRIX.tolist(),
    } | changes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (content(model_fingerprint="0"), "belongs to a model of shape 0, but opt-125m"),
        (content(bits=[4, 8, 16, 32]), "no column for 3 bits"),
        (content(bits="all"), "bits is 'all'"),
        (content(bits=[4, 4, 8, 16]), "each once"),
        (content(matrix=MATRIX[:5].tolist()), r"\[5, 4\]; 12 layers by 4 bitwidths"),
        (content(matrix=(-MATRIX).tolist()), "layer 0, column 0 is -4.0"),
        (content(matrix=(MATRIX * np.nan).tolist()), "finite"),
        (content(matrix=[["a"] * 4] * 12), "no matrix of numbers"),
        (content(matrix=MATRIX[:, ::-1].tolist()), "loses more at 4 than at 3 bits"),
        ({"matrix": []}, "lacks bits, model_fingerprint"),
        ([[1, 2], [3]], "no matrix of numbers"),
        ("text", "no matrix of numbers"),
    ],
)
def test_bad_files(tmp_path: Path, value: object, message: str) -> None:
    (tmp_path / "omega.json").write_text(json.dumps(value))
    with pytest.raises(SpecError, match=message):
        load_omega(tmp_path / "omega.json", SHAPE, BITS)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        load_omega(tmp_path / "none.json", SHAPE, BITS)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        load_omega(tmp_path / "bad.json", SHAPE, BITS)

"""Omega files of other programs: plain arrays, the prototype's order of columns, and refusals."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.model.finding import model_shape
from planner.profiles.sensitivity import (
    MeasuredPoint,
    OmegaContent,
    load_omega,
    save_omega,
)
from quant.common.errors import SpecError

SHAPE = model_shape("opt-125m")
BITS = (3, 4, 8, 16)
MATRIX = np.linspace(4, 1, 12)[:, None] * np.array([1.0, 0.3, 0.01, 0.0])
AS_TEXT = [3, 0, 1, 2]  # the prototype sorts bitwidths as text: 16, 3, 4, 8


@pytest.mark.parametrize("suffix", [".json", ".npy"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], AS_TEXT])
def test_plain_arrays_in_both_orders(suffix: str, order: list[int], tmp_path: Path) -> None:
    path = tmp_path / f"omega{suffix}"
    if suffix == ".npy":
        np.save(path, MATRIX[:, order].astype(np.float32))
    else:
        path.write_text(json.dumps(MATRIX[:, order].tolist()))
    assert load_omega(path, SHAPE, BITS).matrix == pytest.approx(MATRIX, rel=1e-6)
    assert load_omega(path, SHAPE, (4, 16)).matrix == pytest.approx(MATRIX[:, [1, 3]], rel=1e-6)


@pytest.mark.parametrize("form", ["bare", "layers"])
def test_5_and_6_bit_lie_between_4_and_8_where_a_file_lacks_them(form: str, tmp_path: Path) -> None:
    path, rows = tmp_path / "omega.json", MATRIX.tolist()
    by_layer = {str(i): dict(zip(map(str, BITS), row, strict=True)) for i, row in enumerate(rows)}
    path.write_text(json.dumps(rows if form == "bare" else by_layer))
    found = load_omega(path, SHAPE, (3, 4, 5, 6, 8, 16))
    assert found.matrix[:, [0, 1, 4, 5]] == pytest.approx(MATRIX)
    four, five, six, eight = np.log(found.matrix[:, 1:5]).T
    assert (four - five) / (four - eight) == pytest.approx(np.full(12, 0.37))
    assert (four - six) / (four - eight) == pytest.approx(np.full(12, 0.68))
    assert found.source.endswith("omega.json; 5 and 6 bit between its 4 and 8")
    path.write_text(json.dumps([[3.0, 1.0, 0.0, 0.0]] * 12))
    lossless = load_omega(path, SHAPE, (4, 6, 8, 16)).matrix
    assert (lossless[:, 1] > 0.01).all(), "8 bit loses something, whatever a file says"
    path.write_text(json.dumps({str(i): {"3": 1.0, "8": 0.1} for i in range(12)}))
    with pytest.raises(SpecError, match="no column for 6 bits"):
        load_omega(path, SHAPE, (6, 8))


def test_layers_as_keys(tmp_path: Path) -> None:
    rows = {str(i): dict(zip(map(str, BITS), row, strict=True)) for i, row in enumerate(MATRIX)}
    path = tmp_path / "omega.json"
    path.write_text(json.dumps(dict(reversed(rows.items()))))
    assert load_omega(path, SHAPE, (3, 8)).matrix == pytest.approx(MATRIX[:, [0, 2]])
    del rows["7"]
    path.write_text(json.dumps(rows))
    with pytest.raises(SpecError, match="11 layers; 0 to 11 are needed"):
        load_omega(path, SHAPE, BITS)
    rows["7"] = {"3": 1.0}
    path.write_text(json.dumps(rows))
    with pytest.raises(SpecError, match="layer 7 has other bitwidths"):
        load_omega(path, SHAPE, BITS)


@pytest.mark.parametrize("form", ["bare", "named", "layers", "bits of layers"])
def test_numbers_beyond_all_measure(form: str, tmp_path: Path) -> None:
    """JSON's integers have no end, and Python refuses to read those of over 4,300 digits."""
    huge = 10**400
    rows = [[huge, 1, 0, 0]] * 12
    by_layer = {str(layer): dict.fromkeys(map(str, BITS), huge) for layer in range(12)}
    contents = {
        "bare": rows,
        "named": {"bits": BITS, "model_fingerprint": SHAPE.fingerprint(), "matrix": rows},
        "layers": by_layer,
        "bits of layers": {str(layer): {"9" * 5000: 1.0} for layer in range(12)},
    }
    path = tmp_path / "omega.json"
    path.write_text(json.dumps(contents[form]))
    with pytest.raises(SpecError, match=r"holds no matrix of numbers|layer 0 is no mapping"):
        load_omega(path, SHAPE, BITS)


class Bomb:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickles_are_refused_with_the_remedy(protocol: int, tmp_path: Path) -> None:
    path, touched = tmp_path / "gen_opt_125m_ind.pkl", tmp_path / "touched"
    path.write_bytes(pickle.dumps(Bomb(touched), protocol=protocol))
    with pytest.raises(SpecError, match=r"can run code.*convert it: python -c"):
        load_omega(path, SHAPE, BITS)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["ind.pkl", "$(touch owned) 'x'; touch owned.pkl"])
def test_the_remedy_works(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(MATRIX[:, AS_TEXT]))
    with pytest.raises(SpecError) as refused:
        load_omega(tmp_path / name, SHAPE, BITS)
    command = "python -c" + str(refused.value).partition("python -c")[2]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env={**os.environ, "PATH": path})
    assert {each.name for each in tmp_path.iterdir()} == {name, "omega.json"}
    assert load_omega(tmp_path / "omega.json", SHAPE, BITS).matrix == pytest.approx(MATRIX)


def test_arrays_that_are_none(tmp_path: Path) -> None:
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([Bomb(tmp_path / "touched")], dtype=object), allow_pickle=True)
    text = tmp_path / "text.npy"
    np.save(text, np.array([["a"]]))
    huge = tmp_path / "huge.npy"
    np.save(huge, MATRIX)
    huge.write_bytes(huge.read_bytes().replace(b"(12, 4)", b"(9**9,)"))
    endless = tmp_path / "endless.npy"
    endless.write_bytes((tmp_path / "text.npy").read_bytes()[:20])
    for path in (objects, text, huge, endless):
        with pytest.raises(SpecError, match=r"array of numbers|numbers are needed"):
            load_omega(path, SHAPE, BITS)
    assert not (tmp_path / "touched").exists()


def content(points: tuple[MeasuredPoint, ...] = ()) -> OmegaContent:
    told = {"method": "variance", "rounding": "nearest", "calibration_tokens": 512, "seed": 3}
    return OmegaContent(BITS, SHAPE.fingerprint(), MATRIX, told, points)


def test_provenance_and_points_come_back(tmp_path: Path) -> None:
    mixed = (3,) * 6 + (8,) * 6
    points = (MeasuredPoint((16,) * 12, 20.0, 0.0), MeasuredPoint(mixed, 21.5, 0.2))
    path = tmp_path / "omega.json"
    save_omega(path, content(points))
    omega = load_omega(path, SHAPE, (4, 8))  # points may have bits that are not asked for
    assert omega.matrix == pytest.approx(MATRIX[:, [1, 2]])
    assert omega.source == f"{path} (variance, nearest, calibration tokens 512)"
    assert [point.omega for point in omega.points] == pytest.approx(
        [0, MATRIX[:6, 0].sum() + MATRIX[6:, 2].sum()]
    )
    assert [(p.perplexity, p.error) for p in omega.points] == [(20, 0), (21.5, 0.2)]
    assert content(points).weighed_points() == omega.points
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "change",
    [
        {"bitwidths": [16] * 11},
        {"bitwidths": [5] * 12},
        {"bitwidths": [[3]] * 12},
        {"bitwidths": "3" * 12},
        {"perplexity": None},
        {"perplexity": 0.5},
        {"perplexity": float("nan")},
        {"perplexity": float("inf")},
        {"perplexity": 10**400},
        {"error": 10**400},
        {"error": -1},
    ],
)
def test_points_that_cannot_be_used(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "omega.json"
    save_omega(path, content((MeasuredPoint((16,) * 12, 20.0, 0.0),)))
    written = json.loads(path.read_text())
    written["points"][0] |= change
    path.write_text(json.dumps(written))
    with pytest.raises(SpecError, match=r"point 0 needs bitwidths \(12, among"):
        load_omega(path, SHAPE, BITS)


@pytest.mark.parametrize("provenance", [None, "text", {"method": ["a"]}, {"method": "\x1b[31m"}])
def test_provenance_of_another_hand_is_no_obstacle(provenance: object, tmp_path: Path) -> None:
    path = tmp_path / "omega.json"
    save_omega(path, content())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"provenance": provenance}))
    assert "\x1b" not in load_omega(path, SHAPE, BITS).source


def test_writing_replaces_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "omega.json"
    save_omega(path, content())
    before = path.read_text()

    def fails(*_: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(SpecError, match="cannot write"):
        save_omega(path, content())
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    for name in ("", "no/such/folder/omega.json", "a\0b"):
        with pytest.raises(SpecError, match="cannot write"):
            save_omega(name, content())

"""Options of serving: ranges, and the key's way in."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.processes import placement, reservation
from actors.processes.placement import Placement
from llmpq.errors import DeviceError, SpecError
from llmpq.serve.options import ServeOptions, count_replicas, find_api_key, parse_replicas
from quant.common.text import printable

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": -1}, "port is -1"),
        ({"port": 65536}, "port is 65536"),
        ({"queue_limit": -1}, "queue_limit is -1"),
        ({"body_limit_bytes": 0}, "body_limit_bytes is 0"),
        ({"connection_limit": 0}, "connection_limit is 0"),
        ({"body_s": 0}, "body_s is 0"),
        ({"stall_s": float("nan")}, "stall_s is nan"),
        ({"drain_s": float("inf")}, "drain_s is inf"),
        ({"api_key": "short"}, "at least 16"),
        ({"api_key": "with spaces in it all over"}, "without spaces"),
        ({"served_model_names": ("",)}, "served_model_name is ''; give a name of printable"),
        ({"served_model_names": ("a", " ")}, "served_model_name is ' '"),
        ({"served_model_names": ("a\x1b[2J",)}, r"'a\\x1b\[2J'"),
        ({"served_model_names": ("a\nb",)}, r"'a\\nb'"),
        ({"served_model_names": ("\udc80",)}, r"'\\udc80'"),
        ({"served_model_names": ("a", "b", "a")}, "'a' twice; give each name once"),
        ({"host": "0.0.0.0"}, "open to other machines"),
        ({"host": "serve.example"}, "open to other machines"),
    ],
)
def test_values_out_of_range(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ServeOptions(**given)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert ServeOptions(host=host).api_key is None
    assert ServeOptions(host="0.0.0.0", api_key=KEY).api_key == KEY


def test_names_of_a_model() -> None:
    names = ("org/model-7B", "Modell für alle", "模型")
    assert ServeOptions(served_model_names=names).served_model_names == names


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    variables = {"LLMPQ_API_KEY": "other"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_api_key(file, variables) == KEY
    assert find_api_key(None, variables) == "other"
    assert find_api_key(None, {"LLMPQ_API_KEY": ""}) is None
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        find_api_key(file, variables)


def test_files_that_have_no_key(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe")
    for path, words in ((empty, "is empty"), (binary, "no ASCII"), (tmp_path / "none", "No such")):
        with pytest.raises(SpecError, match=words):
            find_api_key(path, {})


def test_the_key_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LLMPQ_API_KEY", KEY)
    assert KEY not in printable(f"the key is {KEY}")
    assert KEY not in repr(ServeOptions(api_key=KEY))


Bundle = dict[str, float]


def counted(text: str, free: int, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> int:
    """Copies that are started where Ray grants `free` of them, which take `bundle` each."""
    granted = [Placement(bundle, 0.0, 0.0, 1)] * 4
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(placement, "place", lambda stages, offered: granted)
    monkeypatch.setattr(reservation, "copies_granted", lambda placements, most: min(free, most))
    return count_replicas([None] * 4, parse_replicas(text))


@pytest.mark.parametrize(
    ("text", "free", "expected"),
    [
        ("1", 0, 1),
        ("2", 3, 2),
        ("auto", 3, 3),
        ("3", 2, "free devices for 2 copies of the plan, 4 each; give --replicas 2, add nodes"),
        ("2", 0, "free devices for 0 copies of the plan, 4 each; add nodes"),
        ("auto", 0, "--replicas auto: there are free devices for 0"),
        ("0", 3, "--replicas is '0'; give 1 to 64, or auto"),
        ("two", 3, "--replicas is 'two'"),
        ("65", 100, "--replicas is '65'"),
    ],
)
def test_as_many_are_started_as_have_devices(
    text: str, free: int, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(expected, int):
        assert counted(text, free, {"T4": 1.0}, monkeypatch) == expected
        return
    with pytest.raises((SpecError, DeviceError), match=expected):
        counted(text, free, {"T4": 1.0}, monkeypatch)


def test_emulated_stages_have_no_devices_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted("3", 3, {}, monkeypatch) == 3
    with pytest.raises(SpecError, match="emulated; give a number"):
        counted("auto", 64, {}, monkeypatch)

"""Inputs that `benchmarks.stress.fuzz` and the property tests found, one for each fault."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from llmpq.rows.row import BadRow, row_from_line
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import SINGLE_FILE
from quant.common.errors import CheckpointError
from tests.properties.mutation import nested
from tests.properties.parsers import parsers
from tests.properties.seeds import (
    config_seeds,
    gptq_seeds,
    line_seeds,
    manifest_seed,
    omega_seeds,
    parquet_seed,
    plan_seeds,
    profile_seeds,
)


def changed(seed: bytes, *path: str | int, value: Any) -> bytes:
    """The JSON `seed` with another value at `path`."""
    content = json.loads(seed)
    holder = content
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return json.dumps(content).encode()


def changed_plan(*path: str | int, value: Any) -> bytes:
    """The same of a plan, which is made when it is asked for: it takes seconds."""
    return changed(plan_seeds()[0], *path, value=value)


LINE, CONFIG = line_seeds()[3], config_seeds()[0]
_NPY = b"\x93NUMPY\x02\x00\x10\x00\x00\x00{'descr': '<f8',"

FOUND: dict[str, tuple[str, Callable[[], bytes]]] = {
    "busy shares of other stages": (
        "plan JSON", lambda: changed_plan("predicted", "busy_share", value=[])),
    "a bottleneck beyond the stages": (
        "plan JSON", lambda: changed_plan("predicted", "decode_bottleneck", value=99)),
    "half a figure": (
        "plan JSON", lambda: changed_plan("baselines", 0, "sensitivity", value=None)),
    "no latency": ("plan JSON", lambda: changed_plan("predicted", "latency_s", value=0)),
    "no memory": ("plan JSON", lambda: changed_plan("stages", 0, "memory_limit_bytes", value=0)),
    "half a pair in a plan": ("plan JSON", lambda: changed_plan("cluster", value="\ud800")),
    "half a pair in a message": (
        "prompt line",
        lambda: changed(LINE, "body", "messages", 0, "content", value="\ud800")),
    "a deep message": (
        "prompt line", lambda: changed(LINE, "body", "messages", 0, "content", value=nested(400))),
    "a long value": ("prompt line", lambda: changed(LINE, "custom_id", value=["x" * 5000])),
    "no window": (
        "config.json", lambda: changed(config_seeds()[-1], "sliding_window", value=-1)),
    "layers without end": (
        "config.json", lambda: changed(CONFIG, "num_hidden_layers", value=10**9)),
    "a width of 400 digits": (
        "config.json", lambda: changed(CONFIG, "intermediate_size", value=10**400)),
    "four bits as a float": (
        "quantize_config.json", lambda: changed(gptq_seeds()[0], "bits", value=4.0)),
    "5,000 digits": (
        "profile CSV", lambda: profile_seeds()[0].replace(b",128,", b",%s," % (b"9" * 5000))),
    "no seconds": ("profile CSV", lambda: profile_seeds()[0].replace(b",1.5", b",5e-324")),
    "a long file name": (
        "shard index", lambda: json.dumps({"weight_map": {"w": "x" * 5000}}).encode()),
    "a header that ends": ("omega file", lambda: _NPY),
    "less than nothing": (
        "omega file", lambda: omega_seeds()[3].replace(b"(12, 4), }  ", b"(-112, 4), }")),
    "a date that is none": ("cluster YAML", lambda: b"name: !!timestamp x\nnodes: []\n"),
    "an empty number": ("cluster YAML", lambda: b"name: !!int ''\nnodes: []\n"),
    "sampling that is a list": (
        "job manifest", lambda: changed(manifest_seed()[0], "sampling", value=[])),
    "a large cluster file": ("cluster YAML", lambda: b"name: x\n" + b"# comment\n" * 40_000),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_refused_in_our_words(name: str, tmp_path: Path) -> None:
    parser, make = FOUND[name]
    assert not parsers()[parser].check(make(), tmp_path)


def test_text_of_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    table = pa.table({"prompt": pa.array([b"valid"], pa.binary()).cast(pa.string())})
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False)
    spoiled = sink.getvalue().replace(b"valid", b"va\xff\xfed")
    assert spoiled != sink.getvalue()
    assert not parsers()["prompt Parquet"].check(spoiled, tmp_path)
    assert parsers()["prompt Parquet"].check(parquet_seed()[0], tmp_path)


def check_cut_footers(folder: Path, step: int) -> None:
    (seed,) = parquet_seed()
    for at in range(len(seed) // 4, len(seed) - 8, step):
        parsers()["prompt Parquet"].check(seed[:at] + seed[at + 2 :], folder)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.rare)])
def test_two_bytes_less_in_a_parquet_footer_end_no_process(step: int, tmp_path: Path) -> None:
    """pyarrow aborts where it is asked for a column whose statistics are damaged."""
    process = get_context("fork").Process(target=check_cut_footers, args=(tmp_path, step))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_shape_beyond_64_bits(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}
    header = json.dumps({"w": entry}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(tmp_path).read("w")


def test_a_message_quotes_a_part_of_a_long_value() -> None:
    row = row_from_line(json.dumps({"prompt": "x", "seed": "9" * 10**6}).encode(), "f:1")
    assert isinstance(row, BadRow)
    assert len(row.error) < 2000
    assert row.error.endswith("it must be a whole number")

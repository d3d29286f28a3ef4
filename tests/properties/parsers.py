"""Every parser of outside input as one call on bytes, with valid inputs to spoil.

`Parser.check` returns whether the input was accepted; it lets through whatever error is not one
that llmpq means its users to see, and asserts that the others say where. What is accepted is put to
use as far as that costs no time: sums, digests, tables, and the way back to text.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from actors.messages import Sampling
from actors.stage.model_config import checked_end_tokens
from llmpq.jobs.result_lines import result_identity
from llmpq.jobs.store import Manifest
from llmpq.quality.text_windows import read_documents
from llmpq.report.page import report_page
from llmpq.report.plan_tables import comparison_table, plan_table
from llmpq.rows.row import FINGERPRINT_HEX, BadRow, digest, row_from_line
from llmpq.rows.sampling import job_sampling, merge_sampling
from planner.cluster.file import MOST_TIME_SCALE
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.profiles.rows import read_profiles, write_profiles
from planner.profiles.sensitivity import load_omega
from planner.workload import Workload
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_config import CONFIG_FILE, GENERATION_CONFIG_FILE
from quant.checkpoint.stored_methods import read_stored_config
from quant.checkpoint.stored_tensors import INDEX_FILE, SINGLE_FILE
from quant.common.errors import LlmpqError, SpecError
from tests.properties import tokenizers
from tests.properties.mutation import (
    Mutate,
    dumps,
    mutate_bytes,
    mutate_cells,
    mutate_framed,
    mutate_json,
)
from tests.properties.seeds import (
    BITS,
    FOLDER_BYTES,
    cluster_seeds,
    config_seeds,
    folder_seeds,
    generation_seeds,
    gptq_seeds,
    index_seed,
    line_seeds,
    manifest_seed,
    omega_seeds,
    parquet_seed,
    plan_seeds,
    profile_seeds,
    result_seed,
    safetensors_seed,
    shape,
    text_seeds,
)
from tests.properties.tables import (
    packed_prompts,
    packed_seeds,
    prompt_csv,
    prompt_csv_seeds,
    read_prompts,
    result_csv,
    result_csv_seeds,
)

MESSAGE_CHARACTERS = 2000
"""Most characters of one error: what somebody else wrote must not fill a log."""


@dataclass(frozen=True)
class Parser:
    """`parse` gets the input's bytes and a folder of its own, and returns whether it was taken.

    `watched`: files and processes, which a parser in a process of its own would not show anyway;
    that one ends with `close`.
    """

    name: str
    seeds: Callable[[], tuple[bytes, ...]]
    mutate: Mutate
    parse: Callable[[bytes, Path], bool]
    watched: bool = True
    close: Callable[[], None] = lambda: None

    def check(self, data: bytes, folder: Path) -> bool:
        """Whether the input is accepted; AssertionError for a refusal that does not say where."""
        try:
            return self.parse(data, folder)
        except LlmpqError as error:
            _check_message(str(error), folder)
            return False


def _check_message(message: str, folder: Path) -> None:
    assert folder.name in message, f"the message does not say where: {message[:300]}"
    assert len(message) <= MESSAGE_CHARACTERS, f"{len(message)} characters: {message[:300]}"


def _cluster(data: bytes, folder: Path) -> bool:
    spec = ClusterSpec.from_yaml(_file(folder, "cluster.yaml", data))
    spec.fingerprint()
    for device in spec.devices:
        assert 0 < device.memory_bytes < 2**60
        assert 1 <= device.link_bytes_per_s < math.inf
    try:
        text = spec.to_yaml()
    except SpecError:  # devices of one kind that differ, which a file cannot say
        return True
    assert ClusterSpec.from_dict(yaml.safe_load(text)) == spec
    return True


def _plan(data: bytes, folder: Path) -> bool:
    """As `llmpq run` reads one: what is accepted is what the planner could have written."""
    path = _file(folder, "plan.json", data)
    plan = PlanSpec.load(path)
    text = plan.to_json()
    assert PlanSpec.from_json(text) == plan
    if plan.model.fingerprint != shape().fingerprint():  # refused as another model's
        return False
    check_plan(plan, shape(), str(path))
    assert len({stage.device for stage in plan.stages}) == len(plan.stages)
    for stage in plan.stages:
        assert stage.memory.total == stage.memory_bytes <= stage.memory_limit_bytes
        assert 0 <= plan.time_scale * stage.decode_s < MOST_TIME_SCALE * 1e9
    console = Console(file=io.StringIO(), width=140, markup=False)
    console.print(plan_table(plan), comparison_table(plan))
    if len(text) % 8 == 0:  # slower than all the rest
        assert "<script" not in report_page(plan)
    return True


def _line(data: bytes, folder: Path) -> bool:
    place = f"{folder.name}:1"
    row = row_from_line(data, place)
    if isinstance(row, BadRow):
        row.error.encode()
        _check_message(f"{place} {row.error}", folder)
        return False
    row.custom_id.encode()
    merge_sampling(Sampling(), row.sampling)
    digest(row.content, FINGERPRINT_HEX)
    json.dumps(row.content, ensure_ascii=False).encode()
    return True


def _lines(data: bytes, folder: Path) -> bool:
    return read_prompts(_file(folder, "prompts.jsonl", data))


def _parquet(data: bytes, folder: Path) -> bool:
    return read_prompts(_file(folder, "prompts.parquet", data))


def _text(data: bytes, folder: Path) -> bool:
    read_documents([_file(folder, "text.jsonl", data)])
    return True


def _profile(data: bytes, folder: Path) -> bool:
    path = _file(folder, "profile.csv", data)
    rows = read_profiles(path)
    read_profiles(path, torn_end=True)
    for row in rows:
        assert 0 < row.seconds < math.inf
        assert float(row.layer.linear_parameters) > 0
    write_profiles(path, rows)
    again = read_profiles(path)
    assert len(again) == len(rows)
    for before, after in zip(rows, again, strict=True):
        assert math.isclose(before.seconds, after.seconds, rel_tol=1e-12)
    return True


def _omega(data: bytes, folder: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        omega = load_omega(_file(folder, "omega.json", data), shape(), BITS)
    assert omega.matrix.shape == (shape().layers, len(BITS))
    assert (omega.matrix >= 0).all()
    return True


def _config(data: bytes, folder: Path) -> bool:
    found = model_shape(_file(folder, "config.json", data))
    found.fingerprint()
    assert 0 < found.total_parameters < 1e30
    assert len(found.layer_linears) >= 4
    assert found.sliding_window is None or found.sliding_window > 0
    return True


def _model_folder(data: bytes, folder: Path) -> bool:
    """Configurations and the header of the weights in one JSON object; the weights are zeros."""
    from llmpq.model_check import checked_shape

    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = None
    if not isinstance(files, dict):
        return _config(data, folder)
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        _file(folder, name, dumps(files.get(name)) or b"")
    header = dumps(files.get("header")) or b""
    weights = _file(folder, SINGLE_FILE, len(header).to_bytes(8, "little") + header)
    with weights.open("r+b") as file:
        file.truncate(8 + len(header) + FOLDER_BYTES)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = checked_shape(folder)
            _read_weights(folder)
    finally:
        for path in (folder / GENERATION_CONFIG_FILE, weights):
            path.unlink()
    for warning in told:
        _check_message(str(warning.message), folder)
    assert found.layers <= len(files["header"])
    return True


def _read_weights(folder: Path) -> None:
    """What stands for weights is read, where anything does that may be zeros."""
    config = read_stored_config(folder)
    if config is None or config.method == "compressed-tensors":
        return
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names():
        if name.endswith("_proj.weight"):
            assert tuple(checkpoint.read(name).shape) == checkpoint.shape_of(name)


def _generation(data: bytes, folder: Path) -> bool:
    _file(folder, GENERATION_CONFIG_FILE, data)
    found = job_sampling(None, "model", folder, Workload(4, 100, 50))
    assert 0 <= found.sampling.temperature < math.inf
    for text in (found.note or "", found.warning or ""):
        assert text.isprintable()
        assert len(text) < MESSAGE_CHARACTERS
    assert all(type(token) is int for token in checked_end_tokens(folder))
    return True


def _gptq(data: bytes, folder: Path) -> bool:
    _file(folder, "quantize_config.json", data)
    found = read_stored_config(folder)
    assert found is not None
    assert type(found.bits) is int
    return True


def _safetensors(data: bytes, folder: Path) -> bool:
    _file(folder, SINGLE_FILE, data)
    return _read_all(folder)


def _index(data: bytes, folder: Path) -> bool:
    _file(folder, INDEX_FILE, data)
    if not (folder / "a.safetensors").exists():
        (folder / "a.safetensors").write_bytes(safetensors_seed())
    return _read_all(folder)


def _read_all(folder: Path) -> bool:
    checkpoint = Checkpoint(folder)
    checkpoint.check_files()
    for name in checkpoint.names():
        where = checkpoint.range_of(name)
        assert where.path.resolve().parent == folder.resolve()
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == checkpoint.shape_of(name)
        assert tensor.nbytes == where.stop - where.start
    return True


def _manifest(data: bytes, folder: Path) -> bool:
    from llmpq.jobs.store import JobIdentity

    found = Manifest.read(_file(folder, "job.json", data))
    assert found is not None
    found.check_same_job(JobIdentity("m", "name", Sampling(max_new_tokens=8)), folder / "out")
    return True


def _result(data: bytes, folder: Path) -> bool:
    found = result_identity(data)
    return found is not None and isinstance(found.custom_id, str)


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@cache
def parsers() -> dict[str, Parser]:
    """By name."""
    listed = (
        Parser("cluster YAML", cluster_seeds, _mutate_yaml, _cluster),
        Parser("plan JSON", plan_seeds, mutate_json, _plan),
        Parser("prompt line", line_seeds, mutate_json, _line),
        Parser("prompt file", lambda: (b"\n".join(line_seeds()),), mutate_bytes, _lines),
        Parser("prompt Parquet", parquet_seed, mutate_bytes, _parquet),
        Parser("prompt CSV", prompt_csv_seeds, mutate_cells, prompt_csv),
        Parser("packed prompts", packed_seeds, mutate_bytes, packed_prompts),
        Parser("text lines", text_seeds, mutate_bytes, _text),
        Parser("profile CSV", profile_seeds, mutate_cells, _profile),
        Parser("omega file", omega_seeds, mutate_json, _omega),
        Parser("config.json", config_seeds, mutate_json, _config),
        Parser("model folder", folder_seeds, mutate_json, _model_folder),
        Parser("generation_config.json", generation_seeds, mutate_json, _generation),
        Parser("quantize_config.json", gptq_seeds, mutate_json, _gptq),
        Parser("safetensors", lambda: (safetensors_seed(),), mutate_framed, _safetensors),
        Parser("shard index", index_seed, mutate_json, _index),
        Parser("packed layer", _packed_seeds, _mutate_packed, _packed),
        Parser("job manifest", manifest_seed, mutate_json, _manifest),
        Parser("result line", result_seed, mutate_json, _result),
        Parser("result CSV", result_csv_seeds, mutate_cells, result_csv),
        Parser(
            "chat templates",
            tokenizers.template_seeds,
            tokenizers.mutate_template,
            tokenizers.template,
            watched=False,
            close=tokenizers.close,
        ),
        Parser(
            "tokenizer files",
            tokenizers.file_seeds,
            tokenizers.mutate_file,
            tokenizers.file,
            watched=False,
            close=tokenizers.close,
        ),
    )
    return {parser.name: parser for parser in listed}


def _mutate_yaml(data: bytes, rng: Any) -> bytes:
    """JSON is YAML too."""
    return mutate_json(data, rng) if data[:1] == b"{" else mutate_bytes(data, rng)


def _packed_seeds() -> tuple[bytes, ...]:
    from tests.properties.packed_layer import packed_layer

    return (packed_layer().data,)


def _mutate_packed(data: bytes, rng: Any) -> bytes:
    from tests.properties.packed_layer import mutate

    return mutate(data, rng)


def _packed(data: bytes, folder: Path) -> bool:
    from tests.properties.packed_layer import packed_layer

    return packed_layer().restores(data, folder)

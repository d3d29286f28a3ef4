"""GGUF files that are no models for llmpq: what is said of them, in one line with exit code 2."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpq.cli.plan import main as plan
from llmpq.model_check import checked_shape
from quant.common.errors import CheckpointError, LlmpqError, SpecError
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.quant.checkpoint.gguf.written import Array, write_gguf

Tensors = dict[str, Array]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny(tmp_path_factory.mktemp("original"), CONFIGS["llama"])


def said(path: Path) -> str:
    with pytest.raises(LlmpqError) as caught:
        checked_shape(path)
    return str(caught.value)


def _drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, value: Array) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop("blk.3.ffn_up.weight"), ("no tensor blk.3.ffn_up.weight", "incomplete")),
        (_drop("token_embd.weight"), ("no token_embd.weight", "download")),
        (
            _put("blk.1.attn_v.weight", np.zeros((16, 24), np.float32)),
            ("tensor blk.1.attn_v.weight is [16, 24] but its metadata asks for [16, 48]",),
        ),
        (
            _put("blk.5.attn_norm.weight", np.zeros(48, np.float32)),
            ("its metadata says 5 layers (block_count), but the weights have 6",),
        ),
        (
            _put("blk.2.attn_sub_norm.weight", np.zeros(48, np.float32)),
            ("attn_sub_norm.weight", "answers would be wrong"),
        ),
        (_put("blk.2.attn_q.bias", np.ones(48, np.float32)), ("bias", "answers would be wrong")),
        (_put("rope_freqs.weight", np.array([1, 2, 1, 7], np.float32)), ("rope_freqs", "llama 3")),
        (_put("rope_factors_long.weight", np.ones(4, np.float32)), ("longrope",)),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], None], words: tuple[str, ...], model: Any, tmp_path: Path
) -> None:
    message = said(write_gguf(model, tmp_path / "tiny.gguf", change=change))
    assert all(word in message for word in (*words, "tiny.gguf")), message


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, ("llama.expert_used_count is missing",)),
        ({"llama.block_count": None}, ("llama.block_count is missing",)),
        ({"llama.attention.head_count": 0}, ("llama.attention.head_count is 0",)),
        ({"llama.feed_forward_length": [80] * 5}, ("llama.feed_forward_length is [80,",)),
        ({"llama.rope.dimension_count": 4}, ("dimension_count is 4; it must be 8",)),
        ({"llama.rope.scaling.type": "longrope"}, ("longrope", "none, linear or yarn")),
        ({"llama.rope.freq_base": float("nan")}, ("llama.rope.freq_base is nan",)),
        ({"llama.logit_scale": 0.5}, ("llama.logit_scale is 0.5",)),
        ({"tokenizer.ggml.eos_token_id": 7_000_000}, ("eos_token_id is 7000000",)),
        ({"tokenizer.ggml.model": "bert"}, ("tokenizer.ggml.model", "byte-level BPE")),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "mine",
                "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.merges": ["a b"],
            },
            ("tokenizer.ggml.pre is 'mine'", "smollm"),
        ),
    ],
)
def test_metadata_that_is_not_run(
    metadata: dict[str, Any], words: tuple[str, ...], model: Any, tmp_path: Path
) -> None:
    message = said(write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata))
    assert all(word in message for word in (*words, "tiny.gguf")), message


def test_an_unknown_architecture_names_the_known_ones(model: Any, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"gpt99", 1).replace(b"llama", b"gpt99"))
    message = said(file)
    assert "'gpt99'" in message
    assert "bloom, deepseek2, gemma2, gemma3, gemma4, glm4, glm4moe, gpt-oss, gptneox" in message


@pytest.mark.parametrize("left", [0, 3, 20, 500, 5_000, -1])
def test_a_file_that_is_cut_short(left: int, model: Any, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:left])
    message = said(file)
    assert "truncated or damaged" in message
    assert "download it again" in message


@pytest.mark.parametrize("seed", range(40))
def test_damaged_headers_end_in_a_message(seed: int, model: Any, tmp_path: Path) -> None:
    """Whatever bytes a header has, reading it gives a shape or one of our errors."""
    file = write_gguf(model, tmp_path / "tiny.gguf")
    content = bytearray(file.read_bytes())
    rng = np.random.default_rng(seed)
    for at in rng.integers(4, 3_000, 3):
        content[at] = rng.integers(0, 256)
    file.write_bytes(content)
    with suppress(SpecError, CheckpointError):
        assert checked_shape(file).layers


def test_several_models_in_a_folder_are_named(model: Any, tmp_path: Path) -> None:
    for name in ("tiny-Q4.gguf", "tiny-Q8.gguf"):
        write_gguf(model, tmp_path / name)
    assert "2 GGUF models; give the file of one of them: tiny-Q4.gguf, tiny-Q8" in said(tmp_path)


def test_a_missing_part_is_named(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "tiny.gguf", part_bytes=100_000)
    parts = sorted(tmp_path.iterdir())
    parts[1].unlink()
    message = said(parts[0])
    assert f"lacks 1 of {len(parts)} parts of tiny, {parts[1].name} first" in message


def test_commands_end_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path, CONFIGS["qwen2"])
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata={"qwen2.expert_count": 8})
    assert plan(["--model", str(file), "--device_names", "T4", "--device_numbers", "1"]) == 2
    message = capsys.readouterr().err
    assert "a mixture of 8 experts of architecture qwen2; of those llmpq reads llama," in message


def test_without_the_package_one_line_says_what_to_install(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf")
    real = builtins.__import__

    def without_gguf(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    assert "pip install 'llmpq[gguf]'" in said(file)

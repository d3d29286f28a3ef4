"""A stage that starts again takes its layers from the cache, and computes the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from quant.checkpoint.reader import Checkpoint
from quant.devices import local_processor
from quant.loading.cache_settings import CacheSettings
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, save_tiny

CPU = torch.device("cpu")
BITWIDTHS = (4, 3, 16, 8, 4)
BOUNDS = ((0, 2), (2, LAYERS))


def start(folder: Path, cache: CacheSettings, dtype: str) -> list[Stage]:
    specs = [
        StageSpec(j, 2, range(*span), BITWIDTHS[slice(*span)], dtype, 3, 30, kv_tokens=90)
        for j, span in enumerate(BOUNDS)
    ]
    return [Stage(spec, folder, CPU, local_processor(CPU), cache) for spec in specs]


@pytest.mark.parametrize(
    ("name", "dtype", "shard"),
    [
        ("llama", "float32", "30KB"),
        ("llama-tied", "bfloat16", "30KB"),
        pytest.param("opt-post-norm", "bfloat16", "5GB", marks=pytest.mark.rare),
        pytest.param("bloom", "float32", "5GB", marks=pytest.mark.rare),
        pytest.param("gpt_neox", "bfloat16", "5GB", marks=pytest.mark.rare),
    ],
)
def test_restarted_stages_read_no_cached_layer(
    name: str, dtype: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, CONFIGS[name], shard=shard)
    cache = CacheSettings(str(tmp_path / "cache"))
    prompts = random_prompts((5, 9, 3))
    expected = generate(start(tmp_path, CacheSettings(enabled=False), dtype), prompts, 8, 2, 3)
    first = generate(start(tmp_path, cache, dtype), prompts, 8, 2, 3)
    read: set[str] = set()
    plain_read = Checkpoint.read

    def note(self: Checkpoint, name: str) -> torch.Tensor:
        read.add(name)
        return plain_read(self, name)

    monkeypatch.setattr(Checkpoint, "read", note)
    again = generate(start(tmp_path, cache, dtype), prompts, 8, 2, 3)
    assert first == again == expected
    numbers = {part for each in read for part in each.split(".") if part.isdigit()}
    assert numbers == {"2"}, "of the layers only the one of 16 bit is read"
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == LAYERS - 1


def test_two_stages_of_a_node_share_a_layer(tmp_path: Path) -> None:
    """Also where they run side by side, as two devices of a node do."""
    save_tiny(tmp_path, CONFIGS["llama"])
    cache = CacheSettings(str(tmp_path / "cache"))
    stages = [start(tmp_path, cache, "float32") for _ in range(2)]
    assert stages[0][0].stats() == stages[1][0].stats()
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == LAYERS - 1

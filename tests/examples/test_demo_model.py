"""The committed demo model is small, was really trained, and gets worse as its bits are taken away.

Perplexity is taken on the committed prompts, which are held-out text, because the text that a
running interpreter carries depends on its version.
"""

from __future__ import annotations

import importlib
import json
import math
import random
from itertools import combinations
from pathlib import Path
from pydoc_data.topics import topics as PYDOC_TOPICS
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from quant.rounding.canonical import dequantize, quantize
from tests.paths import EXAMPLES

MODEL = EXAMPLES / "demo_model"
PROMPTS = EXAMPLES / "demo_prompts.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def load() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@torch.inference_mode()
def perplexity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> float:
    """Of all prompt tokens but BOS, each prompt by itself."""
    log_probability, count = 0.0, 0
    for row in rows:
        ids = torch.tensor(tokenizer(row["prompt"])["input_ids"])
        predicted = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        log_probability += predicted.gather(1, ids[1:, None]).sum().item()
        count += len(ids) - 1
    return math.exp(-log_probability / count)


@pytest.fixture(scope="module")
def trained_perplexity(tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> float:
    return perplexity(load(), tokenizer, rows)


def test_the_model_fits_into_a_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 7.5e6


def test_weights_are_finite_float16() -> None:
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - a safetensors handle is not iterable
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.float16
            assert tensor.isfinite().all()


def test_layers_suit_uneven_stages_and_kernels() -> None:
    layers = load().model.layers
    assert len(layers) == 12
    linears = [module for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 12 * 7
    assert all(linear.in_features % 128 == 0 for linear in linears)


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn  x\n", "naïve Grüße — 漢字 🐍", " ", "a\x00b"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_agree_with_the_model(tokenizer: PreTrainedTokenizerBase) -> None:
    model = load()
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert special == [0, 1, 2]
    for config in (model.config, model.generation_config):
        assert [config.pad_token_id, config.bos_token_id, config.eos_token_id] == special
    assert len(tokenizer) == model.config.vocab_size


def test_prompts_are_many_and_of_differing_lengths(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> None:
    lengths = [len(tokenizer(row["prompt"])["input_ids"]) - 1 for row in rows]
    assert len(rows) >= 64
    assert len({row["custom_id"] for row in rows}) == len(rows)
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert min(lengths) <= 10
    assert 90 <= max(lengths) <= 110
    assert len(set(lengths)) >= 40


def test_the_model_was_trained(
    trained_perplexity: float, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> None:
    torch.manual_seed(0)
    untrained = perplexity(LlamaForCausalLM(load().config).float().eval(), tokenizer, rows)
    assert untrained > 0.9 * len(tokenizer)  # a guess at random has the vocabulary's size
    assert trained_perplexity < 40  # 36.9 when it was made
    assert trained_perplexity < untrained / 10


@pytest.mark.rare  # of the file that is shipped, which seldom changes
def test_fewer_bits_cost_quality(
    trained_perplexity: float, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> None:
    found = {16: trained_perplexity}
    for bits in (8, 4, 3):
        model = load()
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = dequantize(quantize(module.weight.data, bits))
        found[bits] = perplexity(model, tokenizer, rows)
    assert found[8] == pytest.approx(found[16], rel=0.02)
    assert found[16] < found[4] < found[3]  # 36.9, 37.5 and 41.5 when it was made


def test_the_record_agrees_with_the_weights(trained_perplexity: float) -> None:
    """Whole topics give more context than prompts do, so their perplexity is the lower one."""
    record = json.loads((MODEL / "training.json").read_text())
    scores = {name: found["perplexity"] for name, found in record["held_out_scores"].items()}
    assert trained_perplexity / 2 < scores["16-bit"] < trained_perplexity
    assert scores["16-bit"] < scores["untrained"] / 10
    assert scores["16-bit"] < scores["4-bit"] < scores["3-bit"]


@pytest.mark.rare  # of the file that is shipped, which seldom changes
def test_sampled_answers_differ_in_length(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> None:
    """About half meet EOS within 128 tokens; greedy answers seldom do."""
    prompts = [row["prompt"] for row in rows[::2]]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    torch.manual_seed(0)
    made = load().generate(**batch, max_new_tokens=128, do_sample=True, top_k=0)
    is_end = made[:, batch["input_ids"].shape[1] :] == tokenizer.eos_token_id
    ended = is_end[is_end.any(1)]
    assert 0.2 * len(prompts) < len(ended) < 0.8 * len(prompts)
    assert len(set(ended.int().argmax(1).tolist())) >= 8


@pytest.fixture
def demo_text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo_text")


@pytest.fixture
def train_demo_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_demo_model")


def test_related_topics_share_paragraphs_and_groups_do_not(demo_text: ModuleType) -> None:
    a, b, c = ("abc"[i] * 80 for i in range(3))
    topics = {
        "one": f"{a}\n\nx",
        "two": f"{b}\n\n{a}",
        "three": f"x\n\n{b}",
        "four": c,
        "five": "x",
    }
    groups = {frozenset(group) for group in demo_text.related_topics(topics)}
    assert groups == {frozenset({"one", "two", "three"}), frozenset({"four"}), frozenset({"five"})}


def test_no_paragraph_crosses_the_split(demo_text: ModuleType) -> None:
    parts = demo_text.split_topics(PYDOC_TOPICS)
    assert sorted(name for part in parts for name in part) == sorted(PYDOC_TOPICS)
    total = sum(map(len, PYDOC_TOPICS.values()))
    for part, share in zip(parts[1:], (0.05, 0.1), strict=True):
        assert 0.02 * total < sum(len(PYDOC_TOPICS[name]) for name in part) <= share * total
    texts = ["\n\n".join(PYDOC_TOPICS[name] for name in part) for part in parts]
    for one, other in combinations(texts, 2):
        shared = {p.strip() for p in one.split("\n\n")} & {p.strip() for p in other.split("\n\n")}
        assert all(len(paragraph) < 60 for paragraph in shared)


def test_repeated_paragraphs_are_kept_once(demo_text: ModuleType) -> None:
    long, other = "a" * 70, "b" * 70
    kept = demo_text.without_repeats([f"{long}\n\n{other}", f"{long}\n\nend", "short"], set())
    assert kept == [f"{long}\n\n{other}"]


def test_training_text_holds_no_held_out_paragraph(demo_text: ModuleType, tmp_path: Path) -> None:
    held_out = max(
        (PYDOC_TOPICS[name] for name in demo_text.split_topics(PYDOC_TOPICS)[2]), key=len
    )
    leaked = max(demo_text.paragraphs(held_out), key=len)
    (tmp_path / "module.py").write_text(
        f"def f():\n    {leaked!r}\n\ndef g():\n    {'own ' * 30!r}\n"
    )
    (tmp_path / "broken.py").write_text("def (")
    corpus = demo_text.read_corpus(PYDOC_TOPICS, tmp_path)
    assert ("own " * 30).strip() in corpus.train
    assert not any(leaked in text for text in corpus.train)
    assert any(leaked in text for text in corpus.held_out)


def test_blocks_cover_every_document_each_epoch(train_demo_model: ModuleType) -> None:
    documents = [[number] * 512 for number in range(8)]  # 4096 tokens: four blocks an epoch
    blocks = train_demo_model.batches(documents, random.Random(0))
    for _ in range(2):
        epoch = [next(blocks) for _ in range(4)]
        assert [block.shape[1] for block in epoch] == [256, 256, 512, 1024]
        counts = torch.cat([block.flatten() for block in epoch]).bincount()
        assert counts.tolist() == [512] * 8


def test_windows_score_like_one_pass(
    train_demo_model: ModuleType, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]
) -> None:
    model = load()
    text = rows[0]["prompt"]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.inference_mode():
        nats = model(input_ids=ids, labels=ids).loss.item()
    found = train_demo_model.score(model, tokenizer, [text])
    assert found.perplexity == pytest.approx(math.exp(nats), rel=1e-4)
    bits = nats * (ids.shape[1] - 1) / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=1e-4)


@pytest.mark.rare
def test_the_script_makes_a_model_that_loads(
    train_demo_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {
        name: PYDOC_TOPICS[name] for name in sorted(PYDOC_TOPICS) if len(PYDOC_TOPICS[name]) < 1500
    }
    monkeypatch.setattr(train_demo_model, "PYDOC_TOPICS", kept)
    monkeypatch.setattr(train_demo_model.sysconfig, "get_path", lambda _: str(tmp_path))
    output, prompts = tmp_path / "made" / "model", tmp_path / "prompts.jsonl"
    for steps in ("1", "2"):  # the second run replaces what the first one made
        train_demo_model.main(
            ["--output", str(output), "--prompts", str(prompts), "--steps", steps]
        )
    assert json.loads((output / "training.json").read_text())["steps"] == 2
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    assert AutoModelForCausalLM.from_pretrained(output).config.num_hidden_layers == 12
    assert all(json.loads(line)["prompt"] for line in prompts.read_text().splitlines())
    assert str(tmp_path) not in "".join(path.read_text() for path in output.glob("*.json"))


def test_options_that_cannot_work_are_refused(
    train_demo_model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_demo_model.read_options(["--steps", "0"])
    assert "--steps is 0; give a number of at least 1" in capsys.readouterr().err

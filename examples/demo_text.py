"""The text of the demo model: what every CPython documents itself with, split and tokenized.

Many topics of `pydoc_data.topics` repeat each other's paragraphs, so whole groups of related topics
are held out, and no paragraph of theirs is left in what is trained on.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"  # ids 0, 1, 2, in this order
POSITIONS = 1024
TOPIC_REPEATS = 2  # the docstrings outweigh the topics five to one
SHARED_PARAGRAPH = 60  # characters from which a common paragraph makes two topics related
LONGEST_PROMPT, PROMPTS = 100, 72
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, to choose the best step by, and to report on; `names` of the last."""

    train: list[str]
    validation: list[str]
    held_out: list[str]
    names: list[str]


def paragraphs(text: str) -> list[str]:
    """The paragraphs long enough that sharing one is no coincidence."""
    parts = (part.strip() for part in text.split("\n\n"))
    return [part for part in parts if len(part) >= SHARED_PARAGRAPH]


def related_topics(topics: Mapping[str, str]) -> list[list[str]]:
    """Groups of topic names: topics that share a paragraph, also through others, share a group."""
    parent = {name: name for name in topics}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    first_with: dict[str, str] = {}
    for name, text in topics.items():
        for paragraph in paragraphs(text):
            parent[root(name)] = root(first_with.setdefault(paragraph, name))
    groups: dict[str, list[str]] = {}
    for name in sorted(topics):
        groups.setdefault(root(name), []).append(name)
    return list(groups.values())


def split_topics(
    topics: Mapping[str, str], held_out: float = 0.1, validation: float = 0.05
) -> tuple[list[str], list[str], list[str]]:
    """Topic names for training, validation and holding out, by the hash of each group's first name.

    `held_out` and `validation` are shares of all characters. A group larger than half the held-out
    share always trains.
    """
    total = sum(map(len, topics.values()))
    room = {"held_out": held_out * total, "validation": validation * total}
    parts: dict[str, list[str]] = {"train": [], "held_out": [], "validation": []}
    ordered = sorted(related_topics(topics), key=lambda g: hashlib.sha256(g[0].encode()).digest())
    for group in ordered:
        size = sum(len(topics[name]) for name in group)
        fits = [part for part, left in room.items() if size <= min(left, total * held_out / 2)]
        part = fits[0] if fits else "train"
        parts[part] += group
        if fits:
            room[part] -= size
    return parts["train"], parts["validation"], parts["held_out"]


def docstrings(library: Path) -> Iterator[str]:
    """The docstrings of the Python files under `library`, tests and installed packages left out."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and deliberately broken files
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def without_repeats(documents: Iterable[str], seen: set[str]) -> list[str]:
    """The documents less the paragraphs in `seen`, which grows; what is left short is dropped."""
    kept = []
    for document in documents:
        parts = []
        for part in document.split("\n\n"):
            if part.strip() not in seen:
                parts.append(part)
            seen.update(paragraphs(part))
        text = "\n\n".join(parts).strip()
        if len(text) >= SHARED_PARAGRAPH:
            kept.append(text)
    return kept


def read_corpus(topics: Mapping[str, str], library: Path) -> Corpus:
    """The three parts of the text, without paragraphs that occur twice."""
    train, validation, held_out = split_topics(topics)
    seen: set[str] = set()
    parts = [
        without_repeats(sorted((topics[name] for name in names), key=len, reverse=True), seen)
        for names in (held_out, validation, train)
    ]
    extra = without_repeats(docstrings(library), seen)
    return Corpus(parts[2] * TOPIC_REPEATS + extra, parts[1], parts[0], sorted(held_out))


def train_tokenizer(documents: Sequence[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts BOS first; any text decodes to itself."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """BOS, the document, EOS."""
    return [*tokenizer(document, verbose=False)["input_ids"], tokenizer.eos_token_id]


def prompt_rows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], count: int = PROMPTS
) -> list[dict[str, str]]:
    """`count` beginnings of held-out paragraphs, 5 to 100 tokens long, none overlapping another."""
    found: list[str] = []
    for document in documents:
        end = 0
        for paragraph in paragraphs(document):
            start = document.find(paragraph, end)
            length = 5 + 37 * len(found) % (LONGEST_PROMPT - 4)  # 37 and 96 share no factor
            ids = tokenizer.encode(document[start:], add_special_tokens=False, verbose=False)[
                :length
            ]
            text = str(tokenizer.decode(ids)).rstrip()
            if start >= end and len(ids) == length and document.startswith(text, start):
                found.append(text)
                end = start + len(text)
    chosen = [found[i * len(found) // count] for i in range(min(count, len(found)))]
    return [{"custom_id": f"demo-{i:03d}", "prompt": text} for i, text in enumerate(chosen)]

"""A cheap predictor: gradient boosting of trees on features of the prompt (Friedman, 2001).

scikit-learn grows the trees. They are kept as arrays of their public `tree_` and computed with by
numpy, so that a run needs no scikit-learn unless it learns, and no file is a pickle. The rows that
it has learnt from are kept beside them as features, no texts, for learning again with later ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from llmpq.lengths.predictor import Encoded, Example, FloatArray, IntArray, Prompt, Rest, buckets_of
from quant.common.errors import SpecError

Features = npt.NDArray[np.float32]
_Whole = TypeVar("_Whole", str, tuple[int, ...])

MOST_CHARACTERS = 1 << 14
MOST_IDS = 1 << 12
"""Of a longer prompt the first and the last half of so many are read; all are counted."""

FIRST_WORDS = 2
LAST_IDS = 4
_WORD_CELLS = 64
_FIRST_CELLS = 32
_ID_CELLS = 64

_ASKED = (
    ("list", "lists", "bullet", "bullets", "enumerate", "table"),
    ("steps", "step", "guide", "tutorial", "plan", "recipe"),
    ("essay", "story", "article", "poem", "blog", "letter", "speech"),
    ("code", "function", "program", "script", "implement", "python", "class"),
    ("explain", "describe", "detail", "detailed", "elaborate", "compare", "discuss"),
    ("summarize", "summary", "summarise", "shorten", "abstract"),
    ("translate", "rewrite", "rephrase", "correct", "edit", "convert"),
    ("short", "brief", "briefly", "concise", "only", "just", "word", "sentence"),
    ("yes", "no", "true", "false", "classify", "which", "choose"),
    ("what", "who", "when", "where", "how", "why"),
    ("examples", "example", "ideas", "several", "many", "all", "every"),
)
"""Words that ask for answers of a similar length, one feature each group."""

_WORD = re.compile(r"[^\W_]+")
_NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s", re.MULTILINE)
_NUMBER = re.compile(r"\d{1,6}")

TEXT_FEATURES = 15 + len(_ASKED) + FIRST_WORDS * _FIRST_CELLS + _WORD_CELLS
ID_FEATURES = 2 + _ID_CELLS + LAST_IDS * _FIRST_CELLS


def features_of(prompt: Prompt, with_text: bool, with_ids: bool) -> Features:
    """The features of a prompt: those of its text, then those of its token ids, as far as wanted.

    They are the same on every machine, as words are hashed by CRC-32.
    """
    found: list[float] = []
    if with_text:
        found += _of_text(prompt.text)
    if with_ids:
        found += _of_ids(prompt.token_ids)
    return np.array(found, dtype=np.float32)


def _of_text(text: str) -> list[float]:
    """Length, kinds of characters, lines, marks, words that ask for something, hashed words."""
    characters = len(text)
    text = _ends(text, MOST_CHARACTERS)
    read = max(1, len(text))
    words = [word.lower() for word in _WORD.findall(text)]
    numbers = [int(each) for each in _NUMBER.findall(text)]
    shape = [
        np.log1p(characters),
        np.log1p(len(words)),
        sum(map(len, words)) / max(1, len(words)),
        np.log1p(text.count("\n")),
        sum(map(str.isdigit, text)) / read,
        sum(map(str.isupper, text)) / read,
        sum(map(str.isspace, text)) / read,
        (read - sum(map(str.isascii, text))) / read,
        text.count("?"),
        float(text.rstrip().endswith("?")),
        float(text.rstrip().endswith(":")),
        np.log1p(text.count('"') + text.count("'")),
        np.log1p(sum(map(text.count, "{}()[];="))) + text.count("```"),
        np.log1p(len(_NUMBERED.findall(text))),
        np.log1p(max(numbers, default=0)),
    ]
    asked = [float(sum(word in group for word in words)) for group in _ASKED]
    first = [_one_of(words, place, _FIRST_CELLS) for place in range(FIRST_WORDS)]
    cells = _counts((_hashed(word) for word in words), _WORD_CELLS)
    return [*shape, *asked, *(value for each in first for value in each), *cells]


def _of_ids(ids: tuple[int, ...]) -> list[float]:
    tokens = len(ids)
    ids = _ends(ids, MOST_IDS)
    cells = _counts(map(_hashed_id, ids), _ID_CELLS)
    last = [str(each) for each in reversed(ids[-LAST_IDS:])]
    placed = [_one_of(last, place, _FIRST_CELLS) for place in range(LAST_IDS)]
    return [np.log1p(tokens), float(tokens), *cells, *(value for each in placed for value in each)]


def _ends(whole: _Whole, most: int) -> _Whole:
    """The first and the last half of what may be read of `whole`."""
    if len(whole) <= most:
        return whole
    return whole[: most // 2] + whole[-(most // 2) :]


def _one_of(words: Sequence[str], place: int, cells: int) -> list[float]:
    """A one in the cell of the word at `place`, if there is one."""
    found = [0.0] * cells
    if place < len(words):
        found[_hashed(words[place]) % cells] = 1.0
    return found


def _counts(hashes: Iterable[int], cells: int) -> list[float]:
    """Logarithms of how many hashes fall into each cell."""
    numbers = np.fromiter((each % cells for each in hashes), dtype=np.int64)
    counted: list[float] = np.log1p(np.bincount(numbers, minlength=cells)).tolist()
    return counted


def _hashed(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "backslashreplace"))


def _hashed_id(token_id: int) -> int:
    return token_id * 2654435761 >> 16  # Knuth's multiplicative hashing


MOST_ROWS = 4096
"""Rows that are learnt from, the latest ones; their features take about 5 MB."""

MOST_WEIGHT = 8.0
"""Of a later row beside one of the training, so that few of them are no noise."""

WEIGHTS_FILE = "model.safetensors"

_EXTRA = "scikit-learn grows the trees: pip install 'llmpq[lengths]', or choose --kind classifier"


@dataclass(frozen=True)
class TreeOptions:
    """How trees are grown; the number of rounds by trials on prompts of several kinds."""

    rounds: int = 60
    seed: int = 0


@dataclass(frozen=True)
class Trees:
    """Trees as arrays `[trees, nodes]`, the first node the root; a leaf leads to itself.

    A prompt goes `left` where the `feature` is at most the `threshold`. `value` of its leaf is
    added to the score of the bucket `column` [trees]. `base` `[buckets]`: scores without trees,
    -inf of a bucket that no row was in. `depth`: steps from a root to the farthest leaf.
    """

    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    value: FloatArray
    column: IntArray
    base: FloatArray

    def scores(self, features: Features) -> FloatArray:
        """Scores of buckets, `[prompts, buckets]`, of `features` `[prompts, features]`."""
        rows = np.arange(len(features))[:, None]
        trees = np.arange(len(self.feature))[None, :]
        node = np.zeros((len(features), len(self.feature)), dtype=np.int64)
        while True:
            goes_left = features[rows, self.feature[trees, node]] <= self.threshold[trees, node]
            below = np.where(goes_left, self.left[trees, node], self.right[trees, node])
            if (below == node).all():
                break
            node = below
        scores = np.tile(self.base, (len(features), 1))
        np.add.at(scores.T, self.column, self.value[trees, node].T)
        return scores

    def check(self, features: int, path: Path) -> None:
        """Raise SpecError unless the arrays are trees of so many features."""
        trees, nodes = self.feature.shape if self.feature.ndim == 2 else (0, 0)
        grids = (self.feature, self.threshold, self.left, self.right, self.value)
        own = np.arange(nodes)
        leads = np.minimum(self.left, self.right)
        sound = (
            trees
            and all(each.shape == (trees, nodes) for each in grids)
            and self.column.shape == (trees,)
            and _within(self.feature, features)
            and _within(self.left, nodes)
            and _within(self.right, nodes)
            and _within(self.column, len(self.base))
            and bool(((leads > own) | ((self.left == own) & (self.right == own))).all())
        )
        if not sound:
            raise SpecError(f"{path} holds no trees of {features} features; train again")


def _within(numbers: IntArray, count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())


@dataclass(frozen=True)
class Boosting:
    """The predictor, as `BucketModel` says.

    `features` `[rows, features]` and `tokens` `[rows]` are what it has learnt from. `reads_ids` as
    `tokenizer`, and `reads_text`, tell what the features are of.
    """

    buckets: tuple[int, ...]
    trees: Trees
    features: Features
    tokens: IntArray
    tokenizer: str | None
    reads_text: bool
    trained_rows: int
    kind: Literal["boosting"] = field(default="boosting", init=False)

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        return [features_of(each, self.reads_text, self.tokenizer is not None) for each in prompts]

    def probabilities(self, encoded: Sequence[Encoded]) -> FloatArray:
        scores = self.trees.scores(np.stack(encoded))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def improved(self, examples: Sequence[Example], rest: Rest) -> Self:
        """Trees of rows kept and as much of `examples`, each up to `MOST_WEIGHT` times a row."""
        features = np.vstack([self.features, *(each.encoded for each in examples)])[-MOST_ROWS:]
        tokens = np.concatenate([self.tokens, [each.tokens for each in examples]])[-MOST_ROWS:]
        weights = np.ones(len(tokens))
        kept = len(tokens) - len(examples)
        weights[kept:] = np.clip(kept / max(1, len(examples)), 1, MOST_WEIGHT)
        return replace(
            self,
            trees=grown(features, buckets_of(tokens, self.buckets), self.buckets, rest, weights),
            features=features,
            tokens=tokens,
            trained_rows=self.trained_rows + len(examples),
        )

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        arrays = {f"trees.{name}": value for name, value in vars(self.trees).items()}
        arrays |= {"rows.features": self.features, "rows.tokens": self.tokens}
        told = {"reads_text": str(int(self.reads_text)), "trained_rows": str(self.trained_rows)}
        contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata=told)

    @classmethod
    def load(cls, folder: Path, buckets: tuple[int, ...], tokenizer: str | None) -> Boosting:
        """Read what `save` wrote; SpecError names what is wrong with the file."""
        path = folder / WEIGHTS_FILE
        arrays, told = _read(path)
        try:
            named = {name.split(".")[1]: arrays[name] for name in arrays if "trees." in name}
            trees = Trees(**named)
            features, tokens = arrays["rows.features"], arrays["rows.tokens"]
            reads_text, trained_rows = bool(int(told["reads_text"])), int(told["trained_rows"])
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"{path} is no predictor of kind boosting: {error!r}") from error
        width = feature_count(tokenizer is not None, reads_text)
        if features.shape != (len(tokens), width) or trees.base.shape != (len(buckets),):
            raise SpecError(
                f"{path} has rows of {list(features.shape)} features and {list(trees.base.shape)} "
                f"buckets; {width} and {len(buckets)} are needed: train again"
            )
        trees.check(width, path)
        return cls(buckets, trees, features, tokens, tokenizer, reads_text, trained_rows)


def feature_count(reads_ids: bool, reads_text: bool) -> int:
    return reads_ids * ID_FEATURES + reads_text * TEXT_FEATURES


def train_boosting(
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
    buckets: tuple[int, ...],
    tokenizer: str | None,
    options: TreeOptions = TreeOptions(),
) -> Boosting:
    """Grow trees from rows [rows], of at least two buckets; SpecError without scikit-learn.

    Texts are read where any prompt has one, ids where `tokenizer` is their digest.
    """
    reads_text = any(each.text for each in prompts)
    rows = [features_of(each, reads_text, tokenizer is not None) for each in prompts]
    features = np.stack(rows)[-MOST_ROWS:]
    lengths = np.asarray(tokens, dtype=np.int64)[-MOST_ROWS:]
    found = buckets_of(lengths, buckets)
    weights = np.ones(len(lengths))
    trees = grown(features, found, buckets, lambda: None, weights, options)
    return Boosting(buckets, trees, features, lengths, tokenizer, reads_text, len(prompts))


def grown(
    features: Features,
    found: IntArray,
    buckets: tuple[int, ...],
    rest: Rest,
    weights: FloatArray,
    options: TreeOptions = TreeOptions(),
) -> Trees:
    """Trees for rows [rows], their `weights` and `found` buckets; with `rest` after each round."""
    try:
        from sklearn.ensemble import GradientBoostingClassifier
    except ImportError as error:
        raise SpecError(_EXTRA) from error

    def monitor(round_number: int, model: object, values: Mapping[str, object]) -> bool:
        rest()
        return False

    # the figures are by trials on prompts of several kinds
    model = GradientBoostingClassifier(
        n_estimators=options.rounds,
        learning_rate=0.15,
        max_depth=4,
        min_samples_leaf=3,
        subsample=0.8,
        max_features="sqrt",
        init="zero",  # so that all it predicts with is in the trees
        random_state=options.seed,
    )
    model.fit(features, found, sample_weight=weights, monitor=monitor)
    return _arrays(model, len(buckets))


def _arrays(model: Any, buckets: int) -> Trees:
    """The trees of a fitted classifier; of two classes it has but the scores of the second."""
    classes: npt.NDArray[np.int64] = model.classes_
    grid = model.estimators_
    columns = classes if grid.shape[1] > 1 else classes[1:]
    trees = [tree.tree_ for tree in grid.ravel()]
    nodes = max(tree.node_count for tree in trees)
    leaf = np.tile(np.arange(nodes), (len(trees), 1))
    feature, left, right = np.zeros_like(leaf), leaf.copy(), leaf.copy()
    threshold, value = np.zeros(leaf.shape), np.zeros(leaf.shape)
    for row, tree in enumerate(trees):
        inner = np.flatnonzero(tree.children_left >= 0)
        feature[row, inner] = tree.feature[inner]
        threshold[row, inner] = tree.threshold[inner]
        left[row, inner] = tree.children_left[inner]
        right[row, inner] = tree.children_right[inner]
        value[row, : tree.node_count] = model.learning_rate * tree.value[:, 0, 0]
    base = np.full(buckets, -np.inf)
    base[classes] = 0.0
    return Trees(feature, threshold, left, right, value, np.tile(columns, len(grid)), base)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names: list[str] = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{path} cannot be read as safetensors: {error}; train again") from error

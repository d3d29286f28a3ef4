"""A cheap predictor: gradient boosting of trees on features of the prompt (Friedman, 2001).

scikit-learn grows the trees. They are kept as arrays of their public `tree_` and computed with by
numpy, so that a run needs no scikit-learn unless it learns, and no file is a pickle. The rows that
it has learnt from are kept beside them as features, no texts, for learning again with later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from llmpq.lengths.buckets import FloatArray, IntArray, buckets_of
from llmpq.lengths.features import ID_FEATURES, TEXT_FEATURES, Features, features_of
from llmpq.lengths.predictor import Encoded, Example, Prompt, Rest
from quant.common.errors import SpecError

MOST_ROWS = 4096
"""Rows that are learnt from, the latest ones; their features take about 5 MB."""

MOST_WEIGHT = 8.0
"""Of a later row beside one of the training, so that few of them are no noise."""

WEIGHTS_FILE = "model.safetensors"

_EXTRA = "scikit-learn grows the trees: pip install 'llmpq[lengths]', or choose --kind classifier"


@dataclass(frozen=True)
class TreeOptions:
    """How trees are grown; defaults by trials on prompts of several kinds."""

    rounds: int = 60
    learning_rate: float = 0.15
    depth: int = 4
    least_leaf: int = 3
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
        """Features of each prompt."""
        return encoded(prompts, self.tokenizer is not None, self.reads_text)

    def probabilities(self, encoded: Sequence[Encoded]) -> FloatArray:
        """As `BucketModel`."""
        scores = self.trees.scores(np.stack(encoded))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def improved(self, examples: Sequence[Example], rest: Rest) -> Self:
        """Trees grown again, from the rows kept and `examples`.

        These together weigh as much as the rows kept, but each at most `MOST_WEIGHT` times one.
        """
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
        """Write the arrays into `folder`."""
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


def encoded(prompts: Sequence[Prompt], reads_ids: bool, reads_text: bool) -> list[Encoded]:
    """The features of each prompt that a predictor of this kind reads."""
    return [features_of(each, reads_text, reads_ids) for each in prompts]


def feature_count(reads_ids: bool, reads_text: bool) -> int:
    """Number of features of a prompt."""
    return reads_ids * ID_FEATURES + reads_text * TEXT_FEATURES


def train_boosting(
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
    buckets: tuple[int, ...],
    tokenizer: str | None,
    options: TreeOptions | None = None,
) -> Boosting:
    """Grow trees from rows [rows], of at least two buckets; SpecError without scikit-learn.

    Texts are read where any prompt has one, ids where `tokenizer` is their digest.
    """
    reads_text = any(each.text for each in prompts)
    features = np.stack(encoded(prompts, tokenizer is not None, reads_text))[-MOST_ROWS:]
    lengths = np.asarray(tokens, dtype=np.int64)[-MOST_ROWS:]
    found = buckets_of(lengths, buckets)
    weights = np.ones(len(lengths))
    trees = grown(features, found, buckets, lambda: None, weights, options or TreeOptions())
    return Boosting(buckets, trees, features, lengths, tokenizer, reads_text, len(prompts))


def grown(
    features: Features,
    found: IntArray,
    buckets: tuple[int, ...],
    rest: Rest,
    weights: FloatArray,
    options: TreeOptions = TreeOptions(),
) -> Trees:
    """Trees for rows [rows] of these `weights` [rows] and of the buckets `found` [rows], at least
    two; with `rest` after each round.
    """
    try:
        from sklearn.ensemble import GradientBoostingClassifier
    except ImportError as error:
        raise SpecError(_EXTRA) from error

    def monitor(round_number: int, model: object, values: Mapping[str, object]) -> bool:
        rest()
        return False

    model = GradientBoostingClassifier(
        n_estimators=options.rounds,
        learning_rate=options.learning_rate,
        max_depth=options.depth,
        min_samples_leaf=options.least_leaf,
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
    """Arrays and metadata of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names: list[str] = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{path} cannot be read as safetensors: {error}; train again") from error

"""The part of a stored tensor that one rank holds, without torch: column-parallel linears are cut
along the rows of their weights, row-parallel ones along the columns (Megatron-LM, Shoeybi et al.
2019, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from quant.scheme import LinearShape, group_size

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Cut:
    """Half-open `begin` to `end` of `size` rows (`dimension` 0) or columns (1) of a tensor."""

    dimension: int
    begin: int
    end: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.begin < self.end <= self.size, "ranks have parts of what there is"

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dimension + (slice(self.begin, self.end),)

    def whole_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        before, after = held[: self.dimension], held[self.dimension + 1 :]
        return (*before, self.size, *after)

    def reaches(self, dimensions: int) -> bool:
        """Whether a tensor of so many dimensions is cut: the bias of a row-parallel linear is
        whole.
        """
        return self.dimension < dimensions

    def whole_groups(self, group: int) -> range:
        return range(self.begin // group * group, min(-(-self.end // group) * group, self.size))

    def within(self, span: range) -> Cut:
        return Cut(self.dimension, self.begin - span.start, self.end - span.start, len(span))


def part_group(group: int, cut: Cut) -> int:
    """Columns of a part that share a scale: `group`, unless the cut goes through a group."""
    return group if cut.dimension == ROWS else gcd(group, cut.begin, cut.length)


def part_shape(shape: LinearShape, cut: Cut) -> LinearShape:
    if cut.dimension == ROWS:
        return LinearShape(shape.in_features, cut.length, shape.stored_group)
    group = part_group(shape.group, cut)
    is_usual = shape.stored_group is None and group == group_size(cut.length)
    return LinearShape(cut.length, shape.out_features, None if is_usual else group)
